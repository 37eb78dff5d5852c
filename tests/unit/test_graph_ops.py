"""The operator with which compiled code hands over buckets."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_compile import graph_ops

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


class Receiver:
    def __init__(self) -> None:
        self.received: list[tuple[list[int], list[Tensor]]] = []
        self.ignored: list[tuple[int, ...]] = []
        self.awaited: list[list[int]] = []
        self.gathers_parameters = False

    def mark_bucket_ready(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> None:
        self.received.append((list(parameters), list(gradients)))

    def move_bucket(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        self.mark_bucket_ready(parameters, gradients)
        return [torch.full_like(gradient, 5) for gradient in gradients]

    def await_parameters(self, param_indices: Sequence[int]) -> None:
        self.awaited.append(list(param_indices))

    def ignore_computed_buckets(self, buckets: Sequence[tuple[int, ...]]) -> None:
        self.ignored.extend(buckets)


def registered() -> tuple[int, Receiver]:
    reducer_id, receiver = graph_ops.next_reducer_id(), Receiver()
    graph_ops.register_receiver(reducer_id, receiver)
    return reducer_id, receiver


def test_a_receiver_gets_what_was_offered_under_its_number() -> None:
    (_, other), (reducer_id, receiver) = registered(), registered()
    gradients = [torch.randn(3), torch.randn(2, 2)]
    assert torch.ops.ddp_compile.bucket_ready(gradients, reducer_id, [4, 2], []) is None
    assert other.received == []
    ((parameters, received),) = receiver.received
    assert parameters == [4, 2]
    assert [g.data_ptr() for g in received] == [g.data_ptr() for g in gradients]


def test_a_receiver_is_not_kept_alive_and_not_missed() -> None:
    reducer_id, receiver = registered()
    del receiver
    gc.collect()
    torch.ops.ddp_compile.bucket_ready([torch.randn(3)], reducer_id, [0], [])
    assert reducer_id not in graph_ops._receivers


def test_tracing_calls_nobody() -> None:
    reducer_id, receiver = registered()
    with FakeTensorMode():
        torch.ops.ddp_compile.bucket_ready([torch.empty(3)], reducer_id, [0], [])
    assert receiver.received == []


@pytest.mark.parametrize(
    ("name", "arguments", "is_mutable"),
    [
        ("bucket_ready", ([torch.randn(3), torch.randn(2)], -1, [0, 1], [torch.randn(4)]), True),
        ("move_bucket", ([torch.randn(3), torch.randn(2, 2)], [1, 1, 2], -1, [0, 1]), False),
        ("hold_back", ([torch.randn(3)], [torch.randn(4)]), True),
        ("await_parameters", ([torch.randn(3)], -1, [0], [torch.randn(4)]), True),
    ],
)
def test_operators_are_registered_as_compilers_need_it(name: str, arguments: tuple, is_mutable: bool) -> None:
    operator = getattr(torch.ops.ddp_compile, name).default
    assert operator._schema.is_mutable or not is_mutable  # or inductor removes it
    assert torch.Tag.cudagraph_unsafe in operator.tags
    torch.library.opcheck(operator, arguments, test_utils=OPCHECKS)


def test_moved_gradients_are_what_the_receiver_returns() -> None:
    reducer_id, receiver = registered()
    (moved,) = torch.ops.ddp_compile.move_bucket([torch.ones(2, 2)], [2, 1], reducer_id, [3])
    assert torch.equal(moved, torch.full((2, 2), 5.0))
    assert [parameters for parameters, _ in receiver.received] == [[3]]


def test_moved_gradients_are_copies_in_the_strides_asked_for_where_nobody_receives_them() -> None:
    gradients = [torch.randn(2, 3), torch.randn(()), torch.randn(4, 2).t()]
    moved = torch.ops.ddp_compile.move_bucket(gradients, [1, 2, 4, 1], -1, [0, 1, 2])
    assert [copy.stride() for copy in moved] == [(1, 2), (), (4, 1)]
    for copy, gradient in zip(moved, gradients, strict=True):
        assert torch.equal(copy, gradient) and copy.data_ptr() != gradient.data_ptr()


def test_a_graph_that_runs_for_other_parameters_computes_nothing_any_more() -> None:
    reducer_id, receiver = registered()
    x, first, second, other = (torch.randn(2) for _ in range(4))
    # Parameter 7 of the second bucket is no input, but part of the graph, and so is all of the third bucket.
    buckets = [(4,), (7, 2), (8,)]
    run = graph_ops.watch_parameters(lambda *inputs: sum(inputs), [x, first, second], {1: 4, 2: 2}, buckets, reducer_id)
    assert torch.equal(run(other, first, second), other + first + second)
    assert receiver.ignored == []
    run(x, first, other)
    assert receiver.ignored == buckets


def test_a_graph_without_parameters_among_its_inputs_is_that_of_its_parameters() -> None:
    run = graph_ops.watch_parameters(lambda x: x + 1, [torch.ones(2)], {}, [(0, 1)], -1)
    assert torch.equal(run(torch.zeros(2)), torch.ones(2))


def test_parameters_are_waited_for_by_their_numbers() -> None:
    reducer_id, receiver = registered()
    torch.ops.ddp_compile.await_parameters([torch.ones(2)], reducer_id, [4, 2], [])
    run = graph_ops.await_before(lambda x: x + 1, [3], reducer_id)
    assert torch.equal(run(torch.zeros(2)), torch.ones(2))
    assert receiver.awaited == [[4, 2], [3]]
