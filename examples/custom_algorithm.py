"""A custom algorithm: torchrun --standalone --nproc-per-node 2 examples/custom_algorithm.py"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ddp_compile import ddp_compile
from ddp_compile.algorithms import AlgorithmConfig, CollectiveChain, Traits


class TopKAlgorithm(CollectiveChain):
    """Send the largest values, keep the rest: Stich et al. 2018 (arXiv 1809.07599); see docs/algorithms.md."""

    traits = Traits(layout="ddp", replayable=False, takes_sparse=False, takes_dtypes=(torch.float32, torch.bfloat16))
    num_collectives = 2

    def __init__(self, process_group, ratio):
        super().__init__(process_group)
        self.name, self.ratio, self.num_bytes_sent = f"top-k of {ratio}", ratio, 0  # ranks compare names

    def attach(self, parameters):
        super().attach(parameters)  # residuals belong to parameters, since buckets may be packed again
        self.residuals = [torch.zeros(p.numel(), dtype=p.dtype, device=p.device) for p in parameters.values()]

    def reduce(self, bucket):
        flat, group = bucket.flat, self.process_group
        residuals = [self.residuals[gradient.index] for gradient in bucket.spec.gradients]
        flat += torch.cat(residuals)
        indices = flat.abs().topk(math.ceil(self.ratio * flat.numel())).indices.int()
        values, flat[indices] = flat[indices], 0
        torch.split_with_sizes_copy(flat.nan_to_num(0, 0, 0), [r.numel() for r in residuals], out=residuals)  # finite
        gathered = [[torch.empty_like(sent) for _ in range(group.size())] for sent in (values, indices)]
        self.num_bytes_sent += (group.size() - 1) * (values.nbytes + indices.nbytes)  # in a ring
        yield dist.all_gather(gathered[0], values, group=group, async_op=True)
        yield dist.all_gather(gathered[1], indices, group=group, async_op=True)
        flat.zero_()
        for values, indices in zip(*gathered, strict=True):  # in the same order on every rank, for the same bits
            flat.index_add_(0, indices, values)

    def state_dict(self):
        return {"residuals": [residual.clone() for residual in self.residuals]}

    def load_state_dict(self, state):
        if [r.shape for r in state.get("residuals", ())] != [r.shape for r in self.residuals]:
            raise ValueError(f"this is not a state of the {self.name}, or it belongs to other parameters")
        for residual, kept in zip(self.residuals, state["residuals"], strict=True):
            residual.copy_(kept)


@dataclass(frozen=True)
class TopK(AlgorithmConfig):
    ratio: float = 0.01  # of a bucket's values, rounded up

    def __post_init__(self):
        if not 0 < self.ratio <= 1:
            raise ValueError(f"TopK(ratio={self.ratio!r}): pass a share of the values, more than 0 and at most 1")

    def build(self, process_group):
        return TopKAlgorithm(process_group, self.ratio)


if __name__ == "__main__":
    device = f"cuda:{dist.get_node_local_rank()}" if torch.cuda.is_available() else "cpu"
    dist.init_process_group("gloo" if device == "cpu" else "nccl")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = ddp_compile(torch.nn.Linear(1000, 100).to(device), algorithm=TopK(ratio=0.01), backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(1, 201):
        loss = (model(x := torch.randn(64, 1000, device=device)) - x[:, :100]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and step % 40 == 0:
            sent, dense = model.comm_algorithm.num_bytes_sent / step, model.bucket_plan.num_bytes * (2 - 2 / size)
            print(f"step {step}: loss {loss.item():.3f}; {sent:.0f} bytes sent a step, {dense:.0f} by an all-reduce")
    dist.destroy_process_group()
