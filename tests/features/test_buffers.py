"""Buffers: what rank 0 broadcasts and when, beside DistributedDataParallel, and buffers that differ between ranks."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import of_all_ranks, one_backward, own_batch, pair
from models import Mlp, Scaled, largest, loss_of, relative_difference
from rank_pool import on_ranks
from torch import Tensor, nn

from ddp_compile import RanksDifferError, ddp_compile, torch_internals

WIDTH = 9


def batch_norms() -> nn.Module:
    return nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


class Cached(nn.Module):
    """A buffer that grows with the longest batch that a rank has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp(WIDTH, 2)
        self.register_buffer("positions", torch.arange(2.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > len(self.positions):
            self.register_buffer("positions", torch.arange(float(len(x))), persistent=False)
        return self.mlp(x + self.positions[: len(x), None])


class NoneAtFirst(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("cache", None)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.cache is None else super().forward(x) * self.cache


@pytest.mark.parametrize(("broadcast_buffers", "accumulates"), [(True, False), (False, False), (True, True)])
@on_ranks(2)
def test_broadcast_buffers(broadcast_buffers: bool, accumulates: bool, each_split: str) -> None:
    ours, theirs = pair(batch_norms, {"broadcast_buffers": broadcast_buffers})
    broadcast = mock.Mock(wraps=torch_internals.broadcast_coalesced)
    with mock.patch.object(torch_internals, "broadcast_coalesced", broadcast):
        for step in range(3):
            for model in (ours, theirs):
                if accumulates:
                    with model.no_sync():
                        one_backward(model, own_batch(10 + step, WIDTH))
                one_backward(model, own_batch(step, WIDTH))
    assert [len(call.args[1]) for call in broadcast.call_args_list] == [6] * (3 if broadcast_buffers else 0)
    buffers = zip(ours.buffers(), theirs.buffers(), strict=True)
    worst = largest(relative_difference(a.float(), b.float()) for a, b in buffers)
    # DistributedDataParallel broadcasts before the first forward in no_sync, and not before the synchronized one. That
    # makes no difference to rank 0, whose statistics all ranks get.
    assert worst < 1e-6 if dist.get_rank() == 0 or not accumulates else worst > 0.01
    # After the last broadcast every rank continues with its own batches.
    to_rank_0s = relative_difference(ours[0].running_mean, of_all_ranks(ours[0].running_mean)[0])
    assert dist.get_rank() == 0 or accumulates or to_rank_0s > 0.01


@on_ranks(2)
def test_which_forwards_broadcast() -> None:
    """Those with gradients, outside ``no_sync``, in either mode of the module and inside a transform."""
    model, own, x = ddp_compile(Scaled(WIDTH), backend="eager"), dist.get_rank() + 1.0, own_batch(0, WIDTH)

    def scale_after(use: Callable[[Any, Tensor], Any]) -> float:
        model.scale.fill_(own)
        use(model, x)
        return float(model.scale[0])

    def call(model: Any, x: Tensor) -> Any:
        return model(x)

    def slope(model: Any, x: Tensor) -> None:
        """DistributedDataParallel raises, since it writes to buffers inside the transform."""
        loss_of(torch.func.jvp(model, (x,), (torch.ones_like(x),))[1]).backward()

    assert scale_after(one_backward) == 1.0
    with model.no_sync():
        assert scale_after(call) == own
    with torch.no_grad():
        assert scale_after(call) == own
    assert scale_after(one_backward) == 1.0  # which DistributedDataParallel leaves out after a forward like that
    assert scale_after(slope) == 1.0
    model.eval()
    with torch.no_grad():
        assert scale_after(call) == own
    assert scale_after(call) == 1.0


@pytest.mark.parametrize("init_sync", [True, False])
@on_ranks(2)
def test_init_sync(init_sync: bool) -> None:
    own = 1.0 + dist.get_rank()
    model = batch_norms()
    for tensor in [*model.parameters(), *model.buffers()]:
        nn.init.constant_(tensor, own)
    ddp_compile(model, backend="eager", init_sync=init_sync, parameters_to_ignore=["2.running_mean"])
    seen = {name: float(tensor.flatten()[0]) for name, tensor in model.state_dict().items()}
    assert seen.pop("2.running_mean") == own
    assert set(seen.values()) == {1.0 if init_sync else own}


@on_ranks(2, eagerly=True)
def test_buffers_that_are_none_at_first() -> None:
    model: Any = ddp_compile(NoneAtFirst(), backend="eager")
    one_backward(model, own_batch(0, WIDTH))
    model.cache = torch.full((WIDTH,), dist.get_rank() + 1.0)
    one_backward(model, own_batch(1, WIDTH))
    assert float(model.cache[0]) == 1.0
    for other, named in ((None, "None"), (torch.ones(WIDTH, dtype=torch.float64), r"float64\[9\]")):
        if dist.get_rank():
            model.cache = other
        said = rf"buffer cache: float32\[9\] on rank 0 is buffer cache: {named} on rank 1"
        with pytest.raises(RanksDifferError, match=said):
            model(own_batch(2, WIDTH))


@pytest.mark.parametrize("longer", [0, 1])
@pytest.mark.parametrize("ends", ["forward", "join"])
@on_ranks(3)
def test_buffers_of_other_sizes(longer: int, ends: str) -> None:
    model = ddp_compile(Cached(), backend="eager")
    rows = 6 if dist.get_rank() == longer else 4
    first, second = (6, 4) if longer == 0 else (4, 6)
    named = rf"buffer positions: float32\[{first}\] on rank 0 is .*float32\[{second}\] on rank 1"
    with pytest.raises(RanksDifferError, match=named):
        if ends == "join":
            with model.join():
                one_backward(model, own_batch(0, WIDTH, rows))
        else:
            for _ in range(2):
                one_backward(model, own_batch(0, WIDTH, rows))
    assert model.positions.tolist() == list(range(rows))
