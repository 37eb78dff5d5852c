"""Parameters that differ between the ranks are found at the next agreement point, and most ranks can repair them."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from beside import gathered
from in_ci import only
from models import Mlp, loss_of
from rank_pool import on_ranks
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.optim import ZeroRedundancyOptimizer

from ddp_compile import RanksDifferError, ReplicationError, ddp_compile
from ddp_compile.runtime.desync import model_order, replicas
from ddp_compile.sharded_optimizer import shard_optimizer

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128]


def flip_bit(tensor: Tensor, element: int, bit: int) -> None:
    flat = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    of_bits = flat.view(INTEGERS[flat.element_size()])
    place = of_bits.as_strided((of_bits.numel(),), (1,))
    width = 8 * flat.element_size()
    place[element % place.numel()] ^= -(2 ** (width - 1)) if bit % width == width - 1 else 2 ** (bit % width)


def sum_of(*tensors: Tensor) -> str:
    return replicas.BitSums([tensors]).text()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [1, 7, 64, 300_001])
def test_every_flipped_bit_changes_the_sum(dtype: torch.dtype, numel: int) -> None:
    torch.manual_seed(numel)
    values = torch.randn(numel, dtype=torch.float64).to(dtype)
    before, rng = sum_of(values), random.Random(numel)
    for _ in range(100):
        element, bit = rng.randrange(2 * numel), rng.randrange(128)
        flip_bit(values, element, bit)
        assert sum_of(values) != before, (element, bit)
        flip_bit(values, element, bit)
    assert sum_of(values) == before


def test_sums_do_not_depend_on_layout() -> None:
    image = torch.randn(3, 5, 300, 301)
    moved = torch.cat([torch.zeros(1), image.flatten()])[1:].view_as(image)  # begins at 4 bytes
    assert len({sum_of(each) for each in (image, image.to(memory_format=torch.channels_last), moved)}) == 1
    assert sum_of(image.expand(2, 3, 5, 300, 301)) == sum_of(image.repeat(2, 1, 1, 1, 1))
    assert sum_of(torch.zeros(200_000, 2)[:, 0]) == sum_of(torch.zeros(200_000))
    odd = torch.randn(3)  # begins a concatenation of small ones
    assert len({sum_of(odd, each) for each in (image, image.to(memory_format=torch.channels_last), moved)}) == 1
    conjugate = torch.randn(50_000, dtype=torch.complex64).conj()
    assert sum_of(conjugate) == sum_of(conjugate.resolve_conj())


@pytest.mark.parametrize("numel", [8, 4096, 2**18])
def test_sums_of_what_is_moved_or_scaled(numel: int) -> None:
    values = torch.rand(numel, dtype=torch.float64) + 0.5
    counts = torch.arange(numel)
    alike = [
        (values, -values, 2 * values, values.roll(1), values.flip(0), values.view(-1, 4).roll(1, 1)),
        (counts, counts.roll(1), counts.flip(0), counts.where(counts != 0, 2).where(counts != 2, 0)),
        ([values, counts], [counts, values]),
        ([values, values + 1], [values + 1, values]),
        ([], [torch.zeros(3)], [torch.zeros(4)], [torch.zeros(3), torch.zeros(0)]),
    ]
    for changed in alike:
        sums = [sum_of(*each) if isinstance(each, list) else sum_of(each) for each in changed]
        assert len(set(sums)) == len(changed)


@contextmanager
def compared_every(num_iterations: int) -> Iterator[None]:
    with mock.patch.object(model_order, "ITERATIONS_BETWEEN_AGREEMENTS", num_iterations):
        yield


class Training:
    def __init__(self, module: nn.Module | None = None, **settings: Any) -> None:
        torch.manual_seed(0)
        settings = {"bucket_cap_mb": 4e-4, "backend": "eager", **settings}
        self.model = ddp_compile(module or Mlp(width=9, num_layers=3), **settings)
        self.optimizer: torch.optim.Optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.data = torch.Generator().manual_seed(100 + dist.get_rank())

    def step(self) -> None:
        self.optimizer.zero_grad()
        loss_of(self.model(torch.randn(4, 9, generator=self.data))).backward()
        self.optimizer.step()

    def parameter(self, number: int) -> tuple[str, nn.Parameter]:
        named = list(self.model.named_parameters())
        return named[number % len(named)]

    def bytes(self) -> bytes:
        return b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())


def flip_on(training: Training, rank: int, rng: random.Random) -> str:
    name, parameter = training.parameter(rng.randrange(100))
    element, bit = rng.randrange(10_000), rng.randrange(32)
    if dist.get_rank() == rank:
        flip_bit(parameter, element, bit)
    return name


@on_ranks(3)
def test_no_repair_of_shards() -> None:
    training = Training(check_replicas="repair")
    with pytest.raises(ReplicationError, match="cannot be used with check_replicas='repair'"):
        shard_optimizer(training.optimizer, training.model)


@on_ranks(2)
def test_two_ranks_have_no_majority() -> None:
    with pytest.raises(ValueError, match=r"check_replicas='repair' needs a majority of ranks.* 2 ranks"):
        Training(check_replicas="repair")
    with pytest.raises(ValueError, match="check_replicas='warn' is not known; pass 'raise', 'repair' or False"):
        Training(check_replicas="warn")
    training = Training()
    training.step()
    name = flip_on(training, 1, random.Random(1))
    with pytest.raises(RanksDifferError, match=f"\\({name}\\).* ranks 0 and 1 differ, and none of these is a majority"):
        training.step()


@pytest.mark.parametrize("num_flips", only([6], [6, 1000]))
@on_ranks(3, eagerly=True)
def test_repair(num_flips: int) -> None:
    rng = random.Random(3)
    with compared_every(1):
        training = Training(check_replicas="repair")
        training.step()
        for _ in range(num_flips):
            rank = rng.randrange(3)
            name = flip_on(training, rank, rng)
            said = f"({name}) do not have the same bits on every rank: those on rank {rank} differ from those on"
            messages = messages_of(training.step)
            assert any(said in message for message in messages), (said, messages)
            assert messages_of(training.step) == []
            assert len(set(gathered(training.bytes()))) == 1
            for parameter in training.model.parameters():  # a flipped exponent may have made an average infinite
                torch.nan_to_num_(parameter.detach(), 0.0, 1.0, -1.0).clamp_(-1.0, 1.0)


def messages_of(function: Callable[[], None]) -> list[str]:
    with mock.patch.object(replicas.log, "warning") as warned:
        function()
    return [call.args[0] for call in warned.call_args_list]


@on_ranks(3, eagerly=True)
def test_states_that_differ_are_not_repaired() -> None:
    with compared_every(2):
        training = Training(check_replicas="repair")
        training.step()
        training.step()
        if dist.get_rank() == 2:
            state = training.optimizer.state[training.parameter(0)[1]]
            state["exp_avg"] += 1.0
        with pytest.raises(RanksDifferError, match=r"at iteration 6 .* made equal at the agreement point before"):
            for _ in range(8):
                training.step()


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ("step", r"states of optimizers \(AdamW.step of .*bias, .*\) do not have .* those on rank 1 differ from"),
        ("exp_avg", r"states of optimizers \(AdamW.exp_avg of [^,]*bias\) do not .* those on rank 1 differ from"),
        ("buffer", r"at iteration 8 the buffers \(counted\) do not have .* those on rank 1 differ from"),
        (
            "call",
            r"the buffers \(.*\) do not .* or other ranks have passed other optimizers or buffers to check",
        ),
    ],
)
@on_ranks(3, eagerly=True)
def test_states_and_buffers(differs: str, said: str) -> None:
    module, differs_here = Mlp(width=9, num_layers=3), dist.get_rank() == 1
    module.register_buffer("counted", torch.zeros(5, dtype=torch.int64))
    training = Training(module, broadcast_buffers=False)
    if not (differs == "call" and differs_here):
        training.model.check_replicas_of(training.optimizer, buffers=True)
    with pytest.raises(RanksDifferError, match=said):
        for i in range(8):
            training.step()
            if i == 4 and differs != "call":
                training.optimizer.step = lambda: None  # type: ignore[assignment]  # or parameters would differ first
                _change(training, differs if differs_here else "nothing")


def _change(training: Training, what: str) -> None:
    parameters = list(training.model.parameters())
    if what == "step":
        for parameter in parameters:
            training.optimizer.state[parameter]["step"] += 1
    elif what == "exp_avg":
        flip_bit(training.optimizer.state[parameters[-1]]["exp_avg"], 3, 0)
    elif what == "buffer":
        training.model.get_buffer("counted")[2] = 1


@on_ranks(2, eagerly=True)
def test_state_that_is_one_tensor() -> None:
    training = Training()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.0)
    optimizer.state.update({parameter: torch.zeros(3) for parameter in training.model.parameters()})
    optimizer.state[training.parameter(0)[1]] += dist.get_rank()
    training.model.check_replicas_of(optimizer)
    with pytest.raises(RanksDifferError, match=r"the states of optimizers \(SGD.state of [^,]*\) do not"):
        training.step()


@on_ranks(2)
def test_what_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match=r"check_replicas_of\(\) was called with check_replicas=False, .*'raise'"):
        Training(check_replicas=False).model.check_replicas_of()
    module = Mlp(width=9, num_layers=3)
    module.register_buffer("thin", torch.eye(2).to_sparse())
    training = Training(module, broadcast_buffers=False, init_sync=False)
    with pytest.raises(ReplicationError, match="cannot compare thin, which is sparse, quantized, nested or on the"):
        training.model.check_replicas_of(buffers=True)
    with pytest.raises(TypeError, match="got a list; pass optimizers"):
        training.model.check_replicas_of([training.optimizer])  # type: ignore[arg-type]
    shards = ZeroRedundancyOptimizer(training.model.parameters(), torch.optim.AdamW)
    with pytest.raises(ReplicationError, match="class ZeroRedundancyOptimizer that is sharded"):
        training.model.check_replicas_of(shards)
    training.model.register_comm_hook(None, allreduce_hook)
    with pytest.raises(ReplicationError, match=r"compares nothing with the comm hook .*; leave it out"):
        training.model.check_replicas_of(training.optimizer)
    training = Training()
    other = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    with pytest.raises(ReplicationError, match="class SGD that is sharded, or steps no reduced parameter"):
        training.model.check_replicas_of(training.optimizer, other)
    training.model.check_replicas_of(training.optimizer)
    shard_optimizer(training.optimizer, training.model)
    training.step()  # shards it at the end of its backward
    with pytest.raises(ReplicationError, match="class AdamW that is sharded, or"):
        training.step()


def left_out(training: Training) -> None:
    with training.model.no_sync():
        training.step()


@on_ranks(2, eagerly=True)
def test_replicas_that_differ_on_purpose() -> None:
    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    with compared_every(1):
        unchecked, hooked, local = Training(check_replicas=False), Training(), Training()
        hooked.model.register_comm_hook(None, hook)
        if dist.get_rank() == 1:
            flip_bit(unchecked.parameter(0)[1], 3, 5)
        left_out(local)
        for _ in range(3):
            unchecked.step()
            hooked.step()
            local.step()
            left_out(local)
