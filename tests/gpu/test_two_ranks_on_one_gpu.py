"""Two ranks on one accelerator, over gloo, on streams of their own: the same training as on the CPU."""

import faulthandler
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

from ddp_compile import ddp_compile, shard_optimizer
from ddp_compile.algorithms import ByteGrad, Decentralized, DiLoCo, GradientAllReduce, LocalSGD

ACCELERATOR = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(ACCELERATOR is None, reason="needs an accelerator")]

WIDTH = 64
NUM_LAYERS = 4
#: For all ways on one device.
LIMIT_S = 90.0
GRAPHS = "CUDA graphs"

WAYS: dict[str, dict[str, Any]] = {
    "all-reduce": {},
    "wire dtype": {"algorithm": GradientAllReduce(wire_dtype=torch.bfloat16)},
    "ByteGrad": {"algorithm": ByteGrad()},
    "decentralized": {"algorithm": Decentralized()},
    "local SGD": {"algorithm": LocalSGD(period=2)},
    "DiLoCo": {"algorithm": DiLoCo(sync_every=2, fragments=2, fragment_sync_delay=1, fragment_update_alpha=0.5)},
    "sharded": {},
    GRAPHS: {"static_graph": True},
}


def train_all(rank: int, folder: str, device: str) -> None:
    """Every way, one after the other, since processes take longer to start than to train; each leaves its result."""
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)  # where a rank hangs; what came before has its result
    torch.set_num_threads(1)
    store = f"file://{folder}/store_{device}"
    limit = timedelta(seconds=60)
    # NCCL has no two ranks on one device. Devices that gloo does not know have a backend of their own.
    backend = "gloo" if device in ("cpu", "cuda") else None
    dist.init_process_group(backend, init_method=store, rank=rank, world_size=2, timeout=limit)
    for name in WAYS:
        result = train(rank, name, device)
        torch.save(result, f"{folder}/{name}_{device}_{rank}.pt")
        torch._dynamo.reset()
        dist.barrier()
    dist.destroy_process_group()


def train(rank: int, name: str, device: str) -> dict[str, Tensor]:
    """Replicated on the default stream, trained on another one; returns the state and the number of early buckets."""
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS))).to(device)
    compiled = {"mode": "reduce-overhead"} if name == GRAPHS and device == "cuda" else {"backend": "aot_eager"}
    model = ddp_compile(module, bucket_cap_mb=0.01, split="backward", **compiled, **WAYS[name])
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if name == "sharded":
        optimizer = shard_optimizer(optimizer, model)
    if device == "cpu" or name == GRAPHS:
        steps(model, optimizer, rank, device)
    else:
        before, side = torch.accelerator.current_stream(), torch.Stream(device)
        side.wait_stream(before)
        torch.accelerator.set_stream(side)
        steps(model, optimizer, rank, device)
        torch.accelerator.set_stream(before)
        before.wait_stream(side)
    early = sum(bucket.was_launched_early for bucket in model._ddp_compile_state.reducer.buckets)
    return {**{key: value.cpu() for key, value in model.state_dict().items()}, "early": torch.tensor(early)}


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, device: str) -> None:
    generator = torch.Generator().manual_seed(rank)
    for _ in range(6):
        optimizer.zero_grad()
        model(torch.randn(16, WIDTH, generator=generator).to(device)).square().mean().backward()
        optimizer.step()


class Trained(NamedTuple):
    """Where the results of all ways are, and what ended the training of those that have none."""

    folder: Path
    error: Exception | None

    def result(self, name: str, device: str, rank: int) -> dict[str, Tensor]:
        path = self.folder / f"{name}_{device}_{rank}.pt"
        if not path.exists():
            raise AssertionError(f"{name} on {device} has no result on rank {rank}") from self.error
        return torch.load(path)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    assert ACCELERATOR is not None
    folder, error = tmp_path_factory.mktemp("trained"), None
    for device in (ACCELERATOR.type, "cpu"):
        try:
            mp.spawn(train_all, (str(folder), device), nprocs=2)  # type: ignore[no-untyped-call]
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as ended:
            error = error or ended
    return Trained(folder, error)


@pytest.mark.parametrize("name", WAYS)
def test_training_on_a_side_stream(name: str, trained: Trained) -> None:
    assert ACCELERATOR is not None
    for rank in range(2):
        ours, theirs = (trained.result(name, device, rank) for device in (ACCELERATOR.type, "cpu"))
        for key, value in ours.items():
            torch.testing.assert_close(value, theirs[key], rtol=1e-2, atol=1e-3)


def test_cuda_graphs_leave_buckets_early(trained: Trained) -> None:
    """A CUDA graph that took moved gradients would return copies of them, and no bucket could leave in the backward."""
    assert ACCELERATOR is not None
    for rank in range(2):
        assert trained.result(GRAPHS, ACCELERATOR.type, rank)["early"] == NUM_LAYERS - 1
