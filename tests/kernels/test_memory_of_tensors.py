"""Memory that is misaligned, shared, moved, freed, or used by two threads: refused with nothing written, or correct."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_compile.kernels import FlattenPlan, flatten_scale, minmax_u8_compress, unflatten

pytestmark = pytest.mark.usefixtures("implementation")

# Beyond the size from which the C++ library writes past the caches.
LARGE = 3 << 20


@pytest.mark.parametrize("offset", [0, 1, 2, 3])
def test_unaligned_elements(implementation: str, offset: int) -> None:
    if implementation == "cuda" and offset:
        pytest.skip("no memory of a CUDA device is misaligned to its elements")
    memory = bytearray(4 * LARGE + 8)
    odd = torch.frombuffer(memory, dtype=torch.float32, offset=offset, count=LARGE)
    values = torch.arange(LARGE, dtype=torch.float32)
    flatten_scale([values], odd, 0.5)
    assert torch.equal(odd.clone(), values * 0.5)
    unflatten(values, [odd], 2.0)
    assert torch.equal(odd.clone(), values * 2)


def test_overlap_in_wider_dtype() -> None:
    memory = torch.zeros(24, dtype=torch.uint8)
    plan = FlattenPlan.for_bucket([torch.zeros(4), torch.zeros(4)], torch.arange(8.0))
    plan.unflatten([memory[:8].view(torch.float16), memory[8:16].view(torch.float16)])
    wide = [memory[:16].view(torch.float32), memory[8:].view(torch.float32)]
    before = memory.clone()
    with pytest.raises(ValueError, match="tensors 0 and 1 share memory"):
        plan.unflatten(wide)
    assert torch.equal(memory, before)


@pytest.mark.parametrize(
    "overlapping", [torch.full((1,), 5.0).expand(3), torch.zeros(4).as_strided((3,), (0,)), torch.zeros(1).expand(3)]
)
def test_self_overlapping_destination(overlapping: Tensor) -> None:
    first, before = torch.zeros(2), overlapping.clone()
    with pytest.raises(ValueError, match=r"tensor 1 with strides .* cannot be written"):
        unflatten(torch.arange(5.0), [first, overlapping])
    assert first.tolist() == [0, 0] and torch.equal(overlapping, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_overlapping_destinations(dtype: torch.dtype) -> None:
    """Every pair is checked, by whichever implementation moves it, and checked again in each call."""
    plan = FlattenPlan.for_bucket(
        [torch.zeros(3), torch.zeros(2, 3), torch.zeros(0), torch.zeros(2)], torch.arange(11.0)
    )
    memory = torch.zeros(96, dtype=torch.uint8)

    def floats(begin: int, count: int) -> Tensor:
        return memory[begin : begin + 4 * count].view(torch.float32)

    end = 32 + 6 * dtype.itemsize
    odd = memory[32:end].view(dtype).view(3, 2).t()
    before, behind, empty = floats(20, 3), floats(-(-end // 4) * 4, 2), floats(36, 0)
    for _ in range(2):
        plan.unflatten([before, odd, empty, behind])
        assert before.tolist() == [0, 1, 2] and behind.tolist() == [9, 10]
        assert odd.float().tolist() == [[3, 4, 5], [6, 7, 8]]
        kept = memory.clone()
        with pytest.raises(ValueError, match="tensors 0 and 1 share memory"):
            plan.unflatten([floats(24, 3), odd, empty, behind])
        with pytest.raises(ValueError, match="tensors 1 and 3 share memory"):
            plan.unflatten([before, odd, empty, floats((end - 1) // 4 * 4, 2)])
        assert torch.equal(memory, kept)


def test_changed_flat_buffer() -> None:
    tensors = [torch.ones(100)]
    for change in (
        lambda flat: setattr(flat, "data", torch.zeros(2)),
        lambda flat: setattr(flat, "data", torch.zeros(100, dtype=torch.float16)),
        lambda flat: flat.untyped_storage().resize_(0),
        lambda flat: flat.set_(torch.zeros(100)),
    ):
        plan = FlattenPlan.for_bucket(tensors, torch.zeros(100))
        change(plan.flat)
        for call in (plan.flatten, plan.unflatten):
            with pytest.raises(ValueError, match="flat has another size, dtype or memory than when the plan was made"):
                call(tensors, 0.5)


def test_freed_storage() -> None:
    freed = torch.zeros(100)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="flat with 100 elements has no memory"):
        flatten_scale([torch.ones(100)], freed, 1.0)
    with pytest.raises(ValueError, match="values with 100 elements has no memory"):
        minmax_u8_compress(freed)


def test_flushed_subnormals() -> None:
    halves = torch.tensor([6e-8, 3e-5, 6e-5, -6e-8, 0.0, 1.0], dtype=torch.float16)
    expected = halves.float()
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        flat = torch.empty(6)
        flatten_scale([halves], flat, 1.0)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(flat, expected)


class MadeOnDemand(Sequence[Tensor]):
    """64 tensors that nothing keeps."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: Any) -> Any:
        if index >= len(self):
            raise IndexError(index)
        return torch.full((5000,), float(index))


def test_tensors_live_during_copy() -> None:
    flat = torch.empty(64 * 5000)
    plan = FlattenPlan.for_bucket(list(MadeOnDemand()), flat)
    for _ in range(5):
        plan.flatten(MadeOnDemand(), 1.0)
        assert torch.equal(flat.view(64, 5000)[:, 0], torch.arange(64.0))


def test_two_threads_with_one_plan() -> None:
    flat = torch.arange(20_000.0)
    plan = FlattenPlan.for_bucket(list(flat.clone().split(100)), flat)

    def is_right() -> bool:
        mine = list(torch.zeros(20_000).split(100))
        plan.unflatten(mine)
        return torch.equal(torch.cat(mine), flat)

    with ThreadPoolExecutor(2) as threads:
        both = [threads.submit(lambda: all(is_right() for _ in range(100))) for _ in range(2)]
    assert all(each.result() for each in both)


def test_float8() -> None:
    flat = torch.zeros(5)
    tensors = [torch.ones(2), torch.tensor([0.5, 2.0, -4.0]).to(torch.float8_e4m3fn)]
    flatten_scale(tensors, flat, 0.5)
    assert flat.tolist() == [0.5, 0.5, 0.25, 1.0, -2.0]
