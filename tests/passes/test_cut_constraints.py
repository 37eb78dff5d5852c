"""Where a graph must stay whole, and the reasons given."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import WIDTH, GraphBuilder, capture, find, record
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ddp_compile.passes.analysis.cut_constraints import HeldCuts, find_held_cuts, mode_regions
from ddp_compile.passes.analysis.graph_nodes import written_arguments


def held_at(gm: fx.GraphModule) -> set[int]:
    return {at for held in find_held_cuts(gm) for at in range(held.first, held.last + 1)}


def test_symbolic_sizes_cross() -> None:
    gm, _ = capture(lambda x: x.sin() * x.shape[0] + x.cos() * (x.shape[0] // 2), torch.ones(6), dynamic=True)
    assert any(isinstance(n.meta.get("example_value"), torch.SymInt) for n in gm.graph.nodes)
    assert find_held_cuts(gm) == []


def test_tuples_hold_but_elements_cross() -> None:
    def function(x: Any) -> Any:
        pair = x.chunk(1)
        y = torch.sin(x)
        left = pair[0]
        return torch.add(torch.add(y, left), left)

    gm, _ = record(function)
    chunk = find(gm, "chunk")
    assert find_held_cuts(gm) == [HeldCuts(chunk + 1, chunk + 2, "chunk, a tuple, cannot cross partitions")]


def with_value(value: object) -> fx.GraphModule:
    """A node with this example value, or none, is used after another call."""
    build = GraphBuilder()
    x = build.input("x")
    special = build.graph.call_function(torch.neg, (x,))
    if value is not UNRECORDED:
        special.meta["example_value"] = value
    build.call(torch.cos, x)
    total = build.graph.call_function(torch.add, (x, special))
    total.meta["example_value"] = torch.ones(WIDTH, WIDTH)
    build.graph.output((total,))
    return fx.GraphModule({}, build.graph)


UNRECORDED = object()


@pytest.mark.parametrize(
    "value",
    [
        torch.eye(4).to_sparse(),
        torch.ones(4, dtype=torch.complex64).conj(),
        torch.ones(4).as_subclass(type("Sub", (torch.Tensor,), {})),
        object(),
        UNRECORDED,
    ],
    ids=["sparse", "conjugated", "subclass", "opaque", "unrecorded"],
)
def test_values_that_cannot_cross(value: object) -> None:
    assert held_at(with_value(value)) == {2, 3}


@pytest.mark.parametrize("value", [3, None, "name", torch.float32, torch.device("cpu")])
def test_constants_cross(value: object) -> None:
    assert find_held_cuts(with_value(value)) == []


def without_gradients(x: Tensor) -> Tensor:
    y = x.sin()
    with torch.no_grad():
        s = y.exp()
        s = s.log()
    return y.cos() * s


def chosen_attention(x: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        y = F.scaled_dot_product_attention(x, x, x)
        y = y.sin()
    return y.cos()


@pytest.mark.parametrize(
    ("function", "opened", "closed"),
    [
        (without_gradients, ("_set_grad_enabled", 0), ("_set_grad_enabled", 1)),
        (lambda x: torch.vmap(lambda row: 2 * row)(x), ("_vmap_increment_nesting", 0), ("_vmap_decrement_nesting", 0)),
        (chosen_attention, ("_sdpa_kernel", 0), ("_sdpa_kernel", 1)),
    ],
)
def test_regions_stay_whole(
    function: Callable[[Tensor], Tensor], opened: tuple[str, int], closed: tuple[str, int]
) -> None:
    gm, _ = capture(function, torch.ones(1, 3, 4, requires_grad=function is without_gradients))
    first, last = find(gm, *opened), find(gm, *closed)
    assert set(range(first + 1, last + 1)) <= held_at(gm)
    if function is not chosen_attention:  # which scaled_dot_product_attention itself holds up to its end
        assert not {first, last + 1} & held_at(gm)
    reasons = {held.reason for held in find_held_cuts(gm)}
    assert function is not without_gradients or reasons == {"the region opened by grad_off stays whole"}


def test_autocast_may_be_cut() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = x.sin()
            with torch.autocast("cpu", enabled=False):
                y = y.cos()
        return y

    gm, _ = capture(function, torch.ones(3))
    assert find_held_cuts(gm) == []
    sin, cos = list(gm.graph.nodes)[find(gm, "sin")], list(gm.graph.nodes)[find(gm, "cos")]
    assert [len(mode_regions(gm)[node]) for node in (sin, cos)] == [1, 2]


def into_a_new_tensor(x: Any) -> Any:
    y = torch.sin(x)
    torch.cos(x)
    y.add_(1)
    return y


def into_what_a_view_shows(x: Any) -> Any:
    view = x.view(-1)
    torch.cos(x)
    x.add_(2)
    return torch.sin(view)


def into_an_input_read(x: Any, scale: Any) -> Any:
    """The compiled backward may compute from the input again, and would find the new value."""
    y = torch.sin(torch.mul(x, scale))
    scale.add_(1)
    return y


@pytest.mark.parametrize(
    ("function", "first", "is_exact"),
    [(into_a_new_tensor, "sin", True), (into_what_a_view_shows, "view", False), (into_an_input_read, "mul", True)],
)
def test_writes_hold_cuts(function: Callable[..., Any], first: str, is_exact: bool) -> None:
    gm, _ = record(function)
    between = set(range(find(gm, first) + 1, find(gm, "add_") + 1))
    assert between <= held_at(gm) and (between == held_at(gm) or not is_exact)
    reasons = {held.reason for held in find_held_cuts(gm)}
    assert function is not into_a_new_tensor or reasons == {"add_ writes into sin"}


def test_inputs_may_be_written_anywhere() -> None:
    def function(x: Any, count: Any) -> Any:
        y = torch.sin(x)
        count.add_(1)
        y = torch.cos(y)
        count.add_(1)
        return y

    assert find_held_cuts(record(function).gm) == []


def written_by(function: Callable[..., object], *args: object, **kwargs: object) -> list[str]:
    graph = fx.Graph()
    named = {name: graph.placeholder(name) for name in "abcde"}

    def filled(value: object) -> object:
        if isinstance(value, list):
            return [filled(item) for item in value]
        return named.get(value, value) if isinstance(value, str) else value

    make = graph.call_method if isinstance(function, str) else graph.call_function
    node = make(function, tuple(map(filled, args)), {name: filled(value) for name, value in kwargs.items()})
    return sorted({argument.name for argument in written_arguments(node)})


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "written"),
    [
        ("add_", ("a", "b"), {}, ["a"]),
        ("index_put_", ("a", ["b"], "c"), {}, ["a"]),
        (torch.relu_, ("a",), {}, ["a"]),
        (operator.setitem, ("a", "b", "c"), {}, ["a"]),
        (torch.ops.aten.add_.Tensor, ("a", "b"), {}, ["a"]),
        (torch.ops.aten.add.out, ("a", "b"), {"out": "c"}, ["c"]),
        (torch.max, ("a", 1), {"out": ["b", "c"]}, ["b", "c"]),
        (torch._foreach_add_, (["a", "b"], 1.0), {}, ["a", "b"]),
        (F.relu, ("a", True), {}, ["a"]),
        (F.dropout, ("a", 0.5, True, True), {}, ["a"]),
        (F.batch_norm, ("a", "b", "c", "d", "e"), {}, ["b", "c"]),
        (F.batch_norm, ("a",), {"running_mean": "b", "running_var": "c"}, ["b", "c"]),
        ("add", ("a", "b"), {}, []),
        (F.relu, ("a",), {"inplace": False}, []),
        (F.batch_norm, ("a", None, None), {}, []),
        ("requires_grad_", ("a",), {}, []),
        (F.relu, (), {"input": "a", "inplace": True}, ["a"]),
        (torch.relu_, (), {"input": "a"}, ["a"]),
        ("__iadd__", ("a", "b"), {}, ["a"]),
        (torch.batch_norm, ("a", "b", "c", "d", "e", True, 0.1, 1e-5, False), {}, ["d", "e"]),
        (F.embedding, ("a", "b", None, 1.0), {}, ["b"]),
        (torch.ops.aten.add_, ("a", "b"), {}, ["a"]),
        (torch.ops.aten.relu_, (), {"self": "a"}, ["a"]),
        (torch.ops.higher_order.invoke_leaf_function, ("a", "b", "c", "0,1", "d", "e"), {}, ["d", "e"]),
        (torch.ops.higher_order.invoke_leaf_function, ("a", "b", "c", "", "d", "e"), {}, []),
    ],
)
def test_written_arguments(function: object, args: tuple, kwargs: dict, written: list[str]) -> None:
    assert written_by(function, *args, **kwargs) == written  # type: ignore[arg-type]


@pytest.mark.parametrize("write", [lambda p: p, lambda p: p.data, lambda p: p.detach().ravel()])
def test_write_inside_checkpoint(write: Callable[[Tensor], Tensor]) -> None:
    def function(x: Tensor, total: Tensor) -> Tensor:
        return checkpoint(lambda y: write(total).add_(1).sum() * y, x.sin(), use_reentrant=False)

    gm, _ = capture(function, torch.ones(3, requires_grad=True), torch.zeros(3))
    (total,) = (n for n in gm.graph.find_nodes(op="placeholder") if "total" in n.name)
    assert list(written_arguments(list(gm.graph.nodes)[find(gm, "tag_activation_checkpoint")])) == [total]


def test_gradients_computed_in_the_forward_hold_cuts() -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return gradient.cos(), y

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        gm, _ = capture(function, torch.ones(3, requires_grad=True))
    differentiates = find(gm, "grad")
    assert set(range(1, differentiates + 1)) <= held_at(gm) and differentiates + 3 not in held_at(gm)


def test_gradient_hook_holds_cuts() -> None:
    # A hook on what a partition takes in sees only the part of the gradient that comes from that partition on.
    def function(x: Tensor) -> Tensor:
        y = x.sin()
        z = x.cos()
        y.register_hook(lambda grad: grad * 2)
        return y * z

    gm, _ = capture(function, torch.ones(3, requires_grad=True))
    if gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.autograd_function_apply):
        pytest.skip(f"Dynamo of torch {torch.__version__} makes the hook a function of its own, which may be cut off")
    sin, hook = find(gm, "sin"), find(gm, "register_hook")
    assert set(range(sin + 1, hook + 1)) <= held_at(gm)
