"""The operator with which compiled code hands over buckets."""

from unittest.mock import Mock

import pytest
import torch

from ddp_compile import graph_ops

OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


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
    reducer_id, ignored = graph_ops.next_reducer_id(), list[tuple[int, ...]]()
    receiver = Mock(ignore_computed_buckets=ignored.extend)  # held here, since the registry holds it weakly
    graph_ops.register_receiver(reducer_id, receiver)
    x, first, second, other = (torch.randn(2) for _ in range(4))
    # Parameter 7 of the second bucket is no input, but part of the graph, and so is all of the third bucket.
    buckets = [(4,), (7, 2), (8,)]
    run = graph_ops.watch_parameters(lambda *inputs: sum(inputs), [x, first, second], {1: 4, 2: 2}, buckets, reducer_id)
    assert torch.equal(run(other, first, second), other + first + second)
    assert ignored == []
    run(x, first, other)
    assert ignored == buckets
