"""Reduces gradients to shards, and gathers parameters after the optimizer's step."""

from collections.abc import Mapping

import torch.distributed as dist
from torch.nn import Parameter

from ddp_compile import torch_internals
from ddp_compile.runtime.algorithms.flat_parameters import FLOATING
from ddp_compile.runtime.buckets.bucket import Bucket
from ddp_compile.runtime.buckets.comm_algorithm import CommAlgorithm, Pending, Traits, device_of
from ddp_compile.runtime.comm.process_groups import close_groups, group_of
from ddp_compile.runtime.comm.transfers import objection_to_messages
from ddp_compile.runtime.sharded.cut import Cut
from ddp_compile.runtime.sharded.parameters import ShardedParameters
from ddp_compile.runtime.sharded.transfers import ShardTransfers


class ShardedAlgorithm(CommAlgorithm):
    """Reduces each bucket to one shard for each rank, whose optimizers step the pieces of parameters in that shard.

    Sources: Rajbhandari et al. 2020, ZeRO (arXiv 1910.02054), its first stage; Megatron-core's distributed optimizer,
    whose gathers overlap with the next forward too.
    """

    name = "sharded optimizer"
    traits = Traits(on_one_rank=True, takes_sparse=False, takes_dtypes=FLOATING, keeps_buckets=True)

    def __init__(self, process_group: dist.ProcessGroup, sharding: ShardedParameters) -> None:
        self._process_group = process_group
        self._own_groups: tuple[dist.ProcessGroup, ...] = ()
        self.sharding: ShardedParameters = sharding

    def objection(self, parameters: Mapping[str, Parameter]) -> str:
        if any(map(torch_internals.is_dtensor, parameters.values())):
            return (
                "a sharded optimizer takes no DTensors, which are divided among ranks already; use fully_shard for"
                " these modules, or do not shard the optimizer"
            )
        if self.sharding.owners:
            name = "sharded optimizer of whole parameters"
            return objection_to_messages(name, self._process_group, device_of(parameters))
        return ""

    def attach(self, parameters: Mapping[str, Parameter]) -> None:
        """Make process groups of its own, for gathers and for gradients; take over the optimizers' steps."""
        ranks = dist.get_process_group_ranks(self._process_group)
        device = device_of(parameters)
        gathers = gradients = self._process_group
        if len(ranks) > 1:
            gathers, gradients = (group_of(ranks, self._process_group, device) for _ in range(2))
            self._own_groups = (gathers, gradients)
            self.shares_process_group = False
        self._device = device
        self._transfers = ShardTransfers(gathers, gradients, device)
        self.sharding.attach(self._transfers)

    def detach(self, together: bool) -> None:
        self.sharding.detach(together)
        if together:
            close_groups(self._own_groups, self._process_group, self._device)

    def launch(self, bucket: Bucket, is_last: bool) -> Pending:
        sharded = self.sharding.buckets
        cut = sharded[bucket.spec.index].cut if sharded else Cut.of(bucket.spec, self._transfers.world_size)
        return self._transfers.reduce_scatter(bucket.flat, cut)

    def before_forward(self, synchronize: bool) -> None:
        self.sharding.before_forward()
