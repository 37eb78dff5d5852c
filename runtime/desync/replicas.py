"""At agreement points, the ranks compare the bits of their parameters.

Note [Replicas]
Every rank steps by the same bits of gradients, so parameters keep the same bits on every rank. A flipped bit of memory,
a write on one rank or a step that one rank leaves out ends that without a word: gradients are still averaged, but those
of different parameters. So at the agreement points of this model, each rank reads the parameters of each bucket as rows
of 184 integers of 64 bits, adds up the rows, and the ranks compare digests of the sums as they compare fingerprints.
Sums of integers do not depend on the order in which a device adds, and here not on memory layout. If one value differs,
so does a sum. If several do, the differences of each column would have to cancel modulo 2**64. With one sum for all,
they do so for swapped rows and masks, and for an even number of flipped signs of float64. So there is an odd number of
rows, what is left is compared as it is, and few tensors have a row that is a multiple of 184 integers.

The sums are started when the backward begins, and read before the last bucket is launched. Where there are streams, the
host thus waits for the forward alone, and the device goes on with the backward. Nothing writes parameters in between.

If sums differ, the ranks post them, and then those of each parameter in the first bucket that differs. States of
optimizers and buffers that `Replicas.also_compare` has been given are compared as further buckets.
"""

import ctypes
import hashlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from ddp_compile import torch_internals
from ddp_compile.config import CheckReplicas
from ddp_compile.errors import RanksDifferError, ReplicationError, format_ranks, on_ranks, shorten_names, this_rank
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.collectives import broadcast_all
from ddp_compile.runtime.desync.comparison import Comparison
from ddp_compile.runtime.desync.group_store import StoreLostError
from ddp_compile.runtime.desync.model_order import ModelOrder, is_agreement_point

log = logging.getLogger(__name__)

# Smaller tensors of one dtype are first copied together, since starting an operator costs more than reading them.
_SMALL_BYTES = 256 * 1024
_ROW = 184  # 8 * 23; on CPUs the sums take little longer than a single one
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Replicas:
    """Compares the parameters of one model at its agreement points, those of its own order; see Note [Replicas]."""

    def __init__(self, check: CheckReplicas, order: ModelOrder, rank: int, ranks: Sequence[int]) -> None:
        self._check, self._order, self._ranks = check, order, tuple(ranks)
        self._comparison = Comparison("replicas", rank, ranks)
        self._optimizers: Sequence[Optimizer] = ()
        self._buffers: Callable[[], Mapping[str, Tensor]] = dict
        self._sums: BitSums | None = None  # of the iteration under way
        self._compared: Mapping[str, Mapping[str, Tensor]] = {}
        self._number = 0  # of the iteration whose sums are compared
        self._is_due = False  # until they have been
        self._source: int | None = None  # the global rank from which the next forward broadcasts
        self._has_repaired = False  # at the last agreement point

    def also_compare(
        self,
        optimizers: Sequence[Optimizer],
        buffers: Callable[[], Mapping[str, Tensor]],
        reduced: Mapping[str, Tensor],
    ) -> None:
        """Compare the states of these optimizers and these buffers too; see ``ReplicatedModule.check_replicas_of``."""
        if self._check != "raise":
            raise ValueError(
                f"check_replicas_of() was called with check_replicas={self._check!r}, which compares nothing or repairs"
                " parameters only; pass check_replicas='raise' to ddp_compile()"
            )
        for optimizer in optimizers:
            _states(optimizer, reduced)
        _comparable(buffers())
        self._optimizers, self._buffers = optimizers, buffers

    def are_compared_in(self, iteration_number: int) -> bool:
        """Whether `add_up` has to be called when the backward of an iteration begins."""
        return bool(self._check) and len(self._ranks) > 1 and is_agreement_point(iteration_number)

    def add_up(self, buckets: Sequence[Mapping[str, Tensor]]) -> None:
        """Start adding up the parameters of each bucket, given by name, which are complete."""
        reduced = {name: parameter for bucket in buckets for name, parameter in bucket.items()}
        self._compared = {
            **{f"parameters of bucket {i}": bucket for i, bucket in enumerate(buckets)},
            "states of optimizers": {k: v for each in self._optimizers for k, v in _states(each, reduced).items()},
            "buffers": _comparable(self._buffers()),
        }
        self._sums = BitSums([list(tensors.values()) for tensors in self._compared.values()])

    def last_bucket_is_launched(self, iteration_number: int) -> None:
        """Before the last bucket of the iteration is launched, tell the other ranks the sums, if there are any."""
        if self._sums is not None:
            self._number, self._is_due = iteration_number, True
            self._comparison.add(self._order, iteration_number, self._sums.text())
            self._sums = None

    def compare(self) -> None:
        """After the collectives, compare the sums; raises a RanksDifferError on every rank unless a repair follows."""
        if not self._is_due:
            return
        self._is_due = False
        said = self._comparison.difference(self._number, self._first_difference)
        if said is None:
            self._has_repaired = False
            return
        number, source, who = said.split(" ", 2)
        compared = list(self._compared)[int(number)]
        what = (
            f"{this_rank()}: at iteration {self._number} the {compared} ({self._names_that_differ(compared)}) do not"
            f" have the same bits on every rank: {who}"
        )
        if self._check != "repair" or source == "none" or self._has_repaired:
            raise RanksDifferError(f"{what}. {self._way_out(source, compared)}")
        self._source = int(source)
        log.warning(f"{what}. The next forward broadcasts all reduced parameters from rank {source}")

    def iteration_ends(self) -> None:
        """The iteration is over, in whatever way."""
        self._sums, self._is_due = None, False
        self._compared = {}  # which keeps states of optimizers alive
        self._comparison.forget()

    @property
    def need_repair(self) -> bool:
        """Whether the next synchronized forward has to call `repair`; the same on every rank."""
        return self._source is not None

    def repair(self, parameters: Sequence[Tensor], process_group: dist.ProcessGroup) -> None:
        """Make the parameters those of the majority; raises RuntimeError if another rank does not come."""
        assert self._source is not None
        source, self._source = self._source, None
        broadcast_all(parameters, process_group, self._ranks.index(source))
        self._has_repaired = True

    def _first_difference(self, texts: Mapping[int, str]) -> str | None:
        """Where the first difference is, the first rank of the majority or "none", and who differs."""
        ranks_of: dict[str, list[int]] = {}
        for rank, text in texts.items():
            ranks_of.setdefault(text, []).append(rank)
        if len(ranks_of) == 1:
            return None
        compared = zip(*(text.split() for text in ranks_of), strict=True)
        number = next(i for i, sums in enumerate(compared) if len(set(sums)) > 1)
        most = max(ranks_of.values(), key=len)
        if 2 * len(most) > len(texts):
            others = sorted(set(texts) - set(most))
            return f"{number} {most[0]} those {on_ranks(others)} differ from those {on_ranks(most)}"
        groups = " and ".join(format_ranks(ranks) for ranks in list(ranks_of.values())[:8])
        return f"{number} none ranks {groups} differ, and none of these is a majority"

    def _names_that_differ(self, compared: str) -> str:
        """The first tensors that differ; all of them if the ranks have different ones, or their answers do not come."""
        tensors = self._compared[compared]
        names, sums = list(tensors), BitSums([[tensor] for tensor in tensors.values()]).text()

        def describe(texts: Mapping[int, str]) -> str | None:
            by_rank = [text.split() for text in texts.values()]
            if len(set(map(len, by_rank))) > 1:
                return None
            return " ".join(str(i) for i, found in enumerate(zip(*by_rank, strict=True)) if len(set(found)) > 1)

        try:
            name = f"{self._number}/{compared}"
            said = self._comparison.describe(self._order, name, sums, describe, self._number)
        except StoreLostError:
            said = None
        return shorten_names([names[int(i)] for i in said.split()] if said else names) or "none on this rank"

    def _way_out(self, source: str, compared: str) -> str:
        if self._has_repaired and self._check == "repair":
            return (
                "They were made equal at the agreement point before, so their optimizer's states differ, or code writes"
                " them on some ranks only: start again from a checkpoint, and look for that code"
            )
        if not compared.startswith("parameters"):
            return (
                "A bit has flipped, some ranks alone have written them or left out a step, or other ranks have passed"
                " other optimizers or buffers to check_replicas_of(): start again from a checkpoint of before. Leave"
                " what differs on purpose out of that call: buffers such as BatchNorm's, states of which each rank has"
                " a part"
            )
        repair = "" if source == "none" else ", or let check_replicas='repair' broadcast those of the majority"
        return (
            "A bit has flipped, or some ranks alone have written them or left out a step, since the previous agreement"
            f" point: start again from a checkpoint of before{repair}. If they differ on purpose, during this backward"
            " alone (noise, SAM) or always, pass check_replicas=False"
        )


class BitSums:
    """Digests of sums of the bits of each of some lists of tensors, which are being computed; see Note [Replicas].

    The tensors are of any dtype. Those of DTensors are this rank's parts.
    """

    def __init__(self, lists: Sequence[Sequence[Tensor]]) -> None:
        self._digests = [hashlib.sha256(str([each.numel() for each in tensors]).encode()) for tensors in lists]
        self._on_device: list[tuple[int, Tensor]] = []  # of which list, and its sums
        with torch.no_grad(), torch_internals.outside_transforms():
            for number, tensors in enumerate(lists):
                for sums in _sums_of_bits(torch_internals.local_tensors(tensors)):
                    if streams.has_streams(sums.device):
                        self._on_device.append((number, sums))
                    else:  # at once, which needs no memory during the backward
                        self._add(number, sums)
            if self._on_device:
                self._flat = torch.cat([sums for _, sums in self._on_device])
                self._known = streams.record(self._flat.device)

    def text(self) -> str:
        """Sixteen hex digits for each list; the host waits until they are known, and for nothing that came later."""
        if self._on_device:
            with streams.SideStream(self._flat.device).on():
                self._known.wait()
                host = self._flat.cpu()
            parts = host.split([sums.numel() for _, sums in self._on_device])
            for (number, _), sums in zip(self._on_device, parts, strict=True):
                self._add(number, sums)
        return " ".join(digest.hexdigest()[:16] for digest in self._digests)

    def _add(self, number: int, sums: Tensor) -> None:
        self._digests[number].update(ctypes.string_at(sums.data_ptr(), sums.nbytes))  # numpy need not be there


def _states(optimizer: Any, reduced: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The states of an optimizer for these parameters, given by name, in an order that is the same on every rank.

    Raises a TypeError if it is no optimizer, and a ReplicationError if it steps none of them, or has parts of states.
    """
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class_name = type(optimizer).__name__
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(f"check_replicas_of() got a {class_name}; pass optimizers: check_replicas_of(optimizer, ...)")
    name_of = {parameter: name for name, parameter in reduced.items()}
    stepped = [p for group in optimizer.param_groups for p in group["params"] if p in name_of]
    if not stepped or isinstance(optimizer, ZeroRedundancyOptimizer):
        raise ReplicationError(
            f"{this_rank()}: check_replicas_of() has got an optimizer of class {class_name} that is sharded, or steps"
            " no reduced parameter of this model, so its states cannot be compared; leave it out"
        )
    states = {name_of[p]: optimizer.state.get(p, {}) for p in stepped}
    states = {name: each if isinstance(each, Mapping) else {"state": each} for name, each in states.items()}
    found = {f"{class_name}.{key} of {name}": state for name, each in states.items() for key, state in each.items()}
    found = {name: torch.tensor(state) if isinstance(state, int) else state for name, state in found.items()}
    # Not floats, since LBFGS keeps the rank's own loss.
    return _comparable({name: state for name, state in found.items() if isinstance(state, Tensor)})


def _comparable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same by name; raises a ReplicationError if the bits of one cannot be read."""
    for name, tensor in tensors.items():
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized or tensor.is_nested:
            raise ReplicationError(
                f"{this_rank()}: check_replicas_of() cannot compare {name}, which is sparse, quantized, nested or on"
                " the device meta; leave its optimizer, or buffers=True, out"
            )
    return dict(sorted(tensors.items()))


def _sums_of_bits(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Sums of the bits of tensors as integers of 64 bits, in index order; what is left at an end, as smaller ones.

    Which elements share an integer depends on shapes and dtypes alone, so that equal values have equal sums. These are
    contiguous int64 tensors of one dimension.
    """
    small: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.nbytes < _SMALL_BYTES:
            small.setdefault((tensor.dtype, tensor.device), []).append(tensor)
        else:
            yield from _sums_of_flat(tensor.contiguous().view(-1))
    for alike in small.values():
        yield from _sums_of_flat(torch_internals.flatten(alike))


def _sums_of_flat(flat: Tensor) -> Iterator[Tensor]:
    flat = flat.resolve_neg().detach()
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    of_one = flat.view(_INTEGERS[flat.element_size()])
    in_64_bits = 8 // flat.element_size()
    end = flat.numel() // in_64_bits * in_64_bits
    words = of_one[:end].view(torch.int64)
    num_rows = words.numel() // _ROW
    num_rows -= num_rows > 0 and num_rows % 2 == 0
    if num_rows:
        yield words[: num_rows * _ROW].view(num_rows, _ROW).sum(0)
    yield words[num_rows * _ROW :]
    yield of_one[end:].to(torch.int64)
