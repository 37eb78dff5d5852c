"""Calls of a replicated model in which something else is at work: swapped tensors, modes, transforms, TorchScript."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
import torch.distributed as dist
import torch.distributed.autograd as dist_autograd
from beside import beside_plain, one_backward, own_batch, seeded, train_beside
from models import Mlp, Scaled, assert_buckets_launched_early
from process_copies import run_in_copy
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed import rpc
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from warned import warned

from ddp_compile import ReplicationError, ddp_compile

WIDTH, NUM_STEPS = 16, 5
CAP_MB = 0.0015  # a layer


def mlp() -> nn.Module:
    return Mlp(WIDTH, num_layers=3)


@on_ranks(2)
def test_functional_call_trains() -> None:
    def swap_at_times(model: Any, x: Tensor, step: int) -> None:
        derived = {name: 0.5 * p for name, p in model.named_parameters() if "layers.1" in name}
        output = functional_call(model, derived, (x,)) if step % 2 else model(x)
        output.square().mean().backward()

    models = beside_plain(mlp, bucket_cap_mb=CAP_MB, split="backward")
    assert max(train_beside(models, swap_at_times, NUM_STEPS, width=WIDTH, lr=0.1)) < 1e-5


# Modes and transforms, under which nothing can be compiled


def jvp_step(model: Any, x: Tensor) -> Tensor:
    value, slope = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return value.square().mean() + slope.square().mean()


def dual_step(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        value, slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
        return value.square().mean() + slope.square().mean()


def vmap_step(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: model(row[None])[0])(x).square().mean()


def flops_step(model: Any, x: Tensor) -> Tensor:
    with FlopCounterMode(display=False) as counter:
        loss = model(x).square().mean()
    assert counter.get_total_flops() == 2 * 3 * len(x) * WIDTH**2
    return loss


def eager_step(model: Any, x: Tensor) -> Tensor:
    with torch.compiler.set_stance("force_eager"):
        return model(x).square().mean()


UNCOMPILED = {
    each.__name__.removesuffix("_step"): each for each in (jvp_step, dual_step, vmap_step, flops_step, eager_step)
}


@pytest.mark.parametrize("call", UNCOMPILED)
@on_ranks(2)
def test_modes_and_transforms(call: str) -> None:
    """A call that cannot be compiled runs uncompiled, with exact gradients, also on one rank alone."""
    ours, plain = beside_plain(lambda: Scaled(WIDTH, 3), bucket_cap_mb=CAP_MB, split="backward")

    def step_of(model: Any, x: Tensor, step: int) -> None:
        is_it = step == 0 or (step == 2 and dist.get_rank() == 0)
        (UNCOMPILED[call](model, x) if is_it else model(x).square().mean()).backward()

    with warned() as said:
        assert max(train_beside((ours, plain), step_of, NUM_STEPS, width=WIDTH, lr=0.1)) < 1e-5
    assert len(ours.explain().graphs) == 1
    assert not any("nothing was compiled" in each for each in said)
    assert_buckets_launched_early(ours)


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Blocks() for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.mark.parametrize("reentrant", [False, True])
@on_ranks(2)
def test_checkpoint_under_a_mode(reentrant: bool) -> None:
    """The mode ends before the backward, in which the blocks of the checkpoints run again."""
    ours, plain = beside_plain(lambda: Checkpointed(reentrant), bucket_cap_mb=CAP_MB, regions=[Blocks])

    def step_of(model: Any, x: Tensor, step: int) -> None:
        with FlopCounterMode(display=False) if step in (0, 2) else contextlib.nullcontext():
            loss = model(x.requires_grad_()).square().mean()
        loss.backward()

    assert max(train_beside((ours, plain), step_of, NUM_STEPS, width=WIDTH, lr=0.1)) < 1e-5
    assert any(region.num_training_graphs for region in ours.explain().regions)


@pytest.mark.long
@on_ranks(2)
def test_export() -> None:
    """Nothing is broadcast into the exported program, however many forwards came before."""
    for num_before in range(3):
        model = ddp_compile(Scaled(WIDTH, 3), backend="aot_eager")
        for _ in range(num_before):
            one_backward(model, own_batch(0, WIDTH))
        program = torch.export.export(model, (own_batch(0, WIDTH),))
        assert not any("broadcast" in str(node.target) for node in program.graph.nodes)
        one_backward(model, own_batch(1, WIDTH))
        torch._dynamo.reset()


class Blocks(nn.Module):
    """Without a forward that Dynamo would start at, so that blocks inside would be compiled by themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)))
        self.register_buffer("scale", torch.full((WIDTH,), 2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x) * self.scale


class Around(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.before, self.middle, self.after = mlp(), middle, mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.middle(self.before(x)))


LEFT_TO_PYTHON: dict[str, Callable[[], Any]] = {
    "disabled": lambda: torch.compiler.disable(Blocks()),
    "scripted": lambda: torch.jit.script(Blocks()),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit")
@pytest.mark.parametrize("how", LEFT_TO_PYTHON)
@on_ranks(2)
def test_submodules_left_to_python(how: str) -> None:
    plain, other = (Around(seeded(LEFT_TO_PYTHON[how])) for _ in range(2))  # TorchScript cannot be copied
    other.load_state_dict(plain.state_dict())
    model: Any = ddp_compile(other, bucket_cap_mb=CAP_MB, split="backward", backend="aot_eager")
    assert max(train_beside((model, plain), num_steps=NUM_STEPS, width=WIDTH, lr=0.1)) < 1e-5
    explained = model.explain()
    assert len(explained.graphs) == 2  # before and after
    assert not any(region.num_training_graphs for region in explained.regions)


@on_ranks(2)
def test_regions_in_a_disabled_module() -> None:
    model: Any = ddp_compile(Around(torch.compiler.disable(Mlp(WIDTH))), regions=[nn.Linear], backend="aot_eager")
    assert all(not name.startswith("middle") for region in model.explain().regions for name in region.names)


class Policy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.other, self.log_std = mlp(), nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, uses_other: bool) -> Any:
        mean = self.body(x)
        return torch.distributions.Normal(self.other(mean) if uses_other else mean, self.log_std.exp())


@on_ranks(2)
def test_distribution_as_output() -> None:
    ours, plain = beside_plain(Policy, bucket_cap_mb=CAP_MB, split="backward", find_unused_parameters=True)

    def step_of(model: Any, x: Tensor, step: int) -> None:
        uses_other = dist.get_rank() == step % 3
        (-model(x, uses_other).log_prob(torch.zeros(WIDTH)).mean()).backward()

    assert max(train_beside((ours, plain), step_of, NUM_STEPS, width=WIDTH, lr=0.1)) < 1e-5


@pytest.mark.parametrize(
    ("alone", "said"),
    [
        ("forward", "rank 0: a backward outside no_sync() is not reduced, since its forward was "),
        ("backward", "rank 0: a backward inside no_sync() is reduced, since its forward was "),
        ("nothing", None),
    ],
)
@on_ranks(2, eagerly=True)
def test_half_in_no_sync(alone: str, said: str | None) -> None:
    """In two steps the forward or the backward alone; only rank 0 warns, once."""
    with warned() as warnings:
        model = ddp_compile(nn.Linear(1, 1, bias=False), backend="eager")
        for _ in range(2):
            model.zero_grad()
            with model.no_sync() if alone == "forward" else contextlib.nullcontext():
                output = model(torch.full((1, 1), float(dist.get_rank())))
            with model.no_sync() if alone == "backward" else contextlib.nullcontext():
                output.backward()
            assert model.weight.grad.item() == (0.5 if alone != "forward" else dist.get_rank())
    assert len(warnings) == (said is not None and dist.get_rank() == 0)
    assert all(each.startswith(str(said)) for each in warnings)


# ``torch.distributed.autograd`` keeps gradients in its context: unreduced gradients there do not go unnoticed.


def train_in_a_context(folder: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "group"), 1), rank=0, world_size=1)
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder / 'rpc'}")
    rpc.init_rpc("trainer", rank=0, world_size=1, rpc_backend_options=options)
    plain = nn.Linear(3, 2)
    model = ddp_compile(nn.Linear(3, 2), backend="eager")
    model.load_state_dict(plain.state_dict())
    x = torch.ones(4, 3)
    plain(x).sum().backward()
    model(x).sum().backward()  # RPC alone changes nothing
    assert torch.equal(model.weight.grad, plain.weight.grad)
    with dist_autograd.context() as context:
        with pytest.raises(ReplicationError, match=r"rank 0: a forward was called inside torch\.distributed\.autograd"):
            model(x)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x))
        with model.no_sync():  # the way out
            dist_autograd.backward(context, [model(x).sum()])
        assert torch.equal(dist_autograd.get_gradients(context)[model.weight], plain.weight.grad)
    model.zero_grad()
    model(x).sum().backward()
    assert torch.equal(model.weight.grad, plain.weight.grad)
    rpc.shutdown()
    dist.destroy_process_group()


@pytest.mark.skipif(not rpc.is_available(), reason="a torch without RPC has no distributed autograd")
def test_forward_in_a_context(tmp_path: Path) -> None:
    ended = run_in_copy(train_in_a_context, tmp_path)
    assert ended.exit_code == 0, ended.stderr
