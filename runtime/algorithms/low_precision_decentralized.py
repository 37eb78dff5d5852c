"""Low-precision decentralized data parallelism: ranks in a ring send each other changes in eight bits a value."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ddp_compile.algorithms import (
    AlgorithmConfig,
    Traits,
    Transfer,
    device_of,
    exchange,
    keep_after,
    objection_to_messages,
    streams,
    wait_for,
)
from ddp_compile.kernels import minmax_u8_compress, minmax_u8_decompress
from ddp_compile.kernels.contract.reference import row_bytes
from ddp_compile.kernels.executors import KERNEL_DTYPES
from ddp_compile.runtime.algorithms.parameter_average import ParameterAverage, refuse_interval

#: Values that share a minimum and a maximum on the wire. These take 8 to 23 bytes for each such chunk.
CHUNK_NUMEL = 1 << 16
#: Values that are computed at a time, so that inputs and outputs fit into a processor's cache.
BLOCK_NUMEL = 4 * CHUNK_NUMEL
#: Values that are sent at a time, while the next ones are computed; whole blocks.
SEGMENT_NUMEL = 8 * BLOCK_NUMEL
#: Added to the tags of whole parameters. If only one rank sends them, it times out instead of being paired wrongly.
_WHOLE = 1 << 30


class LowPrecisionDecentralizedAlgorithm(ParameterAverage):
    """Each rank keeps copies of its own parameters after the last exchange, W, and of both neighbors', L and R.

    After a step has turned W into x, it sends q = D(C(z)) with z = x + L / 3 + R / 3 - 5 / 3 W to both neighbors, and
    x becomes W + q, the new W. The neighbors' messages are added to L and R, which are not read before the next
    exchange, so messages are under way while the rank trains on. Every rank adds the same bytes to the same values:
    then L is the left neighbor's W, and R the right one's, in every bit.

    Source: Bagua (Gan et al. 2021, arXiv 2107.01499), whose ring follows Tang et al. 2018 (arXiv 1803.06443).
    """

    traits = Traits(payload="parameters", takes_dtypes=KERNEL_DTYPES)

    def __init__(self, process_group: dist.ProcessGroup, communication_interval: int, hierarchical: bool) -> None:
        super().__init__(process_group, communication_interval, hierarchical=hierarchical)
        self.name = f"low-precision decentralized average (every {communication_interval}"
        self.name += ", hierarchical)" if hierarchical else ")"
        self._num_exchanges = 0
        self._under_way: dict[int, _Messages] = {}  # of the last exchange, by the number of the segment
        self._begins_anew = False  # parameters were loaded, but not W, L and R

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """The process group must be able to send messages from the parameters' device."""
        return objection_to_messages(self.name, self.process_group, device_of(parameters))

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make process groups and copies of the parameters; raises if nodes are unknown, or differ in size."""
        super().attach(parameters)
        if len(set(self.nodes.sizes)) > 1:
            raise ValueError(
                f"the {self.name} needs nodes of one size, since in its ring every node has the same weight, but these"
                f" have {', '.join(map(str, self.nodes.sizes))} ranks; pass hierarchical=False"
            )
        leaders = self.nodes.leaders
        has_two_neighbors = leaders is not None and leaders.size() > 2
        self._own, self._left = self.parameters.copies(), self.parameters.copies()
        self._right = self.parameters.copies() if has_two_neighbors else self._left  # both are the same rank
        if leaders is not None and streams.work_blocks_host(leaders, self.device):
            keep_after(self, partial(_let_neighbors_have, self._under_way))

    @torch.no_grad()
    def after_step(self, optimizers: Sequence[Optimizer]) -> None:
        if self.process_group.size() == 1:
            return
        groups = self.nodes
        blocks = self.parameters.blocks(BLOCK_NUMEL) if groups.within is None and not self._begins_anew else None
        if blocks is None or groups.leaders is None:
            self._exchange_copies()
        else:
            self._exchange_with_neighbors(blocks, groups.leaders)
        self._num_exchanges += 1

    def _exchange_copies(self) -> None:
        """Exchange copies instead of the parameters themselves: a node's mean, or whole parameters."""
        groups = self.nodes
        flats = self.parameters.copies()
        if groups.within is not None:
            for flat in flats:
                flat.mul_(1 / groups.sizes[groups.node])
            wait_for([groups.reduce(flat) for flat in flats], self.name)
        if groups.leaders is not None and groups.leaders.size() > 1:
            if self._begins_anew:
                self._exchange_whole(flats, groups.leaders)
            else:
                blocks = [[[block] for block in flat.split(BLOCK_NUMEL)] for flat in flats]
                self._exchange_with_neighbors(blocks, groups.leaders)
        wait_for([groups.broadcast(flat) for flat in flats], self.name)
        self.parameters.write(flats)

    def _exchange_with_neighbors(self, blocks: Sequence[Sequence[Sequence[Tensor]]], group: dist.ProcessGroup) -> None:
        """Let x become the new W, segment by segment; each is sent while the next one is computed."""
        for messages in self._under_way.values():
            self._await(messages)
        left, right = _neighbors_in(group)
        num_blocks = SEGMENT_NUMEL // BLOCK_NUMEL
        number = 0  # of the segment
        for of_kind, own, of_left, of_right in zip(blocks, self._own, self._left, self._right, strict=True):
            kept = {left: of_left, right: of_right}  # by neighbor; there may be only one
            scratch = torch.empty(2, min(BLOCK_NUMEL, own.numel()), dtype=torch.float32, device=own.device)
            segments = zip(*(flat.split(SEGMENT_NUMEL) for flat in (own, *kept.values())), strict=True)
            for i, (in_own, *in_kept) in enumerate(segments):
                if (arrived := self._under_way.pop(number, None)) is not None:
                    arrived.add()
                x = of_kind[i * num_blocks : (i + 1) * num_blocks]
                sent = _change(x, in_own, in_kept, scratch)
                received = {peer: torch.empty_like(sent) for peer in kept}
                pairs = [(peer, [message]) for peer, message in received.items()]
                transfer = Transfer(exchange([sent], pairs, group, self._num_exchanges, self.name))
                into = tuple(zip(in_kept, received.values(), strict=True))
                self._under_way[number] = _Messages(transfer, sent, into)
                number += 1

    def _exchange_whole(self, flats: Sequence[Tensor], group: dist.ProcessGroup) -> None:
        """Set W, L and R to the ranks' parameters, uncompressed."""
        self.finish_exchanges()
        left, right = _neighbors_in(group)
        for x, own, of_left, of_right in zip(flats, self._own, self._left, self._right, strict=True):
            received = [(peer, [kept]) for peer, kept in {left: of_left, right: of_right}.items()]
            wait_for(exchange([x], received, group, _WHOLE + self._num_exchanges, self.name), self.name)
            own.copy_(x)
        self._begins_anew = False

    @torch.no_grad()
    def finish_exchanges(self) -> None:
        """Bring L and R up to date with the last exchange. If that fails once, every further call fails."""
        for number, messages in list(self._under_way.items()):
            self._await(messages)
            del self._under_way[number]
            messages.add()

    def _kept(self) -> dict[str, list[Tensor]]:
        return {"own": self._own, "left": self._left, "right": self._right}

    def before_load(self) -> None:
        """Make the next exchange send whole parameters, unless W, L and R are loaded after the module's parameters."""
        self._begins_anew = True

    def state_dict(self) -> dict[str, Any]:
        """W, L and R, and the numbers of steps and exchanges. Every rank calls it."""
        state = super().state_dict()
        self.finish_exchanges()
        return {
            **state,
            "rank": self.process_group.rank(),
            "world_size": self.process_group.size(),
            "num_exchanges": self._num_exchanges,
            "begins_anew": self._begins_anew,
            **{key: [flat.clone() for flat in flats] for key, flats in self._kept().items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.finish_exchanges()
        for key, flats in self._kept().items():
            for flat, given in zip(flats, state[key], strict=True):
                flat.copy_(given)
        self._num_exchanges, self._begins_anew = state["num_exchanges"], state["begins_anew"]

    def refuse_state(self, state: Mapping[str, Any]) -> None:
        super().refuse_state(state)
        group = self.process_group
        if (state["rank"], state["world_size"]) != (group.rank(), group.size()):
            raise ValueError(
                f"rank {group.rank()} of {group.size()}: the {self.name} was given the state of rank {state['rank']} of"
                f" {state['world_size']}, which has other neighbors. Each rank must load its own state, with the same"
                " number of ranks. To start from one checkpoint instead, load no state: parameters are broadcast when"
                " ddp_compile is called"
            )
        for key, flats in self._kept().items():
            if [flat.shape for flat in flats] != [given.shape for given in state[key]]:
                raise ValueError(f"the {self.name} was given the state of other parameters; build the same model")

    def _await(self, messages: "_Messages") -> None:
        wait_for([messages.transfer], self.name)
        # The previous step, which allocated them, may have run on another stream.
        streams.used_here([messages.sent, *(message for _, message in messages.received)])


class _Messages(NamedTuple):
    """The messages to and from both neighbors for one segment."""

    transfer: Transfer
    sent: Tensor  #: kept until it has been sent
    received: tuple[tuple[Tensor, Tensor], ...]  #: L and R, each with the message to add to it

    def add(self) -> None:
        """Add the received messages, block by block, so that every rank rounds sums to 16 bits in the same way."""
        for segment, message in self.received:
            blocks = segment.split(BLOCK_NUMEL)
            for block, rows in zip(blocks, message.split([_num_bytes(block) for block in blocks]), strict=True):
                minmax_u8_decompress(rows.view(_num_chunks(block), -1), block, accumulate=True)


def _let_neighbors_have(under_way: Mapping[int, _Messages]) -> None:
    """Wait until the neighbors have received what this rank sent."""
    for messages in list(under_way.values()):
        messages.transfer.wait_for_others()


def _neighbors_in(ring: dist.ProcessGroup) -> tuple[int, int]:
    """The ranks on the left and on the right."""
    return (ring.rank() - 1) % ring.size(), (ring.rank() + 1) % ring.size()


def _num_chunks(block: Tensor) -> int:
    return -(-len(block) // CHUNK_NUMEL)


def _num_bytes(block: Tensor) -> int:
    num_chunks = _num_chunks(block)
    return num_chunks * row_bytes(-(-len(block) // num_chunks))


def _change(x: Sequence[Sequence[Tensor]], own: Tensor, neighbors: Sequence[Tensor], scratch: Tensor) -> Tensor:
    """Let x and W of a segment be W + D(C(z)), and return C(z); a neighbor on both sides counts twice."""
    message = []
    for pieces, of_own, *of_neighbors in zip(x, *(f.split(BLOCK_NUMEL) for f in (own, *neighbors)), strict=True):
        z, of_x = scratch[:, : len(of_own)]
        torch.mul(of_own.float(), -5 / 3, out=z)
        z.add_(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), out=of_x))
        for each in of_neighbors:
            z.add_(each, alpha=2 / 3 / len(neighbors))
        rows = minmax_u8_compress(z, _num_chunks(of_own))
        message.append(rows.view(-1))
        minmax_u8_decompress(rows, of_own, accumulate=True)
        for piece, new in zip(pieces, of_own.split([len(piece) for piece in pieces]), strict=True):
            piece.copy_(new)
    return torch.cat(message)


@dataclass(frozen=True, kw_only=True, slots=True)
class LowPrecisionDecentralized(AlgorithmConfig):
    """Every rank trains its own parameters, and sends changes to its two neighbors in a ring with eight bits a value.

    Messages are computed after the optimizer's step, and are under way while the rank continues to train. This takes
    memory for three copies of the parameters, or two with two ranks, and for each a quarter of a copy for messages
    under way.

    Args:
        communication_interval: Number of steps from one exchange to the next.
        hierarchical: Average inside each node first; the ring connects one rank of each node. All nodes must have the
            same size.

    Raises:
        ValueError: The interval is not positive.
    """

    communication_interval: int = 1
    hierarchical: bool = False

    def __post_init__(self) -> None:
        refuse_interval("LowPrecisionDecentralized", "communication_interval", self.communication_interval)

    def build(self, process_group: dist.ProcessGroup) -> LowPrecisionDecentralizedAlgorithm:
        return LowPrecisionDecentralizedAlgorithm(process_group, self.communication_interval, self.hierarchical)
