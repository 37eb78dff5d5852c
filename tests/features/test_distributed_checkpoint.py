"""`torch.distributed.checkpoint` of a replicated module: training continues as it would have without a stop."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from models import relative_difference
from rank_pool import Ranks, on_ranks
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from ddp_compile import ddp_compile

pytestmark = pytest.mark.usefixtures("each_split")

Trained = list[list[float]]
ROWS, WIDTH = 12, 9
SAVED_AT, NUM_STEPS = 3, 6


def make() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2))


class Training:
    """A module, replicated by ddp_compile or by DistributedDataParallel, and its optimizer."""

    def __init__(self, by_ddp: bool = False) -> None:
        plain = make()
        self.model: Any = DistributedDataParallel(plain) if by_ddp else ddp_compile(plain, backend="aot_eager")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def train(self, begin: int, end: int) -> None:
        size, rank = dist.get_world_size(), dist.get_rank()
        for step in range(begin, end):
            torch.manual_seed(step)
            x = torch.randn(ROWS, WIDTH)[rank * ROWS // size : (rank + 1) * ROWS // size]
            self.optimizer.zero_grad()
            # Each row's statistics are those of its own rank, so that the ranks' number would matter in training mode.
            self.model.eval()
            self.model(x).square().mean().backward()
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def result(self) -> Trained:
        momenta = [entry["exp_avg"] for entry in self.optimizer.state_dict()["state"].values()]
        return [tensor.flatten().tolist() for tensor in (*self.model.parameters(), *self.model.buffers(), *momenta)]


def save(path: str, by_ddp: bool) -> Trained:
    training = Training(by_ddp)
    training.train(0, SAVED_AT)
    state = training.state()
    assert "0.weight" in state["model"] and "0.weight" in state["optimizer"]["state"]
    # A group for nothing else: it is used by another thread while the module is trained.
    saving = dcp.async_save(state, checkpoint_id=path, process_group=dist.new_group())
    training.train(SAVED_AT, NUM_STEPS)
    saving.result()
    return training.result()


def load(path: str, by_ddp: bool = False) -> Trained:
    training = Training(by_ddp)
    training.train(NUM_STEPS, NUM_STEPS + 2)  # somewhere else
    state = training.state()
    dcp.load(state, checkpoint_id=path)
    training.load(state)
    training.train(SAVED_AT, NUM_STEPS)
    return training.result()


def test_checkpoints(ranks: Ranks, tmp_path: Path) -> None:
    """Of ours and of DistributedDataParallel, saved meanwhile; read by either, and by other numbers of ranks."""
    two, ours, theirs = ranks(2), str(tmp_path / "ours"), str(tmp_path / "theirs")
    through = two.run(save, theirs, True)
    assert two.run(save, ours, False) == through
    assert two.run(load, ours) == two.run(load, ours, by_ddp=True) == two.run(load, theirs) == through
    for size in (1, 3):
        for found in ranks(size).run(load, ours):
            pairs = zip(found, through[0], strict=True)
            differences = [relative_difference(torch.tensor(found), torch.tensor(kept)) for found, kept in pairs]
            assert max(differences) < 1e-4, (size, differences)


@on_ranks(2)
def test_state_dicts_are_ddps() -> None:
    """Names and values, on all ranks or on rank 0 alone; and set again from rank 0."""
    ours, theirs = Training(), Training(by_ddp=True)
    for each in (ours, theirs):
        each.train(0, 2)
    for options in (None, StateDictOptions(full_state_dict=True, cpu_offload=True)):
        pair = [get_model_state_dict(each.model, options=options) for each in (ours, theirs)]
        assert pair[0].keys() == pair[1].keys()
        assert all(torch.equal(pair[0][name], pair[1][name]) for name in pair[0])
    state = {name: torch.zeros_like(value) for name, value in make().state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(ours.model, state if dist.get_rank() == 0 else {}, options=options)
    assert not any(parameter.any() for parameter in ours.model.parameters())
    ours.train(2, 3)
