"""Data parallelism combined with tensor parallelism: parameters that are DTensors, on a mesh of two dimensions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from models import relative_difference
from rank_pool import RankPool, run_in_new_processes
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from ddp_compile import ddp_compile

ROWS, WIDTH = 4, 16
CAP_MB = 0.001  # less than a block


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))


class Blocks(nn.Module):
    """With an odd ``hidden`` two ranks hold parts of different sizes."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.first, self.second = Block(hidden), Block(hidden)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def in_columns_and_rows(block: str) -> dict[str, ParallelStyle]:
    return {f"{block}.up": ColwiseParallel(), f"{block}.down": RowwiseParallel()}


def in_parts_of_two_sizes(block: str) -> dict[str, ParallelStyle]:
    """A local tensor does not tell the global size, so values between the layers stay DTensors."""
    return {f"{block}.up": ColwiseParallel(use_local_output=False), f"{block}.down": RowwiseParallel()}


def in_sequence(block: str) -> dict[str, ParallelStyle]:
    """The norm sees a part of the rows: its gradient is a partial sum, and its parameters are the same everywhere."""
    return {
        block: PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)),
        f"{block}.norm": SequenceParallel(sequence_dim=0),
        f"{block}.up": ColwiseParallel(input_layouts=Shard(0)),
        f"{block}.down": RowwiseParallel(),
    }


Style = Callable[[str], Mapping[str, ParallelStyle]]


def parallelize(model: nn.Module, mesh: DeviceMesh, style: Style) -> Any:
    return parallelize_module(model, mesh, {**style("first"), **style("second")})


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class Recipe(NamedTuple):
    """One way to train."""

    style: Style
    settings: Mapping[str, Any]
    hidden: int = 24
    accumulates: bool = False  #: in every other step
    freezes: bool = False  #: a DTensor
    comm_hook: Callable[..., Any] | None = None

    def replicate(self, alone: Blocks, mesh: DeviceMesh) -> Any:
        model = parallelize(copy.deepcopy(alone), mesh["tp"], self.style)
        ddp_compile(model, device_mesh=mesh["dp"], bucket_cap_mb=CAP_MB, first_bucket_cap_mb=CAP_MB, **self.settings)
        if self.comm_hook is not None:
            model.register_comm_hook(mesh["dp"].get_group(), self.comm_hook)  # without one it would be all ranks
        return model


RECIPES = {
    "backward": Recipe(in_columns_and_rows, {"backend": "aot_eager", "split": "backward"}),
    "sequence": Recipe(in_sequence, {"backend": "eager"}, accumulates=True),
    "comm hook": Recipe(in_parts_of_two_sizes, {"backend": "eager"}, 25, freezes=True, comm_hook=allreduce_hook),
}


def largest_difference(recipe: Recipe, mesh: DeviceMesh) -> float:
    """Of a gradient to that of one process with the whole batch; DistributedDataParallel takes the parameters out."""
    torch.manual_seed(3)
    alone = Blocks(recipe.hidden)
    alone.first.up.bias.requires_grad_(not recipe.freezes)
    model = recipe.replicate(alone, mesh)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone)]
    own = slice(mesh.get_local_rank("dp") * ROWS, (mesh.get_local_rank("dp") + 1) * ROWS)
    differences = []
    for step in range(5):
        torch.manual_seed(step)
        x, y = torch.randn(2 * ROWS, WIDTH), torch.randn(2 * ROWS, 5)
        is_local = recipe.accumulates and step % 2 == 0
        with model.no_sync() if is_local else contextlib.nullcontext():
            (model(x[own]) - y[own]).square().mean().backward()
        (alone(x) - y).square().mean().backward()
        if is_local:
            continue
        for ours, expected in zip(model.parameters(), alone.parameters(), strict=True):
            assert (ours.grad is None) == (expected.grad is None)
            if ours.grad is not None:
                differences.append(relative_difference(whole(ours.grad), expected.grad))
            if isinstance(ours.grad, DTensor):
                assert ours.grad.placements == ours.placements
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert model.explain().failures == ()
    return max(differences)


def go_through_recipes(names: list[str], mesh: DeviceMesh) -> dict[str, float]:
    found = {}
    for name in names:
        torch._dynamo.reset()
        found[name] = largest_difference(RECIPES[name], mesh)
    return found


def test_gradients(seen: list[Seen]) -> None:
    for each in seen:
        assert max(each.differences.values()) < 1e-5, each.differences


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    tried: dict[str, Callable[[], object]] = {
        "two dimensions": lambda: ddp_compile(Blocks(), device_mesh=mesh),
        "the dimension of the parts": lambda: ddp_compile(
            parallelize(Blocks(), mesh["tp"], in_columns_and_rows), device_mesh=mesh["tp"]
        ),
        "no mesh": lambda: ddp_compile(parallelize(Blocks(), mesh["tp"], in_columns_and_rows)),
        "a delayed one": lambda: delays_a_part(mesh),
        "on both dimensions": lambda: ddp_compile(on_both_dimensions(mesh), device_mesh=mesh["dp"]),
    }
    said = {}
    for name, attempt in tried.items():
        try:
            attempt()
        except RuntimeError as error:
            said[name] = str(error)
    return said


def on_both_dimensions(mesh: DeviceMesh) -> nn.Module:
    model = Blocks()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Replicate(), Shard(1)]))
    return model


def delays_a_part(mesh: DeviceMesh) -> None:
    model = parallelize(Blocks(), mesh["tp"], in_columns_and_rows)
    delayed = {"delay_all_reduce_named_params": [("first.up.weight", model.first.up.weight)]}
    ddp_compile(model, device_mesh=mesh["dp"], param_to_hook_all_reduce=model.head.weight, **delayed)


def test_refused_meshes(seen: list[Seen]) -> None:
    for rank, each in enumerate(seen):
        said = each.refusals
        row, column = divmod(rank, 2)
        parts, replicas = [2 * row, 2 * row + 1], [column, column + 2]
        way_out = "ddp_compile(model, device_mesh=mesh['dp'])"
        assert said["two dimensions"].startswith(
            f"rank {rank}: device_mesh has 2 dimensions (dp, tp), but ddp_compile "
        )
        assert said["the dimension of the parts"].startswith(
            f"rank {rank}: first.up.weight is a DTensor with S(0) over ranks {parts} (tp), but ddp_compile would"
            f" average over ranks {parts}, which"
        )
        assert (
            f"over ranks {parts} (tp), but ddp_compile would average over ranks [0, 1, 2, 3], which" in said["no mesh"]
        )
        assert (
            f"head.weight is a DTensor with R, S(1) over ranks [0, 1, 2, 3] (dp, tp), but ddp_compile would"
            f" average over ranks {replicas}, which" in (said["on both dimensions"])
        )
        assert all(way_out in said[name] for name in ("the dimension of the parts", "no mesh", "on both dimensions"))
        assert "first.up.weight is a DTensor, whose all-reduce cannot be delayed" in said["a delayed one"]


def averages_without_gradients_somewhere(mesh: DeviceMesh) -> bool:
    """With `find_unused_parameters`, a replica that has not used a layer takes its gradient from the other one."""
    torch.manual_seed(3)
    alone = Blocks()
    model: Any = parallelize(copy.deepcopy(alone), mesh["tp"], in_sequence)
    model.forward = lambda x: model.head(model.second(model.first(x) if model.uses_first else x))
    settings = {"find_unused_parameters": True, "backend": "eager", "bucket_cap_mb": CAP_MB}
    model.uses_first = mesh.get_local_rank("dp") == 0
    model = ddp_compile(model, device_mesh=mesh["dp"], **settings)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(2 * ROWS, WIDTH)
        for each in (model, alone):
            each.zero_grad()
        model(x[:ROWS] if model.uses_first else x[ROWS:]).square().mean().backward()
        used, unused = alone.head(alone.second(alone.first(x[:ROWS]))), alone.head(alone.second(x[ROWS:]))
        ((used.square().mean() + unused.square().mean()) / 2).backward()
        parameters = zip(model.parameters(), alone.parameters(), strict=True)
        assert all(relative_difference(whole(p.grad), q.grad) < 1e-5 for p, q in parameters), step
    return True


def test_unused_layer(seen: list[Seen]) -> None:
    assert all(each.averages_without_gradients_somewhere for each in seen)


def broadcasts_the_parts(mesh: DeviceMesh) -> list[float]:
    """Parameters, and buffers that are DTensors, come from the first replica, part by part."""
    torch.manual_seed(dist.get_rank() // 2)  # as different as the replicas are
    model: Any = parallelize(Blocks(), mesh["tp"], in_columns_and_rows)
    model.register_buffer("seen", distribute_tensor(torch.rand(4), mesh["tp"], [Shard(0)]))
    torch.manual_seed(0)
    expected = Blocks()
    seen = torch.rand(4)
    ddp_compile(model, device_mesh=mesh["dp"], backend="eager")
    pairs = zip([*model.parameters(), model.seen], [*expected.parameters(), seen], strict=True)
    return [relative_difference(whole(ours), theirs) for ours, theirs in pairs]


def test_init_sync_of_parts(seen: list[Seen]) -> None:
    assert all(max(each.differences_of_parts) == 0 for each in seen)


class Seen(NamedTuple):
    """One rank's results for all tests in CI."""

    differences: dict[str, float]
    refusals: dict[str, str]
    averages_without_gradients_somewhere: bool
    differences_of_parts: list[float]


def see_everything() -> Seen:
    """Compiles one of the recipes, since tracing DTensors takes most of the time; all others run eagerly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    differences = go_through_recipes(["backward"], mesh)
    with torch.compiler.set_stance("force_eager"):
        differences |= go_through_recipes(["sequence", "comm hook"], mesh)
        refused, averages = refusals(mesh), averages_without_gradients_somewhere(mesh)
        return Seen(differences, refused, averages, broadcasts_the_parts(mesh))


@pytest.fixture(scope="module")
def seen(rank_pools: dict[int, RankPool]) -> list[Seen]:
    """By rank; in one go, as a mesh needs ranks of its own."""
    return run_in_new_processes(rank_pools.setdefault(4, RankPool(4)), see_everything)
