"""Low-precision decentralised data parallelism: ranks in a ring send each other eight bits of what has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress
from ddp_compile.kernels.contract.reference import row_bytes
from ddp_compile.kernels.executors import KERNEL_DTYPES
from ddp_compile.runtime.algorithms.after_step import AfterStep
from ddp_compile.runtime.algorithms.flat_parameters import FlatParameters, average_over
from ddp_compile.runtime.algorithms.peers import (
    exchange,
    objection_to_messages,
    refuse_interval,
    refuse_state_of_another,
    wait_for,
)
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, Traits
from ddp_compile.runtime.comm.process_groups import NodeGroups
from ddp_compile.runtime.comm.streams import used_here, work_blocks_host
from ddp_compile.runtime.comm.transfers import Transfer, keep_after

#: Values that share a minimum and a maximum on the wire; 8 to 23 bytes are sent for each such chunk.
CHUNK_NUMEL = 1 << 16
#: Values that are computed at once: what is read, and what is made of it, fits into a processor's cache.
BLOCK_NUMEL = 4 * CHUNK_NUMEL
#: Values that are sent at once, while the next ones are computed; whole blocks.
SEGMENT_NUMEL = 8 * BLOCK_NUMEL
#: Added to the tags of whole parameters: a rank that sends them alone is waited for in vain, and meets nothing else.
_WHOLE = 1 << 30


class LowPrecisionDecentralizedAlgorithm(AfterStep):
    """Each rank keeps what the last exchange left of its own parameters, W, and of both neighbours', L and R.

    After a step has made x of W, it sends q = D(C(z)) of z = x + L / 3 + R / 3 - 5 / 3 W to both neighbours, and x
    becomes W + q, the new W. What comes from them is added to L and R, which nobody reads before the next exchange: so
    messages are under way while the rank trains on. Every rank adds the same bytes to the same values: when they are
    there, L is the left neighbour's W, and R the right one's, in every bit.

    Args:
        process_group: All ranks.
        communication_interval: See `LowPrecisionDecentralized`.
        hierarchical: See `LowPrecisionDecentralized`.

    Source: Bagua (Gan et al. 2021, arXiv 2107.01499), whose ring follows Tang et al. 2018 (arXiv 1803.06443).
    """

    traits = Traits(payload="parameters", takes_dtypes=KERNEL_DTYPES)

    def __init__(self, process_group: dist.ProcessGroup, communication_interval: int, hierarchical: bool) -> None:
        super().__init__(process_group)
        self.name = f"low-precision decentralized average (every {communication_interval}"
        self.name += ", hierarchical)" if hierarchical else ")"
        self._interval = communication_interval
        self._hierarchical = hierarchical
        self._num_steps = 0
        self._num_exchanges = 0
        self._under_way: dict[int, _Messages] = {}  # of the last exchange, by the number of the segment
        self._begins_anew = False  # parameters were loaded, and W, L and R were not

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """The process group has to send point-to-point messages from the parameters' device."""
        return objection_to_messages(self.name, self._process_group, next(iter(parameters.values())).device)

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Take process groups of its own, and copies of the parameters.

        Raises:
            ValueError: On every rank, where a rank does not know its node, or the nodes have different sizes.
        """
        super().attach(parameters)
        device = parameters[0].device
        if self._hierarchical:
            self._groups = NodeGroups.of(self._process_group, device, self.name)
        else:
            self._groups = NodeGroups.of_single_ranks(self._process_group, device)
        if len(set(self._groups.sizes)) > 1:
            raise ValueError(
                f"the {self.name} takes nodes of one size, since in its ring every node counts alike, and these have"
                f" {', '.join(map(str, self._groups.sizes))} ranks; pass hierarchical=False"
            )
        self._parameters = FlatParameters(parameters)
        leaders = self._groups.leaders
        has_two_neighbours = leaders is not None and leaders.size() > 2
        self._own, self._left = self._parameters.new(), self._parameters.new()
        self._right = self._parameters.new() if has_two_neighbours else self._left  # both are one rank
        for flats in self._kept().values():
            self._parameters.read(flats)
        if leaders is not None and work_blocks_host(leaders, device):
            keep_after(self, partial(_let_neighbours_have, self._under_way))

    def detach(self, together: bool) -> None:
        """Average over all ranks, see `CommAlgorithm.detach`."""
        super().detach(together)
        if together:
            self._receive()
            average_over(self._process_group, self._parameters, self._failed)

    @property
    def meets_others(self) -> bool:
        """Whether this step is one of the interval."""
        return self._num_steps % self._interval == 0

    def after_backward(self) -> None:
        """See `AfterStep.after_backward`."""
        super().after_backward()
        self._num_steps += 1

    def communicate(self) -> None:
        """One exchange: the step that was done is one of the interval."""
        if self._process_group.size() > 1:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        groups = self._groups
        blocks = self._parameters.blocks(BLOCK_NUMEL) if groups.within is None and not self._begins_anew else None
        if blocks is None or groups.leaders is None:
            self._exchange_copies()
        else:
            self._exchange_with_neighbours(blocks, groups.leaders)
        self._num_exchanges += 1

    def _exchange_copies(self) -> None:
        """Where the parameters are not what the neighbours hear of, but a node's mean, or all of them as they are."""
        groups = self._groups
        flats = self._parameters.new()
        self._parameters.read(flats)
        if groups.within is not None:
            for flat in flats:
                flat.mul_(1 / groups.sizes[groups.node])
            wait_for([groups.reduce(flat) for flat in flats], self._failed)
        if groups.leaders is not None and groups.leaders.size() > 1:
            if self._begins_anew:
                self._exchange_whole(flats, groups.leaders)
            else:
                blocks = [[[block] for block in flat.split(BLOCK_NUMEL)] for flat in flats]
                self._exchange_with_neighbours(blocks, groups.leaders)
        wait_for([groups.broadcast(flat) for flat in flats], self._failed)
        self._parameters.write(flats)

    def _exchange_with_neighbours(self, blocks: Sequence[Sequence[Sequence[Tensor]]], group: dist.ProcessGroup) -> None:
        """Let x become the new W; segment by segment, each of which is sent while the next one is computed.

        Args:
            blocks: x, see `FlatParameters.blocks`.
            group: The ring.
        """
        for messages in self._under_way.values():
            self._await(messages)
        left, right = _neighbours_in(group)
        num_blocks = SEGMENT_NUMEL // BLOCK_NUMEL
        number = 0  # of the segment
        for of_kind, own, of_left, of_right in zip(blocks, self._own, self._left, self._right, strict=True):
            kept = {left: of_left, right: of_right}  # by neighbour, of whom there may be one
            scratch = torch.empty(2, min(BLOCK_NUMEL, own.numel()), dtype=torch.float32, device=own.device)
            segments = zip(*(flat.split(SEGMENT_NUMEL) for flat in (own, *kept.values())), strict=True)
            for i, (in_own, *in_kept) in enumerate(segments):
                if (arrived := self._under_way.pop(number, None)) is not None:
                    arrived.add()
                x = of_kind[i * num_blocks : (i + 1) * num_blocks]
                sent = _change(x, in_own, in_kept, scratch)
                received = {peer: torch.empty_like(sent) for peer in kept}
                pairs = [(peer, [message]) for peer, message in received.items()]
                transfer = Transfer(exchange([sent], pairs, group, self._num_exchanges, self._failed))
                into = tuple(zip(in_kept, received.values(), strict=True))
                self._under_way[number] = _Messages(transfer, sent, into)
                number += 1

    def _exchange_whole(self, flats: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Let W, L and R be what the ranks have, all bits of it."""
        self._receive()
        left, right = _neighbours_in(group)
        for x, own, of_left, of_right in zip(flats, self._own, self._left, self._right, strict=True):
            received = [(peer, [kept]) for peer, kept in {left: of_left, right: of_right}.items()]
            wait_for(exchange([x], received, group, _WHOLE + self._num_exchanges, self._failed), self._failed)
            own.copy_(x)
        self._begins_anew = False

    @torch.no_grad()
    def _receive(self) -> None:
        """Let L and R be what the neighbours had after the last exchange; if that fails, it does so from then on."""
        for number, messages in list(self._under_way.items()):
            self._await(messages)
            del self._under_way[number]
            messages.add()

    def _kept(self) -> dict[str, list[Tensor]]:
        return {"own": self._own, "left": self._left, "right": self._right}

    def before_load(self) -> None:
        """Unless W, L and R are loaded behind the module's parameters, the next exchange sends these whole."""
        self._begins_anew = True

    def state_dict(self) -> dict[str, Any]:
        """W, L and R, and the numbers of steps and exchanges; to be called on every rank."""
        self.pay()
        self._receive()
        return {
            "algorithm": type(self).__name__,
            "rank": self._process_group.rank(),
            "world_size": self._process_group.size(),
            "num_steps": self._num_steps,
            "num_exchanges": self._num_exchanges,
            "begins_anew": self._begins_anew,
            **{key: [flat.clone() for flat in flats] for key, flats in self._kept().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `CommAlgorithm.load_state_dict`."""
        refuse_state_of_another(self, state)
        group = self._process_group
        if (state["rank"], state["world_size"]) != (group.rank(), group.size()):
            raise ValueError(
                f"rank {group.rank()} of {group.size()}: the {self.name} was given the state of rank {state['rank']} of"
                f" {state['world_size']}, whose neighbours are others; every rank loads its own, on as many ranks. To"
                " begin anew from one checkpoint, load none: parameters are broadcast when ddp_compile is called"
            )
        for key, flats in self._kept().items():
            if [flat.shape for flat in flats] != [given.shape for given in state[key]]:
                raise ValueError(f"the {self.name} was given the state of other parameters; build the same model")
        self._receive()
        for key, flats in self._kept().items():
            for flat, given in zip(flats, state[key], strict=True):
                flat.copy_(given)
        self._num_steps, self._num_exchanges = state["num_steps"], state["num_exchanges"]
        self._begins_anew = state["begins_anew"]
        self.owe_nothing()

    def _await(self, messages: _Messages) -> None:
        try:
            messages.transfer.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        # This step may run on another stream than the step before, which has allocated them.
        used_here([messages.sent, *(message for _, message in messages.received)])


class _Messages(NamedTuple):
    """To and from both neighbours, about one segment."""

    transfer: Transfer
    sent: Tensor  # kept until it has gone
    received: tuple[tuple[Tensor, Tensor], ...]  # what it is added to, and where it comes

    def add(self) -> None:
        """Add what has come, block by block; where a sum is rounded to 16 bits, that is done alike on every rank."""
        for segment, message in self.received:
            blocks = segment.split(BLOCK_NUMEL)
            for block, rows in zip(blocks, message.split([_num_bytes(block) for block in blocks]), strict=True):
                minmax_u8_decompress(rows.view(_num_chunks(block), -1), block, accumulate=True)


def _let_neighbours_have(under_way: Mapping[int, _Messages]) -> None:
    """What this rank has sent, if they come for it; what they send would find nobody either."""
    for messages in list(under_way.values()):
        messages.transfer.wait_for_others()


def _neighbours_in(ring: dist.ProcessGroup) -> tuple[int, int]:
    """The ranks on the left and on the right."""
    return (ring.rank() - 1) % ring.size(), (ring.rank() + 1) % ring.size()


def _num_chunks(block: Tensor) -> int:
    return -(-len(block) // CHUNK_NUMEL)


def _num_bytes(block: Tensor) -> int:
    num_chunks = _num_chunks(block)
    return num_chunks * row_bytes(-(-len(block) // num_chunks))


def _change(x: Sequence[Sequence[Tensor]], own: Tensor, neighbours: Sequence[Tensor], scratch: Tensor) -> Tensor:
    """Let x and W of a segment be W + D(C(z)), block by block; a neighbour on both sides counts twice.

    Returns:
        C(z), one block behind the other.
    """
    message = []
    for pieces, of_own, *of_neighbours in zip(x, *(f.split(BLOCK_NUMEL) for f in (own, *neighbours)), strict=True):
        z, of_x = scratch[:, : len(of_own)]
        torch.mul(of_own.float(), -5 / 3, out=z)
        z.add_(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), out=of_x))
        for each in of_neighbours:
            z.add_(each, alpha=2 / 3 / len(neighbours))
        rows = minmax_u8_compress(z, _num_chunks(of_own))
        message.append(rows.view(-1))
        minmax_u8_decompress(rows, of_own, accumulate=True)
        for piece, new in zip(pieces, of_own.split([len(piece) for piece in pieces]), strict=True):
            piece.copy_(new)
    return torch.cat(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecisionDecentralized(AlgorithmConfig):
    """Every rank trains parameters of its own, and sends its two neighbours in a ring eight bits of each change.

    What is sent is computed behind the optimizer's step, and is under way while the rank trains on. It needs three
    copies of the parameters, two if there are two ranks, and what is under way: a quarter of one for each of them.

    Args:
        communication_interval: How many steps there are from one exchange to the next.
        hierarchical: The ring goes over one rank of each node, whose ranks are averaged first; all of one size.

    Raises:
        ValueError: The interval is not positive.
    """

    communication_interval: int = 1
    hierarchical: bool = False

    def __post_init__(self) -> None:
        refuse_interval("LowPrecisionDecentralized", "communication_interval", self.communication_interval)

    def build(self, process_group: dist.ProcessGroup) -> LowPrecisionDecentralizedAlgorithm:
        """See `AlgorithmConfig.build`."""
        return LowPrecisionDecentralizedAlgorithm(process_group, self.communication_interval, self.hierarchical)
