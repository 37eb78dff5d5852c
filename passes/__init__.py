"""Passes over graphs: functions ``(gm, ctx) -> PassResult``, run in this order by ``ddp_compile/compile/pipelines.py``.

A Dynamo graph that is to be cut (``split="forward"`` and ``"auto"``), all in ``forward/``:

- ``unpack_sizes.py``: turns ``x.size()``, a tuple, into SymInts, which may cross a cut.
- ``functionalize_inplace.py``: turns ``x += y`` into ``x = x + y`` if the old value is in use under no other name.
- ``unalias_inplace_results.py``: uses the tensor that was written instead of the result of the in-place operation.
- ``sink_parameter_views.py``: moves views and casts of parameters to their first use.
- ``split_forward.py``: cuts the graph at bucket boundaries; ``partition_graph.py`` makes the partitions.

AOTAutograd's backward graph, if buckets are launched inside it (``split="backward"`` and ``"auto"``), in ``backward/``:

- ``bucket_backward.py``: calls the reducer after the last gradient of each bucket.
- ``keep_sparse_parts.py``: keeps the memory of sparse gradients from being reused before the graph ends.
- ``return_written_outputs.py``: makes operators write to what the graph returns; for inductor only.

AOTAutograd's forward graph, with a sharded optimizer:

- ``forward/await_parameters.py``: waits for the parameters of each bucket before their first use.

``analysis/`` answers questions that several passes ask: ``graph_nodes.py`` about nodes of Dynamo graphs,
``aten_values.py`` about nodes of AOTAutograd's graphs, ``grad_ready_order.py`` about the order of gradients,
``views.py`` about views, ``cut_constraints.py`` about places that must not be cut. ``pipeline.py`` runs the passes.

To add a pass, write ``forward/verb_object.py`` or ``backward/verb_object.py`` and put its function into the tuple of
its pipeline in ``ddp_compile/compile/pipelines.py``. CONTRIBUTING.md has the steps.
"""
