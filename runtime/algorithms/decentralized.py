"""Decentralised data parallelism: ranks average their parameters with each other, while each computes its gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile.errors import ReductionError
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING, FlatParameters, all_reduce, average_over
from ddp_compile.runtime.algorithms.optimizer_steps import OptimizerSteps
from ddp_compile.runtime.algorithms.peers import (
    exchange,
    objection_to_messages,
    peer_of_shift_one,
    refuse_interval,
    refuse_state_of_another,
    wait_for,
)
from ddp_compile.runtime.buckets.comm_algorithm import AlgorithmConfig, CommAlgorithm, Traits
from ddp_compile.runtime.comm import error_messages
from ddp_compile.runtime.comm.process_groups import NodeGroups

PeerSelection = Literal["all", "shift_one"]


class DecentralizedAlgorithm(CommAlgorithm):
    """At a forward the parameters are sent, and behind its backward they become an average with those of others.

    The optimizer steps from the average, by gradients at what was before it: x+ = average(x) - lr * gradient(x).

    Args:
        process_group: All ranks.
        peer_selection: See `Decentralized`.
        communication_interval: See `Decentralized`.
        hierarchical: See `Decentralized`.
    """

    traits = Traits(payload="parameters", takes_dtypes=FLOATING)

    def __init__(
        self,
        process_group: dist.ProcessGroup,
        peer_selection: PeerSelection,
        communication_interval: int,
        hierarchical: bool,
    ) -> None:
        self.name = f"decentralized average ({peer_selection}, every {communication_interval}"
        self.name += ", hierarchical)" if hierarchical else ")"
        self._process_group = process_group
        self._peer_selection = peer_selection
        self._interval = communication_interval
        self._hierarchical = hierarchical
        self._num_steps = 0
        self._num_exchanges = 0
        self._under_way: list[dist.Work] | None = None
        self._versions: list[int] = []  # of the parameters that are under way

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        """With "shift_one", the process group has to send point-to-point messages from the parameters' device."""
        if self._peer_selection == "all":
            return ""
        return objection_to_messages(self.name, self._process_group, next(iter(parameters.values())).device)

    def attach(self, parameters: Sequence[Parameter]) -> None:
        """Take process groups of its own, and memory for what is sent and received.

        Raises:
            ValueError: On every rank, where a rank does not know its node, or the number of nodes is odd.
        """
        device = parameters[0].device
        if self._hierarchical:
            self._groups = NodeGroups.of(self._process_group, device, self.name)
        else:
            self._groups = NodeGroups.of_single_ranks(self._process_group, device)
        _refuse_odd(self._peer_selection, len(self._groups.sizes), "nodes")
        self._steps = OptimizerSteps(parameters)
        self._parameters = FlatParameters(parameters)
        self._flats = self._parameters.new()
        exchanges = self._peer_selection == "shift_one" and self._groups.leaders is not None
        self._received = self._parameters.new() if exchanges else []

    def detach(self, together: bool) -> None:
        """Average over all ranks, see `CommAlgorithm.detach`."""
        self._steps.stop()
        if not together:
            return
        self._send()  # one rank alone may have, at a forward that no backward has followed
        if self._under_way is not None:
            wait_for(self._under_way, self._failed)
            self._under_way = None
        average_over(self._process_group, self._parameters, self._failed)

    @property
    def meets_others(self) -> bool:
        """Whether this step is one of the interval."""
        return self._num_steps % self._interval == 0

    def before_forward(self) -> None:
        """Send the parameters, in each step that is one of the interval."""
        self._steps.forward_begins(self.name)
        self._send()

    def after_backward(self) -> None:
        """Put the average in the place of the parameters, before the optimizer steps.

        Raises:
            ReductionError: The exchange failed, or parameters were written since the forward.
        """
        self._send()  # gradients may have come without a forward, by a method of the module
        if self._under_way is not None:
            self._finish()
        self._num_steps += 1
        self._steps.iteration_ends()

    def state_dict(self) -> dict[str, Any]:
        """The numbers of steps and exchanges."""
        return {"algorithm": type(self).__name__, "num_steps": self._num_steps, "num_exchanges": self._num_exchanges}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `CommAlgorithm.load_state_dict`."""
        refuse_state_of_another(self, state)
        self._num_steps, self._num_exchanges = state["num_steps"], state["num_exchanges"]

    def _send(self) -> None:
        if self._under_way is None and self.meets_others and self._process_group.size() > 1:
            self._start()

    def _start(self) -> None:
        self._versions = self._parameters.versions()
        self._parameters.read(self._flats)
        groups = self._groups
        if self._peer_selection == "all":
            for flat in self._flats:
                flat.mul_(1 / self._process_group.size())
        # The node's own links are the fast ones: what comes behind this is what there is to hide.
        wait_for([groups.reduce(flat) for flat in self._flats], self._failed)
        self._under_way = []
        if groups.leaders is None or groups.leaders.size() == 1:
            return
        if self._peer_selection == "all":
            self._under_way = [all_reduce(flat, groups.leaders) for flat in self._flats]
        else:
            received = [(self._peer, self._received)]
            self._under_way = exchange(self._flats, received, groups.leaders, self._num_exchanges, self._failed)

    @property
    def _peer(self) -> int:
        assert self._groups.leaders is not None
        return peer_of_shift_one(self._groups.node, self._groups.leaders.size(), self._num_exchanges)

    def _finish(self) -> None:
        under_way, self._under_way = self._under_way, None
        assert under_way is not None
        wait_for(under_way, self._failed)
        if self._peer_selection == "shift_one" and self._groups.leaders is not None:
            self._average_with_peer()
        wait_for([self._groups.broadcast(flat) for flat in self._flats], self._failed)
        if self._parameters.versions() != self._versions:
            raise error_messages.parameters_written(self.name)
        self._parameters.write(self._flats)
        self._num_exchanges += 1

    def _average_with_peer(self) -> None:
        """Of the sums of two nodes, the average over the ranks of both; of two ranks, their mean, in the same bits."""
        sizes = self._groups.sizes
        num_ranks = sizes[self._groups.node] + (sizes[self._peer] if len(sizes) > 1 else 0)
        for flat, received in zip(self._flats, self._received, strict=True):
            if len(sizes) > 1:
                flat.add_(received)
            flat.mul_(1 / num_ranks)

    def _failed(self, error: RuntimeError) -> ReductionError:
        return error_messages.exchange_failed(self.name, error)


def _refuse_odd(peer_selection: str, count: int, of_what: str) -> None:
    if peer_selection == "shift_one" and count > 1 and count % 2 == 1:
        raise ValueError(
            f"Decentralized(peer_selection='shift_one') pairs all {of_what}, and there are {count}; start an even"
            " number of them, or pass peer_selection='all'"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Decentralized(AlgorithmConfig):
    """Every rank trains parameters of its own, and averages them with others; gradients stay its own.

    What is sent at a forward comes back behind its backward, so that both hide it. Copies of the parameters that it
    needs: one with "all", two with "shift_one".

    Args:
        peer_selection: ``"all"``: the average over all ranks. ``"shift_one"``: with one other rank, another one every
            time, which sends half of what an all-reduce sends.
        communication_interval: How many steps there are from one exchange to the next.
        hierarchical: Average inside each node first, over equally many or not, and exchange between one rank of each
            node. A launcher tells the ranks by LOCAL_RANK which of them share a node.

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
        """See `AlgorithmConfig.build`."""
        if not self.hierarchical:
            _refuse_odd(self.peer_selection, process_group.size(), "ranks")
        return DecentralizedAlgorithm(
            process_group, self.peer_selection, self.communication_interval, self.hierarchical
        )
