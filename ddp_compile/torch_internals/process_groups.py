"""Process groups and their stores."""

from __future__ import annotations

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
from torch import Tensor


def broadcast_coalesced(
    process_group: Any, tensors: Sequence[Tensor], chunk_bytes: int, src_rank_in_group: int
) -> None:
    """Broadcast tensors of any dtypes in chunks of about ``chunk_bytes``, one collective for each dtype and chunk."""
    from torch.distributed import _broadcast_coalesced  # type: ignore[attr-defined]

    with preserved_versions(tensors):
        _broadcast_coalesced(process_group, list(tensors), chunk_bytes, src_rank_in_group)


def preserved_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[None]:
    """While buffers are made equal on all ranks: let autograd take the new values for the old ones.

    Otherwise a forward before that, whose backward is still to come, could not be differentiated.
    """
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tuple(tensors))


def started(work: Any) -> Any:
    """The work of a collective that was called with ``async_op=True``; None is for ranks outside of its group."""
    assert work is not None
    return work


@contextlib.contextmanager
def unprofiled_messages() -> Iterator[None]:
    """Let gloo's messages from rank to rank, started inside, be in no trace.

    The work of one that a profiler has seen ends its range when it is waited for. Where the profiler has stopped by
    then, that writes into memory which the profiler has freed (torch 2.13: a process crashes some time later).
    """
    if not torch.autograd.profiler._is_profiler_enabled:
        yield
        return
    torch._C._autograd._enable_record_function(False)
    try:
        yield
    finally:
        torch._C._autograd._enable_record_function(True)


def all_gather_single(output: Tensor, input: Tensor, process_group: Any) -> Any:
    """Start to gather ``input`` of every rank, one behind the other, in ``output``; returns the work.

    ``torch.distributed.all_gather_single`` goes by its old name before torch 2.13.
    """
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    return started(gather(output, input, group=process_group, async_op=True))


def reduce_scatter_single(output: Tensor, input: Tensor, process_group: Any) -> Any:
    """Start to add up ``input`` over the ranks, each of which gets its part in ``output``; returns the work.

    ``torch.distributed.reduce_scatter_single`` goes by its old name before torch 2.13.
    """
    scatter = getattr(torch.distributed, "reduce_scatter_single", None) or torch.distributed.reduce_scatter_tensor
    return started(scatter(output, input, group=process_group, async_op=True))


def backend_name(process_group: Any, device: torch.device) -> str:
    """What sends tensors on this device: "gloo", "nccl"; the group's own name where it is written in Python."""
    try:
        return str(process_group._get_backend(device).name())
    except RuntimeError:  # a group without backends
        return str(process_group.name())


def device_types(process_group: Any) -> list[str]:
    """Kinds of devices whose tensors the process group sends, as "cpu"; none for a group that is written in Python."""
    return sorted(device.type for device in process_group._device_types)


_making_groups = threading.Lock()


@contextlib.contextmanager
def groups_of_some_ranks(name: str) -> Iterator[None]:
    """Inside, ``new_group(use_local_synchronization=True)`` needs the ranks of the new group and nobody else.

    Torch's own names of such groups follow from how many groups a rank has, or has made so far. A rank that has made
    more groups than another, as the leader of a node has, would wait forever. Groups that only some ranks make would
    count too, so that later ones of all ranks do not find each other. Inside, the group gets ``name``, on which its
    ranks have agreed, and is not counted.

    If the default group has a bound device (``init_process_group(device_id=...)``), ``new_group`` splits the new
    communicator from that of the default group and connects at once. ``ncclCommSplit`` needs every rank of the default
    group, but those outside of the new group never come here. ``new_group`` has no argument against that (its
    ``device_id=None`` means the default group's device), so the default group, an object of this process, has no bound
    device inside. The new group then has none either: its communicator is made among its own ranks, at its first
    collective.
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


def group_timeout(process_group: Any, device: torch.device) -> timedelta:
    """How long a collective of tensors on this device may take; torch's default where the backend does not say."""
    try:
        return process_group._get_backend(device).options._timeout
    except (RuntimeError, AttributeError):  # a process group, or a backend, that is written in Python
        return torch.distributed.constants.default_pg_timeout


def disabled_join_config() -> Any:
    """What a Joinable is told outside of ``torch.distributed.algorithms.Join``."""
    from torch.distributed.algorithms.join import _JoinConfig

    return _JoinConfig.construct_disabled_join_config()


def holds_server(store: Any) -> bool:
    """Whether a store ends with this process: whether it is, behind prefixes, a TCPStore with the server in it."""
    return _is_tcp(store) and re.search(r"server=TCPServer\(", repr(_innermost(store))) is not None


def shut_down_connection(store: Any) -> bool:
    """Let whatever waits for the answer of a TCPStore's server fail at once; False for a store of another kind.

    torch 2.13 has no limit for that wait (recvBytes of csrc/distributed/c10d/TCPStore.cpp), and no way to end it. The
    number of the socket stands in the store's text (``SocketImpl::repr`` of csrc/distributed/c10d/socket.cpp).
    """
    found = re.search(r"SocketImpl\(fd=(\d+)", repr(_innermost(store))) if _is_tcp(store) else None
    if found is None:
        return False
    # A copy of the number: closing it leaves the store's own to the store. An OSError: there is no connection left.
    with socket.socket(fileno=os.dup(int(found[1]))) as connection, contextlib.suppress(OSError):
        if connection.getpeername()[1] == _innermost(store).port:
            connection.shutdown(socket.SHUT_RDWR)
    return True


def _innermost(store: Any) -> Any:
    return getattr(store, "_underlying_non_prefix_store", store)


def _is_tcp(store: Any) -> bool:
    return isinstance(_innermost(store), torch.distributed.TCPStore)  # type: ignore[attr-defined]
