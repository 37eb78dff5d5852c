"""A graph break that leaves the module's own code to Python: what is compiled inside, and the messages."""

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from beside import train_beside
from models import TanhLayer
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from warned import warnings_of

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("single_rank_group")

WIDTH = 8


class Block(TanhLayer):
    def __init__(self) -> None:
        super().__init__(WIDTH)


class CalledByItsClass(Block):
    """Like Transformers' layers, whose class has its own call, for checkpoints."""

    def __call__(self, x: Tensor) -> Tensor:
        return 2 * super().__call__(x)


class Loop(nn.Module):
    """Calls blocks in a loop that Dynamo gives up."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            print(end="")
        return x


class Broken(Loop):
    """Dynamo resumes after the break, and inlines the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        for block in self.blocks:
            x = block(x)
        return x


class UntilDone(nn.Module):
    """Calls modules of torch in a loop whose end depends on data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = self.net(x)
            if x.isnan().any():
                break
        return x


class ChoosesByValues(nn.Module):
    """The first break is in the module, and blocks are left to Python by another one, in the middle part."""

    class Middle(Loop):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                if x.sum() > -1e9:
                    x = block(x)
            return x

    def __init__(self) -> None:
        super().__init__()
        self.middle = self.Middle()

    def forward(self, x: Tensor) -> Tensor:
        print(end="")
        return self.middle(x)


def backward(model: nn.Module) -> None:
    model(torch.randn(4, WIDTH)).square().mean().backward()


def line_of(function: Callable[..., Any], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    (offset,) = (i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{first + offset}"


def assert_computes_the_same(model: nn.Module, plain: nn.Module) -> None:
    assert train_beside((model, plain), num_steps=1, width=WIDTH) == [0.0]
    x = torch.randn(4, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("make_block", [Block, CalledByItsClass])
def test_blocks_after_graph_break_share_a_graph(make_block: Callable[[], nn.Module]) -> None:
    counter = CompileCounter()
    model: Any = ddp_compile(Loop(make_block), backend=counter, compile_evaluation=False)
    plain = copy.deepcopy(model)
    (warning,) = warnings_of(lambda: assert_computes_the_same(model, plain), times=3)
    assert counter.frame_count == 2  # the first block's input requires no gradient
    for said in (warning, str(model.explain())):
        assert f"3 regions of {make_block.__name__} (blocks.0, blocks.1, blocks.2): 2 graphs" in said
        assert line_of(Loop.forward, "print(") in said
    assert "print" in warning.lower()
    assert "the module was not compiled as a whole" in warning


def test_first_graph_break_is_quoted() -> None:
    model: Any = ddp_compile(ChoosesByValues(), backend="eager")
    backward(model)
    (first,) = (line for line in str(model.explain()).splitlines() if ", at " in line)
    assert first.startswith("the first graph break: ") and "`print`" in first
    assert first.endswith(line_of(ChoosesByValues.forward, "print("))


def test_warning_if_nothing_was_compiled() -> None:
    model: Any = ddp_compile(Loop(lambda: nn.Linear(WIDTH, WIDTH)), backend="eager")
    (warning,) = warnings_of(lambda: backward(model), times=2)
    assert "nothing was compiled" in warning
    assert f"at {line_of(Loop.forward, 'print(')}." in warning


@pytest.mark.parametrize("make_block", [Block, CalledByItsClass])
def test_inlined_blocks_are_no_regions(make_block: Callable[[], nn.Module]) -> None:
    counter = CompileCounter()
    model: Any = ddp_compile(Broken(make_block), backend=counter, bucket_cap_mb=1e-4)
    plain = copy.deepcopy(model)
    assert warnings_of(lambda: assert_computes_the_same(model, plain), times=2) == []
    assert "region" not in str(model.explain())
    assert line_of(Broken.forward, "print(") in str(model.explain())
    assert {bucket.frame for bucket in model.bucket_plan.buckets} == {0}


@pytest.mark.parametrize(
    ("make_block", "said", "not_said"),
    [
        (Loop, "9 regions of Block (blocks.0.blocks.0, blocks.0.blocks.1, ..., blocks.2.blocks.2)", "regions of Loop"),
        (UntilDone, "3 regions of Sequential (blocks.0.net, blocks.1.net, blocks.2.net)", "regions of UntilDone"),
    ],
)
def test_nested_blocks_are_compiled_once(make_block: Callable[[], nn.Module], said: str, not_said: str) -> None:
    counter = CompileCounter()
    model: Any = ddp_compile(Loop(make_block), backend=counter, bucket_cap_mb=1e-4)
    assert_computes_the_same(model, copy.deepcopy(model))
    assert counter.frame_count == 3  # with evaluation
    assert f"{said}: 2 graphs for training" in str(model.explain()) and not_said not in str(model.explain())


def test_copies_of_blocks_are_plain() -> None:
    model: Any = ddp_compile(Loop(), backend="eager")
    backward(model)
    assert model.blocks[0]._compiled_call_impl is not None
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), model.unwrap()]
    for each in copies:
        assert [block._compiled_call_impl for block in each.blocks] == [None] * 3
    gone = weakref.ref(model)
    del model, each, copies
    gc.collect()
    assert gone() is None


def test_bucket_order_with_regions() -> None:
    class Between(Loop):
        """Frames before and after blocks."""

        class Layer(Block):
            pass

        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = self.Layer(), self.Layer()
            self.blocks = self._modules.pop("blocks")
            self.end = nn.GRUCell(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(self.first(x))
            return self.end(x)

    model: Any = ddp_compile(Between(), backend="eager", bucket_cap_mb=1e-4, find_unused_parameters=True)
    for _ in range(2):
        backward(model)
    firsts = [bucket.gradients[0].fqn.split(".")[0] for bucket in model.bucket_plan.buckets]
    assert list(dict.fromkeys(firsts)) == ["end", "blocks", "last", "first"]
