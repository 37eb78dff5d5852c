"""Data parallelism combined with tensor parallelism: parameters that are DTensors, on a mesh of two dimensions."""

import contextlib
import copy
import re
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
    return max(differences)


def on_both_dimensions(mesh: DeviceMesh) -> nn.Module:
    model = Blocks()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), mesh, [Replicate(), Shard(1)]))
    return model


def delays_a_part(mesh: DeviceMesh) -> None:
    model = parallelize(Blocks(), mesh["tp"], in_columns_and_rows)
    delayed = {"delay_all_reduce_named_params": [("first.up.weight", model.first.up.weight)]}
    ddp_compile(model, device_mesh=mesh["dp"], param_to_hook_all_reduce=model.head.weight, **delayed)


def check_refusals(mesh: DeviceMesh) -> None:
    rank, replicas = dist.get_rank(), dist.get_process_group_ranks(mesh["dp"].get_group())
    parts = dist.get_process_group_ranks(mesh["tp"].get_group())
    in_parts = f"first.up.weight is a DTensor with S(0) over ranks {parts} (tp), but ddp_compile would average over"
    way_out = "ddp_compile(model, device_mesh=mesh['dp'])"

    def parallel() -> Any:
        return parallelize(Blocks(), mesh["tp"], in_columns_and_rows)

    tried: list[tuple[Callable[[], object], str, str]] = [
        (
            lambda: ddp_compile(Blocks(), device_mesh=mesh),
            f"rank {rank}: device_mesh has 2 dimensions (dp, tp), but ddp_compile ",
            "",
        ),
        (
            lambda: ddp_compile(parallel(), device_mesh=mesh["tp"]),
            f"rank {rank}: {in_parts} ranks {parts}, which",
            way_out,
        ),
        (lambda: ddp_compile(parallel()), f"rank {rank}: {in_parts} ranks [0, 1, 2, 3], which", way_out),
        (lambda: delays_a_part(mesh), "first.up.weight is a DTensor, whose all-reduce cannot be delayed", ""),
        (
            lambda: ddp_compile(on_both_dimensions(mesh), device_mesh=mesh["dp"]),
            "head.weight is a DTensor with R, S(1) over ranks [0, 1, 2, 3] (dp, tp), but ddp_compile would"
            f" average over ranks {replicas}, which",
            way_out,
        ),
    ]
    for attempt, said, way in tried:
        with pytest.raises(RuntimeError, match=f"(?s){re.escape(said)}.*{re.escape(way)}"):
            attempt()


def check_unused_layer(mesh: DeviceMesh) -> None:
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


def check_broadcast_of_parts(mesh: DeviceMesh) -> None:
    """Parameters, and buffers that are DTensors, come from the first replica, part by part."""
    torch.manual_seed(dist.get_rank() // 2)  # as different as the replicas are
    model: Any = parallelize(Blocks(), mesh["tp"], in_columns_and_rows)
    model.register_buffer("seen", distribute_tensor(torch.rand(4), mesh["tp"], [Shard(0)]))
    torch.manual_seed(0)
    expected = Blocks()
    seen = torch.rand(4)
    ddp_compile(model, device_mesh=mesh["dp"], backend="eager")
    pairs = zip([*model.parameters(), model.seen], [*expected.parameters(), seen], strict=True)
    assert all(relative_difference(whole(ours), theirs) == 0 for ours, theirs in pairs)


def check_everything() -> None:
    """Compiles one of the recipes, since tracing DTensors takes most of the time; all others run eagerly."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name, recipe in RECIPES.items():
        torch._dynamo.reset()
        with torch.compiler.set_stance("default" if name == "backward" else "force_eager"):
            assert largest_difference(recipe, mesh) < 1e-5, name
    with torch.compiler.set_stance("force_eager"):
        for check in (check_refusals, check_unused_layer, check_broadcast_of_parts):
            check(mesh)


def test_on_a_mesh(rank_pools: dict[int, RankPool]) -> None:
    """In one go, as a mesh needs ranks of its own."""
    run_in_new_processes(rank_pools.setdefault(4, RankPool(4)), check_everything)
