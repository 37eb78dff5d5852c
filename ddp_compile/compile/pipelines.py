"""The passes in the order in which they run, and a digest of their sources for compile caches."""

import functools
import hashlib
import importlib.util
import pkgutil
from collections.abc import Sequence

from ddp_compile import passes
from ddp_compile.passes.backward.bucket_backward import bucket_backward_pass
from ddp_compile.passes.backward.keep_sparse_parts import keep_sparse_parts_pass
from ddp_compile.passes.backward.return_written_outputs import return_written_outputs_pass
from ddp_compile.passes.forward.await_parameters import await_parameters_pass
from ddp_compile.passes.forward.functionalize_inplace import functionalize_inplace_pass
from ddp_compile.passes.forward.sink_parameter_views import sink_parameter_views_pass
from ddp_compile.passes.forward.split_forward import split_forward_pass
from ddp_compile.passes.forward.unalias_inplace_results import unalias_inplace_results_pass
from ddp_compile.passes.forward.unpack_sizes import unpack_sizes_pass
from ddp_compile.passes.pipeline import Pass

#: The passes over a training graph that is to be cut.
FORWARD_SPLIT: tuple[Pass, ...] = (
    unpack_sizes_pass,
    functionalize_inplace_pass,
    unalias_inplace_results_pass,
    sink_parameter_views_pass,
    split_forward_pass,
)

#: The passes over a backward graph that launches buckets, and those that inductor needs after them.
BACKWARD_SPLIT = (bucket_backward_pass, keep_sparse_parts_pass)
FOR_INDUCTOR = (return_written_outputs_pass,)

#: The passes over AOTAutograd's forward graph if a sharded optimizer gathers parameters while it runs.
WHOLE_FORWARD = (await_parameters_pass,)

#: Other modules that compiled code depends on.
_BESIDE_THE_PASSES = ("ddp_compile.graph_ops", "ddp_compile.torch_internals.backward_compile")


@functools.cache
def pipelines_version() -> str:
    """A digest that changes with each source that compiled code depends on. Keys of compile caches contain it."""
    names = [found.name for found in pkgutil.walk_packages(passes.__path__, f"{passes.__name__}.")]
    return digest_of_sources([*names, *_BESIDE_THE_PASSES])


def digest_of_sources(modules: Sequence[str]) -> str:
    """Sixteen hex digits for the files of modules, given by full names in any order.

    If a module is installed without its source, its compiled file counts.
    """
    digest = hashlib.sha256()
    for name in sorted(modules):
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.origin is not None and spec.loader is not None, name
        content = spec.loader.get_data(spec.origin)  # type: ignore[attr-defined]  # of every loader of files
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()[:16]
