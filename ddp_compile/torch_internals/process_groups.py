"""Process groups and their stores."""

import contextlib
import os
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def broadcast_coalesced(
    process_group: Any, tensors: Sequence[Tensor], chunk_bytes: int, src_rank_in_group: int
) -> None:
    """Broadcast tensors of any dtypes in chunks of about ``chunk_bytes``, one collective for each dtype and chunk."""
    from torch.distributed import _broadcast_coalesced  # type: ignore[attr-defined]

    with preserved_versions(tensors):
        _broadcast_coalesced(process_group, list(tensors), chunk_bytes, src_rank_in_group)


def preserved_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """Hide writes to tensors from autograd, so that forwards that have read them can still be differentiated."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tuple(tensors))


def started(work: dist.Work | None) -> dist.Work:
    """The work of a collective that was called with ``async_op=True``. Only ranks outside its group get None."""
    assert work is not None
    return work


@contextlib.contextmanager
def unprofiled_messages() -> Iterator[None]:
    """Keep gloo's point-to-point messages that are started inside out of traces.

    If a profiler saw the message start, waiting for its work ends its range. If the profiler has stopped by then, this
    writes to memory that the profiler has freed (torch 2.13: the process crashes some time later).
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def all_gather_single(output: Tensor, input: Tensor, process_group: Any) -> dist.Work:
    """Start gathering ``input`` of every rank into ``output``, in the order of ranks; returns the work.

    torch before 2.13 has ``torch.distributed.all_gather_single`` under an older name.
    """
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return started(gather(output, input, group=process_group, async_op=True))


def reduce_scatter_single(output: Tensor, input: Tensor, process_group: Any) -> dist.Work:
    """Start adding up ``input`` over the ranks, each of which gets its part in ``output``; returns the work.

    torch before 2.13 has ``torch.distributed.reduce_scatter_single`` under an older name.
    """
    scatter = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    return started(scatter(output, input, group=process_group, async_op=True))


def backend_name(process_group: Any, device: torch.device) -> str:
    """The backend for tensors on this device, "gloo" for example; the group's own name if it is written in Python."""
    try:
        return str(process_group._get_backend(device).name())
    except RuntimeError:  # a group without backends
        return str(process_group.name())


def device_types(process_group: Any) -> list[str]:
    """Types of devices that the process group has backends for, "cpu" for example; none if it is written in Python."""
    return sorted(device.type for device in process_group._device_types)


_making_groups = threading.Lock()


@contextlib.contextmanager
def groups_of_some_ranks(name: str) -> Iterator[None]:
    """Inside, ``new_group(use_local_synchronization=True)`` involves only the ranks of the new group.

    torch names such groups by the number of groups that a rank has, or has made so far. A rank that has made more
    groups than another, such as the leader of a node, would wait forever, and groups of some ranks would shift the
    names of later groups of all ranks. Inside, the group gets ``name``, on which its ranks have agreed, and is not
    counted.

    If the default group has a bound device (``init_process_group(device_id=...)``), ``new_group`` splits the new
    communicator from that of the default group at once. ``ncclCommSplit`` needs every rank of the default group, but
    ranks outside the new group never come here. No argument of ``new_group`` prevents this (``device_id=None`` means
    the default group's device). So the default group, an object of this process, has no bound device inside, and the
    new group makes its communicator among its own ranks at its first collective.
    """
    c10d: Any = torch.distributed.distributed_c10d
    default_group: Any = torch.distributed.group.WORLD
    with _making_groups:
        name_by_ranks, group_count = c10d._hash_ranks_to_str, c10d._world.group_count
        bound_device = default_group.bound_device_id
        c10d._hash_ranks_to_str = lambda ranks: name
        default_group.bound_device_id = None
        try:
            yield
        finally:
            default_group.bound_device_id = bound_device
            c10d._hash_ranks_to_str, c10d._world.group_count = name_by_ranks, group_count


def is_registered(process_group: Any) -> bool:
    """Whether ``torch.distributed`` knows the group; not after ``destroy_process_group``."""
    c10d: Any = torch.distributed.distributed_c10d
    return process_group in c10d._world.pg_map


def group_timeout(process_group: Any, device: torch.device) -> timedelta:
    """The timeout of collectives on this device; torch's default if the backend has none."""
    try:
        return process_group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # a process group or backend in Python
        return torch.distributed.constants.default_pg_timeout


def disabled_join_config() -> Any:
    """The config of a Joinable outside ``torch.distributed.algorithms.Join``."""
    from torch.distributed.algorithms.join import _JoinConfig

    return _JoinConfig.construct_disabled_join_config()


def holds_server(store: Any) -> bool:
    """Whether a store, without its prefixes, is a TCPStore whose server is in this process and ends with it."""
    return _is_tcp(store) and re.search(r"server=TCPServer\(", repr(_innermost(store))) is not None


def shut_down_connection(store: Any) -> bool:
    """Make every wait for an answer of a TCPStore's server fail at once; False for a store of another kind.

    torch 2.13 has no limit for that wait (recvBytes of csrc/distributed/c10d/TCPStore.cpp) and no way to end it. The
    ``repr`` of the store has the socket's number (``SocketImpl::repr`` of csrc/distributed/c10d/socket.cpp).
    """
    found = re.search(r"SocketImpl\(fd=(\d+)", repr(_innermost(store))) if _is_tcp(store) else None
    if found is None:
        return False
    # A copy of the number, so that closing it leaves the store's open. OSError: the connection is gone.
    with socket.socket(fileno=os.dup(int(found[1]))) as connection, contextlib.suppress(OSError):
        if connection.getpeername()[1] == _innermost(store).port:
            connection.shutdown(socket.SHUT_RDWR)
    return True


def _innermost(store: Any) -> Any:
    return getattr(store, "_underlying_non_prefix_store", store)


def _is_tcp(store: Any) -> bool:
    return isinstance(_innermost(store), torch.distributed.TCPStore)  # type: ignore[attr-defined]
