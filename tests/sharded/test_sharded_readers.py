"""Parameters of a sharded optimizer are complete for compiled code, and after forwards that fail, or an error."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Mlp, loss_of
from oracle import WIDTH, batch, equal_on_all_ranks, in_a_child, late_rank, make, plain, said_by, values_of
from rank_pool import RankPool, on_ranks
from torch import Tensor, nn

from ddp_compile import ReductionError

Ranks = Callable[[int], RankPool]


@pytest.mark.parametrize("way", ["before", "after", "within"])
@on_ranks(2)
def test_compiled_code_reads_complete_parameters(way: str) -> None:
    """A layer that is compiled before the first step or after it, and a training step that is compiled as a whole."""
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
    assert equal_on_all_ranks(torch.cat(seen))
    assert num_graphs <= 1 or way == "within"  # nothing is traced again for a parameter's other class


class Shifted(Mlp):
    """With a buffer, that is broadcast before a forward."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 3)
        self.register_buffer("shift", torch.ones(WIDTH))


@on_ranks(2)
def test_reads_after_an_early_failure() -> None:
    """Of a forward that fails before it has read any parameter."""
    model, optimizer = make(module=Shifted(), backend="aot_eager")
    for step in range(2):
        plain(model, optimizer, step)
    loss_of(model(batch(2))).backward()
    with late_rank():
        optimizer.step()
    under_way = 0

    def fail(*_: Any) -> None:
        nonlocal under_way
        under_way = sum(bucket.is_gathering for bucket in model.comm_algorithm.sharding.buckets)
        raise ValueError

    model._register_buffer_comm_hook(None, fail, "PRE_FORWARD")
    with pytest.raises(ValueError):
        model(batch(3))
    assert under_way > 0
    assert equal_on_all_ranks(values_of(model))


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


@on_ranks(2)
@torch.compiler.set_stance("force_eager")
def test_reads_in_a_forked_child_are_refused() -> None:
    model, optimizer = make()
    held = next(model.parameters())
    plain(model, optimizer, 0)
    for text in in_a_child(lambda: [said_by(held.sum), said_by(model.state_dict), said_by(model.await_parameters)]):
        assert f"ReplicationError: rank {dist.get_rank()}: a parameter is read in a process that was forked" in text
        assert "Call model.await_parameters() before the fork" in text
    assert equal_on_all_ranks(held.detach().flatten())
