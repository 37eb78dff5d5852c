"""Parameters of a sharded optimizer are complete for compiled code, and after forwards that fail, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from oracle import WIDTH, batch, equal_on_all_ranks, in_a_child, late_rank, make, plain, said_by
from rank_pool import RankPool
from torch import Tensor, nn

from ddp_compile import ReductionError

Ranks = Callable[[int], RankPool]


def compiled_reads(way: str) -> tuple[bool, int]:
    """Of code that is compiled beside the model: whether all ranks saw the same, and how many graphs there were."""
    torch._dynamo.reset()
    model, optimizer = make()
    num_graphs, ones = 0, torch.ones(1, WIDTH)

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_graphs
        num_graphs += 1
        return graph

    layer = torch.compile(model.layers[0], backend=backend)
    if way == "before":
        layer(ones)
    seen = []

    def train(x: Tensor) -> None:
        loss_of(model(x)).backward()
        with late_rank():
            optimizer.step()
        optimizer.zero_grad()
        seen.append((model.layers[0] if way == "within" else layer)(ones).detach())

    for step in range(4):
        (torch.compile(train, backend=backend) if way == "within" else train)(batch(step))
    return equal_on_all_ranks(torch.cat(seen)), num_graphs


@pytest.mark.parametrize("way", ["before", "after", "within"])
def test_compiled_code_reads_complete_parameters(ranks: Ranks, way: str) -> None:
    """A layer that is compiled before the first step or after it, and a training step that is compiled as a whole."""
    for is_equal, num_graphs in ranks(2).run(compiled_reads, way):
        assert is_equal
        assert num_graphs <= 1 or way == "within"  # nothing is traced again for a parameter's other class


class Shifted(Mlp):
    """With a buffer, that is broadcast before a forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.register_buffer("shift", torch.ones(WIDTH))


def read_after_a_forward_that_fails() -> tuple[int, bool]:
    """How many buckets were being gathered when it failed, before it had read any parameter."""
    model, optimizer = make(module=Shifted(), backend="aot_eager")
    for step in range(2):
        plain(model, optimizer, step)
    loss_of(model(batch(2))).backward()
    with late_rank():
        optimizer.step()
    under_way = 0

    def fail(*_: Any) -> None:
        nonlocal under_way
        under_way = sum(bucket.is_gathering for bucket in model.comm_algorithm.buckets)
        raise ValueError

    model._register_buffer_comm_hook(None, fail, "PRE_FORWARD")
    with pytest.raises(ValueError):
        model(batch(3))
    return under_way, equal_on_all_ranks(torch.cat([p.detach().flatten() for p in model.parameters()]))


def test_reads_after_an_early_failure(ranks: Ranks) -> None:
    for under_way, is_equal in ranks(2).run(read_after_a_forward_that_fails):
        assert under_way > 0
        assert is_equal


def read_after_a_failure(stance: str) -> list[str]:
    with torch.compiler.set_stance(stance):
        model, optimizer = make()
        for step in range(2):
            loss_of(model(batch(step))).backward()
            if step and dist.get_rank() == 1:
                time.sleep(0.5)  # or the other one's step would find the connection closed
                return []
            optimizer.step()
            optimizer.zero_grad()
        said = [said_by(lambda: model(batch(2)), ReductionError)]  # one graph, if compiled, during which nobody waits
    nn.Linear(1, 1)(torch.ones(1))  # what has nothing to do with it is left alone
    torch.vmap(torch.sin)(torch.ones(2))
    return said + [said_by(model.state_dict, ReductionError) for _ in range(len(model.bucket_plan.buckets) + 2)]


@pytest.mark.parametrize("stance", ["force_eager", "default"])
def test_parameters_that_never_came_stay_an_error(ranks: Ranks, stance: str) -> None:
    said, nothing = ranks(2).run_expecting_failures(read_after_a_failure, stance, timeout_s=8.0)
    assert nothing == []
    assert all("gather of parameters after step 2 failed" in each for each in said)


@torch.compiler.set_stance("force_eager")
def read_in_a_forked_child() -> tuple[list[str], bool]:
    model, optimizer = make()
    held = next(model.parameters())
    plain(model, optimizer, 0)
    said = in_a_child(lambda: [said_by(held.sum), said_by(model.state_dict), said_by(model.await_parameters)])
    return said, equal_on_all_ranks(held.detach().flatten())


def test_reads_in_a_forked_child_are_refused(ranks: Ranks) -> None:
    for rank, (said, is_equal) in enumerate(ranks(2).run(read_in_a_forked_child)):
        for text in said:
            assert f"ReplicationError: rank {rank}: a parameter is read in a process that was forked" in text
            assert "Call model.await_parameters() before the fork" in text
        assert is_equal
