"""Which graphs are left whole: backends, compiled autograd, ``split="auto"``; and what that leaves alone."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx as inductor
from models import products
from residual_layers import ONE_LAYER_MIB, WIDTH, ResidualLayers
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.debugging import boxed_nop
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.utils.checkpoint import checkpoint
from ways_to_train import count_early, note_launches

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")


def replicated(split: str = "backward", make: Callable[[], nn.Module] = ResidualLayers, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = ddp_compile(make(), split=split, **{"bucket_cap_mb": ONE_LAYER_MIB, **settings})
    # With a hook buckets are launched on a single rank as well, and so inside the backward.
    model.register_comm_hook(None, allreduce_hook)
    return model


def step(model: nn.Module, rows: int = 8) -> None:
    model.zero_grad()
    model(torch.ones(rows, WIDTH)).square().sum().backward()


def num_launched_early(model: nn.Module, rows: int = 8) -> int:
    """Of six buckets; the last one is ready when the backward ends, and left to its hooks."""
    launched = count_early(model)
    step(model, rows)
    return len(launched)


@pytest.mark.inductor
def test_inner_compile() -> None:
    module = ResidualLayers()
    with pytest.raises(ValueError, match="inner_compile=5, which is not callable"):
        ddp_compile(module, split="backward", backend=functools.partial(inductor.compile_fx, inner_compile=5))
    assert type(module) is ResidualLayers
    seen: list[str] = []

    def inner_compile(gm: fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        seen.append("backward" if kwargs.get("is_backward") else "forward")
        return inductor.compile_fx_inner(gm, inputs, **kwargs)

    backend = functools.partial(inductor.compile_fx, inner_compile=inner_compile)
    with torch._functorch.config.patch(enable_autograd_cache=False):
        assert num_launched_early(replicated(make=lambda: products(WIDTH, 6), backend=backend)) == 5
    assert seen == ["forward", "backward"]


def by_hand(gm: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    return gm.forward


@pytest.mark.parametrize(
    ("backend", "name"),
    [("eager", "eager"), (by_hand, "by_hand"), (aot_autograd(fw_compiler=boxed_nop), "compiler_fn")],
)
def test_other_backends_are_cut(backend: Any, name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="ddp_compile.compile.backend"):
        model = replicated(backend=backend)
    (record,) = caplog.records
    assert f"which {name} is not: graphs are cut in the forward instead" in record.getMessage()
    step(model)
    (graph,) = model.explain().graphs
    assert len(graph.partitions) == 6 and not graph.launches_in_backward


class CheckpointedWhole(ResidualLayers):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


class CheckpointedInPart(ResidualLayers):
    """Two of six cuts could be made."""

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[:4], x, use_reentrant=False)
        return self.layers[5](torch.tanh(self.layers[4](x)))


def test_auto_leaves_graphs_whole(caplog: pytest.LogCaptureFixture) -> None:
    for module, num_partitions in ((ResidualLayers(), 6), (CheckpointedWhole(), 1), (CheckpointedInPart(), 1)):
        model = ddp_compile(module, bucket_cap_mb=ONE_LAYER_MIB, backend="aot_eager")
        with caplog.at_level(logging.INFO, logger="ddp_compile.compile.backend"):
            step(model)
        (graph,) = model.explain().graphs
        assert (len(graph.partitions), graph.launches_in_backward) == (num_partitions, num_partitions == 1)
    whole = "graph 0: left whole, since cutting it in the forward would not launch every bucket early"
    assert (
        caplog.messages.count(whole) == caplog.messages.count("graph 0: 6 buckets, launched inside its backward") == 2
    )


def test_compiled_autograd(caplog: pytest.LogCaptureFixture) -> None:
    settings: Any = {"bucket_cap_mb": ONE_LAYER_MIB, "backend": "aot_eager"}
    automatic, asked = ddp_compile(CheckpointedWhole(), **settings), replicated(**settings)
    with (
        torch._dynamo.config.patch(compiled_autograd=True),
        caplog.at_level(logging.INFO, logger="ddp_compile.compile.backend"),
    ):
        step(automatic)
        with pytest.raises(Exception, match="split='backward' cannot be used with compiled autograd"):
            step(asked)
    (graph,) = automatic.explain().graphs
    assert (len(graph.partitions), graph.launches_in_backward) == (1, False)
    assert "graph 0: not launched inside its backward, since compiled autograd compiles another one" in caplog.messages


class ScaledByRows(ResidualLayers):
    """Can be cut for every bucket only while the number of rows is no symbol."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * (1.0 / x.shape[0])
        return x


def test_auto_leaves_a_later_graph_whole() -> None:
    model = ddp_compile(ScaledByRows(), bucket_cap_mb=ONE_LAYER_MIB, backend="aot_eager")
    model.register_comm_hook(None, allreduce_hook)
    num_early = [num_launched_early(model, rows) for rows in (3, 4, 5)]
    first, later = model.explain().graphs
    assert (len(first.partitions), len(later.partitions)) == (6, 1)
    # Iterations 1 and 2 are agreement points; in the second one the graph is new.
    assert num_early == [0, 0, 5]
    assert later.not_cut
    explained = str(model.explain())
    assert "graph 1: 6 buckets, launched inside its backward\n  not cut in the forward at " in explained
    assert "\n  at output: bucket 5 is ready when the graph ends\n" in explained  # in no module


def test_backward_after_unwrap() -> None:
    model = replicated(backend="aot_eager")
    sent = note_launches(model, lambda bucket: bucket.spec.index)
    for _ in range(2):
        step(model)
    assert len(sent) == 12
    sent.clear()
    model.zero_grad()
    outputs = model(torch.ones(8, WIDTH))
    model.unwrap()
    outputs.square().sum().backward()
    assert sent == []
    gradients = [p.grad.clone() for p in model.parameters()]
    step(model)
    assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))


def test_saved_tensor_hooks() -> None:
    packed: dict[str, int] = {}
    for split in ("none", "backward"):
        model = replicated(split, backend="aot_eager")
        step(model)
        numbers: list[int] = []

        def pack(tensor: Tensor, numbers: list[int] = numbers) -> Tensor:
            numbers.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            step(model)
        packed[split] = sum(numbers)
    assert packed["backward"] == packed["none"] > 0
