"""What mode="reduce-overhead" would record as CUDA graphs: our operators stay between the recorded partitions.

Here inductor is told that nodes run on a GPU, so it partitions graphs as it does for CUDA graphs, on the CPU. That
buckets leave early between recorded graphs, on a GPU: tests/gpu/test_two_ranks_on_one_gpu.py.
"""

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
import torch._inductor.scheduler as scheduler
import torch._inductor.utils as inductor_utils
from beside import average, own_batch, seeded
from models import TanhLayer
from rank_pool import on_ranks
from torch import nn
from ways_to_train import count_early

from ddp_compile import ddp_compile, shard_optimizer

WIDTH, NUM_LAYERS, NUM_STEPS = 32, 6, 4
BUCKET_CAP_MB = 2 * (WIDTH * WIDTH + WIDTH) * 4 / 2**20  # two layers


@contextmanager
def partitioned_as_for_a_gpu() -> Iterator[None]:
    torch._dynamo.reset()
    with (
        inductor_config.patch({"graph_partition": True, "triton.cudagraphs": True, "fx_graph_cache": False}),
        functorch_config.patch(enable_autograd_cache=False),
        patch.object(scheduler.BaseSchedulerNode, "is_gpu", lambda node: True),
    ):
        yield
    torch._dynamo.reset()


def operators_in(codes: Sequence[str]) -> tuple[set[str], set[str]]:
    """Names of our operators in generated code: all of them, and those in partitions."""
    partition = r"^( *)def partition_\d+\(.*?(?=^\1\S|\Z)"
    bodies = [match[0] for code in codes for match in re.finditer(partition, code, re.MULTILINE | re.DOTALL)]
    assert bodies
    everywhere, in_partitions = (set(re.findall(r"ddp_compile\.(\w+)", "\n".join(texts))) for texts in (codes, bodies))
    return everywhere, in_partitions


def blocks() -> nn.Module:
    return nn.Sequential(*(TanhLayer(WIDTH) for _ in range(NUM_LAYERS)))


WAYS: dict[str, tuple[dict[str, Any], bool, set[str]]] = {  # settings, whether sharded, operators in the graphs
    "backward": ({"split": "backward"}, False, {"bucket_ready"}),
    "regions": ({"regions": [TanhLayer]}, False, set()),
    "sharded": ({"split": "backward", "static_graph": True}, True, {"move_bucket", "hold_back", "await_parameters"}),
}


@pytest.mark.inductor
@pytest.mark.long
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_operators_outside_cuda_graphs(way: str) -> None:
    settings, is_sharded, expected = WAYS[way]
    plain = seeded(blocks)
    module = copy.deepcopy(plain)
    with partitioned_as_for_a_gpu():
        model = ddp_compile(module, bucket_cap_mb=BUCKET_CAP_MB, backend="inductor", **settings)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, plain)]
        if is_sharded:
            optimizers[0] = shard_optimizer(optimizers[0], model)

        def train() -> None:
            for step in range(NUM_STEPS):
                for each, optimizer in zip((model, plain), optimizers, strict=True):
                    optimizer.zero_grad()
                    each(own_batch(step, WIDTH)).square().mean().backward()
                    if each is plain:
                        average(plain)
                    optimizer.step()

        _, codes = inductor_utils.run_and_get_code(train)
        launched = count_early(model)
        train()
    assert operators_in(codes) == (expected, set())
    num_early = len(model.bucket_plan.buckets) - 1 if settings.get("split") == "backward" else 0
    assert len(launched) == NUM_STEPS * num_early
    for ours, theirs in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-5)
