"""Data parallelism around submodules that FSDP2 (``fully_shard``) has sharded, over all ranks or over parts of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from in_ci import only
from models import relative_difference
from rank_pool import RankPool, run_in_new_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from ddp_compile import ddp_compile

Ranks = Callable[[int], RankPool]
ROWS, WIDTH = 4, 6
CAP_MB = 0.0001


class Blocks(nn.Module):
    """The first dimension of ``second`` is odd: two ranks hold parts of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.first, self.second = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 5)
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 3)
        self.leaves_out_second = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.embed(x))
        return self.head(self.norm(x[:, :5] if self.leaves_out_second else self.second(x)))


def make_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "parts"))


class Sharding(NamedTuple):
    """Which submodules are sharded: over all ranks, or over parts of which there are two replicas."""

    over_all: bool
    submodules: tuple[str, ...]
    settings: dict[str, Any]

    def of(self, model: Blocks, mesh: DeviceMesh) -> Blocks:
        over = init_device_mesh("cpu", (4,)) if self.over_all else mesh["parts"]
        for name in self.submodules:
            fully_shard(model.get_submodule(name), mesh=over)
        return model


SHARDINGS = {
    "over all": Sharding(True, ("first", "second"), {"backend": "aot_eager"}),
    "over parts": Sharding(False, ("first", "second"), {"backend": "aot_eager", "split": "forward"}),
    "backward split": Sharding(False, ("second",), {"backend": "aot_eager", "split": "backward"}),
    "the first one": Sharding(False, ("embed", "first"), {"backend": "eager"}),
    "one in another": Sharding(False, ("first.0", "first", "second"), {"backend": "eager"}),
}


def largest_difference(sharding: Sharding, mesh: DeviceMesh | None = None) -> float:
    """Of a gradient to that of one process with the whole batch; one step is a micro-batch."""
    mesh = mesh or make_mesh()
    torch.manual_seed(dist.get_rank())  # the ranks agree by the broadcast alone
    model: Any = sharding.of(Blocks(), mesh)
    model = ddp_compile(model, bucket_cap_mb=CAP_MB, first_bucket_cap_mb=CAP_MB, **sharding.settings)
    alone = Blocks()
    alone.load_state_dict({name: whole(tensor) for name, tensor in model.state_dict().items()})
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone)]
    rank, differences = dist.get_rank(), []
    for step in range(4):
        torch.manual_seed(step)
        x, y = torch.randn(4 * ROWS, WIDTH), torch.randn(4 * ROWS, 3)
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        with model.no_sync() if step % 3 == 1 else contextlib.nullcontext():
            (model(x[own]) - y[own]).square().mean().backward()
        (alone(x) - y).square().mean().backward()
        if step % 3 == 1:
            with torch.no_grad():
                assert relative_difference(model(x[own]), alone(x)[own]) < 1e-5
            continue
        for (name, ours), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor) == (name.split(".")[0] in sharding.submodules)
            differences.append(relative_difference(whole(ours.grad), expected.grad))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    state = model._ddp_compile_state
    assert state.compiler.failures == []
    assert state.backend.reports
    return max(differences)


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def test_gradients_are_those_of_the_whole_batch(seen: list[Seen]) -> None:
    assert max(each.difference for each in seen) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in SHARDINGS if name != "over parts"])
def test_gradients_are_those_of_the_whole_batch_however_it_is_sharded(name: str, ranks: Ranks) -> None:
    for difference in run_in_new_processes(ranks(4), largest_difference, SHARDINGS[name]):
        assert difference < 1e-5


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    over_parts = Sharding(False, ("second",), {})
    with_hook: Any = over_parts.of(Blocks(), mesh)
    with_hook.second.set_all_reduce_hook(lambda reduced: None)
    joined: Any = ddp_compile(over_parts.of(Blocks(), mesh))
    tried: dict[str, Callable[[], object]] = {
        "replicas alone": lambda: ddp_compile(over_parts.of(Blocks(), mesh), device_mesh=mesh["replicas"]),
        "parts alone": lambda: ddp_compile(
            Sharding(True, ("second",), {}).of(Blocks(), mesh), device_mesh=mesh["parts"]
        ),
        "the whole": lambda: ddp_compile(fully_shard(Blocks(), mesh=mesh["parts"])),
        "all there is": lambda: ddp_compile(nn.Sequential(fully_shard(nn.Linear(3, 3), mesh=mesh["parts"]))),
        "a hook": lambda: ddp_compile(with_hook),
        "join": lambda: joined.join(),
    }
    said = {}
    for name, attempt in tried.items():
        try:
            attempt()
        except RuntimeError as error:
            said[name] = str(error)
    joined.unwrap()
    ddp_compile(joined)  # the hook has gone
    return said


def test_what_cannot_be_averaged_is_refused_on_every_rank_by_name(seen: list[Seen]) -> None:
    for rank, (_, said) in enumerate(seen):
        replicas = "0, 2" if rank % 2 == 0 else "1, 3"
        parts = "0-1" if rank < 2 else "2-3"
        start = f"rank {rank}: submodule second is sharded by fully_shard over ranks"
        assert said["replicas alone"].startswith(
            f"{start} 0-1 and 2-3, but ddp_compile averages over ranks {replicas}."
        )
        assert said["parts alone"].startswith(f"{start} 0-3, but ddp_compile averages over ranks {parts}.")
        for name in ("replicas alone", "parts alone", "a hook", "all there is", "the whole"):
            assert "fully_shard(module, mesh=mesh['replicas', 'parts'])" in said[name]
        assert said["the whole"].startswith(f"rank {rank}: the module is an FSDPModule")
        assert said["all there is"].startswith("fully_shard has taken every parameter that requires a gradient")
        assert said["a hook"].startswith(f"rank {rank}: submodule second already has an all-reduce hook")
        assert said["join"].startswith(f"rank {rank}: Join cannot be used with submodules of fully_shard (second)")


class Seen(NamedTuple):
    """What one rank has seen of what CI asks of a mesh of four."""

    difference: float
    refusals: dict[str, str]


def see_both() -> Seen:
    mesh = make_mesh()
    return Seen(largest_difference(SHARDINGS["over parts"], mesh), refusals(mesh))


@pytest.fixture(scope="module")
def seen(rank_pools: dict[int, RankPool]) -> list[Seen]:
    """By rank; in one go, as a mesh needs ranks of its own."""
    return run_in_new_processes(rank_pools.setdefault(4, RankPool(4)), see_both)


@torch.compiler.set_stance("force_eager")
def leave_one_out(at_step: int) -> str:
    """What a rank says where the second of two replicas leaves a submodule out."""
    over = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "parts"))["parts"]
    model: Any = Blocks()
    fully_shard(model.first, mesh=over)
    fully_shard(model.second, mesh=over)
    ddp_compile(model, backend="eager", find_unused_parameters=True)
    for step in range(3):
        model.leaves_out_second = step == at_step and dist.get_rank() == 1
        try:
            model(torch.randn(ROWS, WIDTH)).sum().backward()
        except RuntimeError as error:
            return f"{type(error).__name__} in step {step}: {error}"
    return ""


@pytest.mark.parametrize("at_step", only([2], [0, 2]))
def test_a_replica_that_leaves_one_out_is_an_error_on_both_before_a_step(at_step: int, ranks: Ranks) -> None:
    said = ranks(2).run(leave_one_out, at_step, timeout_s=2.0)
    if at_step == 0:
        for rank, each in enumerate(said):
            assert each.startswith(f"RanksDifferError in step 0: rank {rank}: in the first backward, the submodules of")
            assert "in another order on rank 1 than on rank 0; here it is" in each
        return
    assert all(each.startswith(f"ReductionError in step {at_step}: rank {rank}: ") for rank, each in enumerate(said))
    assert "over its replicas failed. Another rank has raised, exited, or not reached the same step" in said[0]
    assert (
        "were reduced in the order first since the last backward that ended without an error, but second, first in"
        in said[1]
    )
