"""Operators inside a forward graph wait for the parameters that the next nodes read."""

from collections.abc import Sequence

from backward_graphs import BackwardBuilder, aten, calls, context
from torch import fx
from torch._functorch._aot_autograd.descriptors import PlainAOTInput

from ddp_compile.graph_ops import AWAIT_PARAMETERS
from ddp_compile.passes.forward.await_parameters import await_parameters_pass


def forward_input(build: BackwardBuilder, name: str, position: int | None) -> fx.Node:
    node = build.input(name)
    node.meta["desc"] = None if position is None else PlainAOTInput(idx=position)
    return node


def layers(num: int, unknown: Sequence[int] = ()) -> fx.GraphModule:
    """``x @ w0.T @ w1.T ...``, all transposed at the begin."""
    build = BackwardBuilder()
    weights = [forward_input(build, f"w{i}", None if i in unknown else i) for i in range(num)]
    value = forward_input(build, "x", num)
    transposed = [build.call(aten.permute.default, weight, [1, 0]) for weight in weights]
    for weight in transposed:
        value = build.call(aten.mm.default, value, weight)
    return build.output(value)


def waits(gm: fx.GraphModule) -> list[fx.Node]:
    return gm.graph.find_nodes(op="call_function", target=AWAIT_PARAMETERS)


def test_waits_before_first_reader() -> None:
    gm, num_changed, declined = await_parameters_pass(layers(4), context([3, 2], [1], [0], reads=range(4)))
    assert (num_changed, declined) == (3, ())
    views = ["permute", "permute_1", "permute_2", "permute_3"]
    assert calls(gm) == [*views, "await [0]", "mm", "await [1]", "mm_1", "await [3, 2]", "mm_2", "mm_3"]
    gm.graph.lint()


def test_wait_arguments() -> None:
    gm, _, _ = await_parameters_pass(layers(3), context([2], [1], [0], reads=range(3)))
    assert [[node.name for node in wait.args[0]] for wait in waits(gm)] == [["w0"], ["w1"], ["w2"]]
    assert [[node.name for node in wait.args[3]] for wait in waits(gm)] == [[], ["mm"], ["mm_1"]]
    assert {wait.args[1] for wait in waits(gm)} == {7}


def test_other_parameters_are_awaited_first() -> None:
    gm, _, _ = await_parameters_pass(layers(3, unknown=[2]), context([2], [0], reads=[0, 1, 2]))
    assert calls(gm)[:5] == ["await [1, 2]", "permute", "permute_1", "permute_2", "await [0]"]
    assert {node.name for node in waits(gm)[0].args[0]} == {"w0", "w1", "w2", "x"}
