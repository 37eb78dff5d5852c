"""The operator with which compiled code hands over buckets."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ddp_compile import graph_ops

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


class Receiver:
    def __init__(self) -> None:
        self.received: list[tuple[list[int], list[Tensor]]] = []
        self.ignored: list[tuple[int, ...]] = []
        self.gathers_parameters = False

    def mark_bucket_ready(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> None:
        self.received.append((list(parameters), list(gradients)))

    def move_bucket(self, parameters: Sequence[int], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        self.mark_bucket_ready(parameters, gradients)
        return [torch.full_like(gradient, 5) for gradient in gradients]

    def ignore_computed_buckets(self, buckets: Sequence[tuple[int, ...]]) -> None:
        self.ignored.extend(buckets)


def registered() -> tuple[int, Receiver]:
    reducer_id, receiver = graph_ops.next_reducer_id(), Receiver()
    graph_ops.register_receiver(reducer_id, receiver)
    return reducer_id, receiver


@pytest.mark.parametrize(
    ("name", "arguments", "is_mutable"),
    [
        ("bucket_ready", ([torch.randn(3), torch.randn(2)], -1, [0, 1], [torch.randn(4)]), True),
        ("move_bucket", ([torch.randn(3), torch.randn(2, 2)], [1, 1, 2], -1, [0, 1]), False),
        ("hold_back", ([torch.randn(3)], [torch.randn(4)]), True),
        ("await_parameters", ([torch.randn(3)], -1, [0], [torch.randn(4)]), True),
    ],
)
def test_opcheck_of_graph_operators(name: str, arguments: tuple, is_mutable: bool) -> None:
    operator = getattr(torch.ops.ddp_compile, name).default
    assert operator._schema.is_mutable or not is_mutable  # or inductor removes it
    assert torch.Tag.cudagraph_unsafe in operator.tags
    torch.library.opcheck(operator, arguments, test_utils=OPCHECKS)


def test_move_bucket_without_receiver() -> None:
    gradients = [torch.randn(2, 3), torch.randn(()), torch.randn(4, 2).t()]
    moved = torch.ops.ddp_compile.move_bucket(gradients, [1, 2, 4, 1], -1, [0, 1, 2])
    assert [copy.stride() for copy in moved] == [(1, 2), (), (4, 1)]
    for copy, gradient in zip(moved, gradients, strict=True):
        assert torch.equal(copy, gradient) and copy.data_ptr() != gradient.data_ptr()


def test_graph_of_other_parameters() -> None:
    reducer_id, receiver = registered()
    x, first, second, other = (torch.randn(2) for _ in range(4))
    # Parameter 7 of the second bucket is no input, but part of the graph, and so is all of the third bucket.
    buckets = [(4,), (7, 2), (8,)]
    run = graph_ops.watch_parameters(lambda *inputs: sum(inputs), [x, first, second], {1: 4, 2: 2}, buckets, reducer_id)
    assert torch.equal(run(other, first, second), other + first + second)
    assert receiver.ignored == []
    run(x, first, other)
    assert receiver.ignored == buckets
