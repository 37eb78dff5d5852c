"""Trains models in a separate process and prints, as JSON, what compile caches and reducers did."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_compile import ddp_compile

WIDTH = 16


def train(num_layers_a_bucket: int | None) -> tuple[int, bool]:
    """How many buckets may be launched early, and whether gradients are right. None stands for plain torch.compile."""
    torch.manual_seed(0)
    # Only products: inductor's own kernels would take a C++ compiler seconds, and do not change keys.
    module, reference = (nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    if num_layers_a_bucket is None:
        call = torch.compile(module)
    else:
        cap_mb = num_layers_a_bucket * WIDTH * WIDTH * 4 / 2**20
        call = ddp_compile(module, bucket_cap_mb=cap_mb, split="backward")
        # With a hook buckets are sent on a single rank as well.
        call.register_comm_hook(None, allreduce_hook)
    x = torch.randn(4, WIDTH)
    for each in (call, reference):
        for _ in range(2):
            module.zero_grad()
            reference.zero_grad()
            each(x).square().sum().backward()
        if each is call:
            ours = [p.grad.clone() for p in module.parameters()]
    right = all(torch.allclose(a, p.grad, rtol=1e-4) for a, p in zip(ours, reference.parameters(), strict=True))
    if num_layers_a_bucket is None:
        return 0, right
    return sum(bucket.was_launched_early for bucket in call._ddp_compile_state.reducer.buckets), right


def print_training(store: str, wanted: list[int | None]) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    results = []
    for num_layers_a_bucket in wanted:
        counters.clear()
        num_early, right = train(num_layers_a_bucket)
        hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
        misses = counters["aot_autograd"]["autograd_cache_miss"], counters["inductor"]["fxgraph_cache_miss"]
        results.append({"num_early": num_early, "right": right, "hits": hits, "misses": misses})
    print(json.dumps(results))
