"""Compiled backwards that hand over buckets, through torch's caches: nothing is lost or mixed up."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.distributed as dist
from beside import train_beside
from process_copies import run_in_copy
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from ddp_compile import ddp_compile
from ddp_compile.torch_internals import backward_compile

WIDTH = 16


def train(num_layers_a_bucket: int | None) -> tuple[int, bool]:
    """How many buckets may be launched early, and whether gradients are right. None stands for plain torch.compile."""
    torch.manual_seed(0)
    # Only products: inductor's own kernels would take a C++ compiler seconds, and do not change keys.
    module, reference = (nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)]) for _ in range(2))
    reference.load_state_dict(module.state_dict())
    if num_layers_a_bucket is None:
        return 0, max(train_beside((torch.compile(module), reference), num_steps=2, width=WIDTH)) < 1e-5
    cap_mb = num_layers_a_bucket * WIDTH * WIDTH * 4 / 2**20
    model: Any = ddp_compile(module, bucket_cap_mb=cap_mb, split="backward")
    # With a hook buckets are sent on a single rank as well.
    model.register_comm_hook(None, allreduce_hook)
    right = max(train_beside((model, reference), num_steps=2, width=WIDTH)) < 1e-5
    return sum(bucket.was_launched_early for bucket in model._ddp_compile_state.reducer.buckets), right


def print_training(store: str, wanted: list[int | None]) -> None:
    """As JSON, what the caches and the reducer did; called in a process of its own."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 1), rank=0, world_size=1)
    results = []
    for num_layers_a_bucket in wanted:
        counters.clear()
        num_early, right = train(num_layers_a_bucket)
        hits = counters["aot_autograd"]["autograd_cache_hit"], counters["inductor"]["fxgraph_cache_hit"]
        misses = counters["aot_autograd"]["autograd_cache_miss"], counters["inductor"]["fxgraph_cache_miss"]
        results.append({"num_early": num_early, "right": right, "hits": hits, "misses": misses})
    print(json.dumps(results))


def train_in_a_process(directory: Path, wanted: list[int | None]) -> list[dict[str, Any]]:
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(directory / "cache")}
    store = directory / f"store_{len(list(directory.iterdir()))}"
    ended = run_in_copy(print_training, str(store), wanted, environment=environment, timeout_s=240)
    assert ended.exit_code == 0, ended.stderr
    answer: list[dict[str, Any]] = json.loads(ended.stdout.splitlines()[-1])
    return answer


@pytest.mark.inductor
@pytest.mark.slow
def test_warm_caches(tmp_path: Path) -> None:
    # Plain torch.compile first, two models with one plan, and the same model with another plan.
    cold = train_in_a_process(tmp_path, [None, 1, 1, 2])
    assert [entry["num_early"] for entry in cold] == [0, 3, 3, 1]
    assert [entry["hits"] for entry in cold] == [[0, 0]] * 4
    # In another order, so that plain torch.compile could be given one of our backwards.
    warm = train_in_a_process(tmp_path, [1, 1, 2, None])
    assert [entry["num_early"] for entry in warm] == [3, 3, 1, 0]
    assert [entry["hits"] for entry in warm] == [[1, 2]] * 4
    assert [entry["misses"] for entry in warm] == [[0, 0]] * 4
    assert all(entry["right"] for entry in cold + warm)


class CountsCalls(custom_graph_pass.CustomGraphPass):
    def __init__(self, name: str | None) -> None:
        self.name = name
        self.num_calls = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.num_calls += 1

    def uuid(self) -> str | None:
        return self.name


@pytest.mark.skipif(
    not hasattr(custom_graph_pass, "get_custom_graph_passes"), reason="inductor takes several passes since torch 2.13"
)
def test_user_pass_beside_cache_key() -> None:
    theirs = CountsCalls("theirs")
    for present, uuids in ((None, ["ours"]), (theirs, ["theirs", "ours"]), ([theirs], ["theirs", "ours"])):
        both = backward_compile._with_cache_key(present, "ours")
        with inductor_config.patch(post_grad_custom_post_pass=both):
            passes = custom_graph_pass.get_custom_graph_passes(inductor_config.post_grad_custom_post_pass)
        for each in passes:
            each(fx.Graph())
        assert [each.uuid() for each in passes] == uuids
    assert theirs.num_calls == 2


def test_cache_key_on_older_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(custom_graph_pass, "get_custom_graph_passes", raising=False)
    theirs = CountsCalls("theirs")
    both = backward_compile._with_cache_key(theirs, "ours")
    both(fx.Graph())
    assert (theirs.num_calls, both.uuid()) == (1, ("ours", "theirs"))
    # A pass without a key turns the caches off, as in plain torch.compile.
    assert backward_compile._with_cache_key(CountsCalls(None), "ours").uuid() is None
    assert backward_compile._with_cache_key(lambda graph: None, "ours").uuid() is None
