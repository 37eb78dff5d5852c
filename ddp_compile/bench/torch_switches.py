"""Private parts of torch that the benchmark needs. Tested with torch 2.13."""

from functools import partial
from typing import Any

import torch
import torch._dynamo.utils


def import_compilers() -> None:
    """Import what the first compilation imports."""
    import torch._inductor.compile_fx  # noqa: F401


def num_compiled_graphs() -> int:
    """Graphs that AOTAutograd has compiled in this process: forwards, or parts of them that were cut apart."""
    return torch._dynamo.utils.counters["aot_autograd"]["total"]


def _mib_of_bucket(cap_mib: float, _index: int) -> float:
    return cap_mib


def overlapped_all_reduces(bucket_cap_mb: float, mode: str, device: str) -> dict[str, Any]:
    """Inductor options that bucket functional all-reduces and overlap them with computation.

    The capacity is that of every bucket: inductor asks for it once. ``mode`` and ``options`` of ``torch.compile``
    exclude each other, so the options of the mode are among these.
    """
    options: dict[str, Any] = {
        # A partial of a module's function can be pickled, as keys of compile caches require.
        "bucket_all_reduces_fx_bucket_size_determinator": partial(_mib_of_bucket, bucket_cap_mb),
        "bucket_all_reduces_fx": "all",
        **torch._inductor.list_mode_options(mode),
    }
    if device == "cuda":
        options |= {
            "aten_distributed_optimizations.enable_overlap_scheduling": True,
            # Benchmarks of operations would differ between ranks.
            "aten_distributed_optimizations.compute_estimator": "analytical",
        }
    else:
        # Overlap scheduling asks Triton for the bandwidth of a GPU; a CPU has only these passes.
        options |= {
            "reorder_for_compute_comm_overlap": True,
            "reorder_for_compute_comm_overlap_passes": ["sink_waits", "raise_comms"],
        }
    return options
