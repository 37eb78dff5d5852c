"""Passes over graphs: functions ``(gm, ctx) -> PassResult``. The first line of each file says what its pass does.

``forward/`` has the passes over Dynamo graphs that are to be cut (``split="forward"`` and ``"auto"``), and
``await_parameters.py`` for AOTAutograd's forward graph with a sharded optimizer. ``backward/`` has those over
AOTAutograd's backward graph, if buckets are launched inside it (``split="backward"`` and ``"auto"``). ``analysis/``
answers questions that several passes ask. ``ddp_compile/compile/pipelines.py`` has the order of the passes, and
``pipeline.py`` runs them. CONTRIBUTING.md says how to add one.
"""
