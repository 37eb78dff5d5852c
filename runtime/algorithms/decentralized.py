"""Decentralized data parallelism: ranks average their parameters while each computes its gradients."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.algorithms import (
    FLOATING,
    AlgorithmConfig,
    Traits,
    all_reduce,
    device_of,
    exchange,
    objection_to_messages,
    wait_for,
)
from ddp_compile.errors import ReductionError, this_rank
from ddp_compile.runtime.algorithms.parameter_average import ParameterAverage, refuse_interval

PeerSelection = Literal["all", "shift_one"]


class DecentralizedAlgorithm(ParameterAverage):
    """Sends the parameters when a forward begins, and replaces them by an average when its backward has ended.

    The optimizer steps from the average, by gradients at the previous parameters: x+ = average(x) - lr * gradient(x).
    """

    traits = Traits(payload="parameters", takes_dtypes=FLOATING)

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        peer_selection: PeerSelection,
        communication_interval: int,
        hierarchical: bool,
    ) -> None:
        super().__init__(process_group, communication_interval, hierarchical=hierarchical)
        self.name = f"decentralized average ({peer_selection}, every {communication_interval}"
        self.name += ", hierarchical)" if hierarchical else ")"
        self._is_with_one_peer = peer_selection == "shift_one"
        self._num_exchanges = 0
        self._under_way: list[dist.Work] | None = None
        self._versions: list[int] = []  # of the parameters, when they were sent

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """With "shift_one", the process group must be able to send messages from the parameters' device."""
        if not self._is_with_one_peer:
            return ""
        return objection_to_messages(self.name, self.process_group, device_of(parameters))

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make process groups and buffers; raises on every rank if nodes are unknown, or odd in number."""
        super().attach(parameters)
        if self._is_with_one_peer:
            _refuse_odd(len(self.nodes.sizes), "nodes")
        self._flats = self.parameters.new()
        exchanges = self._is_with_one_peer and self.nodes.leaders is not None
        self._received = self.parameters.new() if exchanges else []

    def before_forward(self, synchronize: bool) -> None:
        if synchronize:
            self._send()

    def after_backward(self) -> None:
        """Replace the parameters by the average before the optimizer steps; raises if they were written meanwhile."""
        self._send()  # gradients may have come without a forward, by a method of the module
        if self._under_way is not None:
            self._finish()
        super().after_backward()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "num_exchanges": self._num_exchanges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._num_exchanges = state["num_exchanges"]

    def finish_exchanges(self) -> None:
        self._send()  # another rank may have sent, in a forward without a backward
        wait_for(self._under_way or (), self.name)
        self._under_way = None

    def _send(self) -> None:
        if self._under_way is not None or not self.meets_others or self.process_group.size() == 1:
            return
        self._versions = self.parameters.versions()
        self.parameters.read(self._flats)
        groups = self.nodes
        if not self._is_with_one_peer:
            for flat in self._flats:
                flat.mul_(1 / self.process_group.size())
        # Waited for here: links inside a node are fast, and only the transfers between nodes need to be hidden.
        wait_for([groups.reduce(flat) for flat in self._flats], self.name)
        self._under_way = []
        if groups.leaders is None or groups.leaders.size() == 1:
            return
        if self._is_with_one_peer:
            received = [(self._peer, self._received)]
            self._under_way = exchange(self._flats, received, groups.leaders, self._num_exchanges, self.name)
        else:
            self._under_way = [all_reduce(flat, groups.leaders) for flat in self._flats]

    @property
    def _peer(self) -> int:
        return peer_of_shift_one(self.nodes.node, len(self.nodes.sizes), self._num_exchanges)

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        wait_for(under_way, self.name)
        if self._is_with_one_peer and self.nodes.leaders is not None:
            self._average_with_peer()
        wait_for([self.nodes.broadcast(flat) for flat in self._flats], self.name)
        if self.parameters.versions() != self._versions:
            raise ReductionError(
                f"{this_rank()}: parameters were written between a forward and the end of its backward, while the"
                f" {self.name} was sending them; its result would undo the write. Step, load and edit before the"
                " forward, and put forwards without a backward into torch.no_grad() or model.no_sync()"
            )
        self.parameters.write(self._flats)
        self._num_exchanges += 1

    def _average_with_peer(self) -> None:
        """The average over the ranks of two nodes from their sums; both compute the same bits."""
        sizes = self.nodes.sizes
        num_ranks = sizes[self.nodes.node] + (sizes[self._peer] if len(sizes) > 1 else 0)
        for flat, received in zip(self._flats, self._received, strict=True):
            if len(sizes) > 1:
                flat.add_(received)
            flat.mul_(1 / num_ranks)


def peer_of_shift_one(place: int, size: int, num_exchanges: int) -> int:
    """The peer of one of ``size``, an even number: each of one half meets one of the other, shifted by one each time.

    Source: the decentralized algorithm of Bagua (Gan et al. 2021, arXiv 2107.01499), peer selection "shift_one".
    """
    half = size // 2
    if place < half:
        return (num_exchanges + place) % half + half
    return (place - half - num_exchanges) % half


def _refuse_odd(count: int, of_what: str) -> None:
    if count > 1 and count % 2 == 1:
        raise ValueError(
            f"Decentralized(peer_selection='shift_one') pairs all {of_what}, and there are {count}; start an even"
            " number of them, or pass peer_selection='all'"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decentralized(AlgorithmConfig):
    """Every rank trains its own parameters with its own gradients, and averages the parameters with other ranks.

    Parameters are sent when a forward begins and averaged when its backward has ended, so that both hide the transfer.
    This takes memory for one copy of the parameters with "all", and for two with "shift_one".

    Args:
        peer_selection: ``"all"``: the average over all ranks. ``"shift_one"``: the average with one other rank, a
            different one each time, which sends half as much as an all-reduce.
        communication_interval: Number of steps from one exchange to the next.
        hierarchical: Average inside each node first, then exchange between one rank of each node. Nodes may have
            different sizes. LOCAL_RANK, set by the launcher, tells which ranks share a node.

    Raises:
        ValueError: A setting is out of range; when it is built, also an odd number of ranks for "shift_one".
    """

    peer_selection: PeerSelection = "all"
    communication_interval: int = 1
    hierarchical: bool = False

    def __post_init__(self) -> None:
        if self.peer_selection not in get_args(PeerSelection):
            raise ValueError(
                f"Decentralized(peer_selection={self.peer_selection!r}): pass one of"
                f" {', '.join(map(repr, get_args(PeerSelection)))}"
            )
        refuse_interval("Decentralized", "communication_interval", self.communication_interval)

    def build(self, process_group: dist.ProcessGroup) -> DecentralizedAlgorithm:
        if self.peer_selection == "shift_one" and not self.hierarchical:
            _refuse_odd(process_group.size(), "ranks")
        return DecentralizedAlgorithm(
            process_group, self.peer_selection, self.communication_interval, self.hierarchical
        )
