"""Every CUDA kernel on small tensors of all alignments: what ``make gpu-check`` also runs under compute-sanitizer."""

import pytest
import torch
from device_tensors import NON_FINITE, POISON, on_gpu, rounded_product, values_of
from kernel_values import DTYPES, same_bits

from ddp_compile import kernels
from ddp_compile.kernels.contract import reference

pytestmark = on_gpu

NUMELS = [1, 0, 8192 + 5, 7, 1031]


@pytest.mark.parametrize("flat_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_places_of_all_alignments(dtype: torch.dtype, flat_dtype: torch.dtype) -> None:
    for start in (0, 1, 3, 8):
        tensors = [values_of(n, dtype, i, start if i % 2 else 0) for i, n in enumerate(NUMELS)]
        offsets, end = [], start
        for numel in NUMELS:
            offsets.append(end)
            end += numel + start
        flat = torch.full((end + 9,), POISON, dtype=flat_dtype, device="cuda")
        expected = flat.clone()
        for tensor, offset in zip(tensors, offsets, strict=True):
            expected[offset : offset + len(tensor)] = rounded_product(tensor, 1 / 3, flat_dtype)
        plan = kernels.FlattenPlan.for_bucket(tensors, flat, offsets)
        plan.flatten(tensors, 1 / 3)
        assert same_bits(flat, expected)
        out = [torch.full((n + 2 * start,), POISON, dtype=dtype, device="cuda") for n in NUMELS]
        plan.unflatten([o[start : start + n] for o, n in zip(out, NUMELS, strict=True)], 3.0)
        for o, place, n in zip(out, plan.views, NUMELS, strict=True):
            assert same_bits(o[start : start + n], rounded_product(place, 3.0, dtype))
            assert (o[:start] == POISON).all() and (o[start + n :] == POISON).all()


@pytest.mark.parametrize("num_tensors", [0, 1, 33, 169, 1361, 5000])
def test_any_number_of_tensors(num_tensors: int) -> None:
    numels = [i % 11 for i in range(num_tensors)]
    tensors = list(values_of(sum(numels), torch.float32).split(numels)) if num_tensors else []
    flat = torch.full((sum(numels) + 1,), POISON, device="cuda")
    kernels.flatten_scale(tensors, flat, 0.5)
    assert same_bits(flat, torch.cat([*(tensor * 0.5 for tensor in tensors), torch.full((1,), POISON, device="cuda")]))
    back = [torch.full_like(tensor, POISON) for tensor in tensors]
    kernels.unflatten(flat, back, 2.0)
    assert same_bits(torch.cat([*back, flat[-1:] * 2.0]), flat * 2.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "num_chunks"), [(0, 2), (5, 4), (4099, 2), (70_001, 3), (200_000, 1)])
def test_codec_writes_the_bits_that_a_cpu_writes(dtype: torch.dtype, numel: int, num_chunks: int) -> None:
    for special in ([1.0], NON_FINITE if numel == 4099 else [-0.0, 3.0e4]):
        values = values_of(numel, dtype, misaligned_by=numel % 2, special=special)
        rows = kernels.minmax_u8_compress(values, num_chunks)
        on_cpu = kernels.minmax_u8_compress(values.cpu(), num_chunks)
        assert torch.equal(rows.cpu(), on_cpu)
        out = torch.full((numel + 3,), POISON, dtype=dtype, device="cuda")
        kernels.minmax_u8_decompress(rows, out[2 : 2 + numel])
        out_on_cpu = torch.empty(numel, dtype=dtype)
        kernels.minmax_u8_decompress(on_cpu, out_on_cpu)
        assert same_bits(out[2 : 2 + numel].cpu(), out_on_cpu)
        if special is not NON_FINITE:  # NaNs of sums differ in their bits
            kernels.minmax_u8_decompress(rows, out[2 : 2 + numel], accumulate=True)
            kernels.minmax_u8_decompress(on_cpu, out_on_cpu, accumulate=True)
            assert same_bits(out[2 : 2 + numel].cpu(), out_on_cpu)
        assert out[0] == out[1] == out[-1] == POISON


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("numel", "misaligned_by"), [(0, 0), (1, 0), (1003, 1), (60_001, 0)])
def test_average_bits(dtype: torch.dtype, numel: int, misaligned_by: int) -> None:
    x, total, copy = (values_of(numel, dtype, seed, misaligned_by) for seed in range(3))
    expected = x.cpu()
    reference.average_into(expected, total.cpu(), copy.cpu(), 3)
    kernels.average_into(x, total, copy, 3)
    assert same_bits(x.cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "numel"), [(1, 5), (2, 1003), (8, 60_000)])
def test_add_rows_bits(dtype: torch.dtype, num_rows: int, numel: int) -> None:
    rows = values_of(num_rows * numel, dtype).view(num_rows, numel)
    out, expected = torch.empty_like(rows[0]), torch.empty(numel, dtype=dtype)
    reference.add_rows(rows.cpu(), expected, 1 / 3)
    kernels.add_rows(rows, out, 1 / 3)
    assert same_bits(out.cpu(), expected)
