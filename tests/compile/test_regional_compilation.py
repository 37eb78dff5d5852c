"""Regional compilation on one rank: which modules are regions, how often each is compiled, and refusals."""

import copy
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from beside import train_beside
from in_ci import only
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from ddp_compile import ddp_compile
from ddp_compile.features.regions import find_regions

pytestmark = pytest.mark.usefixtures("single_rank_group")

WIDTH = 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return x + scale * torch.tanh(self.linear(self.norm(x)))


class Other(Block):
    """Another class of blocks."""


class Model(nn.Module):
    def __init__(self, num_blocks: int = 4, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stages(nn.Module):
    """Lists in lists, under several kinds of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleDict({"0": Block(), "1": Block()})
        self.stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.mixed = nn.ModuleList([Block(), Other(), nn.Tanh(), Block(), nn.Tanh()])


def backward(model: nn.Module) -> None:
    model(torch.randn(4, WIDTH)).square().mean().backward()


def test_auto_regions() -> None:
    assert list(find_regions(Stages(), "auto")) == [
        *("encoder.0", "encoder.1", "stages.0.0", "stages.0.1", "mixed.0", "mixed.3")
    ]
    nested = nn.Sequential(Model(), Model())
    assert list(find_regions(nested, "auto")) == ["0", "1"]


def test_blocks_share_compiled_code() -> None:
    counter = CompileCounter()
    model: Any = ddp_compile(Model(24), regions="auto", backend=counter)
    reference = copy.deepcopy(model)
    assert train_beside((model, reference), num_steps=2, width=WIDTH) == [0.0, 0.0]
    assert counter.frame_count == 1
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), reference(x))
    assert counter.frame_count == 2
    says = "24 regions of Block (blocks.0, blocks.1, ..., blocks.23): 1 graph for training, 1 graph for evaluation"
    assert says in str(model.explain())


class Numbered(Block):
    """As blocks that know which layer they are."""

    counter = itertools.count(1)

    def __init__(self) -> None:
        super().__init__()
        self.number = next(self.counter)

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return super().forward(x, 1 / self.number)


def test_recompile_limit_of_regions() -> None:
    counter = CompileCounter()
    with torch._dynamo.config.patch(recompile_limit=2):
        model = ddp_compile(Model(4, Numbered), regions="auto", backend=counter)
        backward(model)
    assert counter.frame_count == 4


class Drops(Block):
    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return nn.functional.dropout(x, 0.5, self.training)


def test_region_with_graph_break_follows_mode() -> None:
    model = ddp_compile(Model(make=Drops), regions="auto", backend="eager")
    x = torch.randn(4, WIDTH)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_fullgraph_applies_to_regions() -> None:
    counter = CompileCounter()
    model = ddp_compile(BreaksOutside(), regions="auto", backend=counter, fullgraph=True)
    x = torch.randn(4, WIDTH, requires_grad=True)  # like what the blocks after the first one get
    model(x).square().mean().backward()
    assert counter.frame_count == 1
    model = ddp_compile(Model(make=Drops), regions="auto", backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        backward(model)


class BreaksOutside(Model):
    """A graph break in a loop, at which Dynamo gives up the whole frame."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            torch._dynamo.graph_break()
            x = block(x)
        return self.head(self.stem(x))


def steps_with_hooks(model: nn.Module, where: str, when: int) -> list[Tensor]:
    """Outputs and a gradient of three steps, with a hook of each kind from one of them on."""
    x = torch.ones(2, WIDTH)
    found = []
    for step in range(3):
        module = model.get_submodule(where)
        if step == when:
            module.register_forward_pre_hook(lambda _module, args: (args[0] + 1,))
            module.register_forward_hook(lambda _module, _args, output: 3 * output)
            module.register_full_backward_hook(lambda _module, gradients, _: (5 * gradients[0],))
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None
        found += [output.detach(), gradient]
    return found


# Of one of several regions of a class, or of the only one; of a module inside one.
@pytest.mark.parametrize(
    ("num_blocks", "where", "when"),
    only(
        [(1, "blocks.0", 1), (4, "blocks.2", 1), (4, "blocks.0.linear", 0)],
        [
            (n, where, when)
            for n, where in ((1, "blocks.0"), (4, "blocks.2"), (4, "blocks.0.linear"))
            for when in (0, 1)
        ],
    ),
)
def test_hooks_of_blocks(num_blocks: int, where: str, when: int) -> None:
    model = Model(num_blocks)
    expected = steps_with_hooks(copy.deepcopy(model), where, when)
    found = steps_with_hooks(ddp_compile(model, regions=[Block], backend="aot_eager"), where, when)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


class Checkpoints(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
        return self.head(x)


def test_checkpointed_region_runs_compiled_twice() -> None:
    runs = []

    def backend(gm: Any, _inputs: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            runs.append(torch.is_grad_enabled())
            return gm.forward(*args)

        return run

    model = ddp_compile(Checkpoints(), regions="auto", backend=backend, compile_evaluation=False)
    backward(model)
    assert runs == 4 * [False] + 4 * [True]  # random numbers of compiled code are others than those of eager code
    with torch.no_grad():
        model(torch.randn(4, WIDTH))
    assert len(runs) == 8


def test_regions_are_freed() -> None:
    counter = CompileCounter()
    model = ddp_compile(Model(), regions="auto", backend=counter)
    backward(model)
    seen = [weakref.ref(model), weakref.ref(model.blocks[1]), weakref.ref(model.blocks[1].linear.weight)]
    block = model.blocks[0]
    del model
    gc.collect()
    assert [each() for each in seen] == [None, None, None]
    block(torch.randn(2, WIDTH))
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    ("make", "settings", "says"),
    [
        (Model, {"regions": "all"}, "regions='all' is neither 'auto' nor a list of module classes"),
        (Model, {"regions": []}, r"regions=\[\] is neither"),
        (Model, {"regions": Block}, "is neither 'auto' nor a list of module classes"),
        (Model, {"regions": [Block()]}, "is neither 'auto' nor a list of module classes"),
        (Model, {"regions": [Block, nn.Conv2d]}, "rank 0: regions names Conv2d, but no submodule of Model is one"),
        (Model, {"regions": [Model]}, "rank 0: regions names Model, but no submodule of Model is one"),
        (lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()), {"regions": "auto"}, "regions='auto' finds no repeated"),
    ],
)
def test_wrong_regions_are_refused(make: Callable[[], nn.Module], settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ddp_compile(make(), backend="eager", **settings)


def test_compiled_region_is_refused() -> None:
    model = Model()
    model.blocks[2].compile(backend="eager")
    with pytest.raises(
        ValueError, match=r"rank 0: regions='auto' would compile blocks\.2, which module.compile\(\) compiles already"
    ):
        ddp_compile(model, regions="auto", backend="eager")
    assert model.blocks[0](torch.randn(2, WIDTH)).shape == (2, WIDTH)
