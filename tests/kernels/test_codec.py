"""The min-max codec and the averaging update: error bounds, edges of the float range, bit equality."""

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernel_values import DTYPES
from torch import Tensor, ones
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ddp_compile.kernels import add_rows, average_into, minmax_u8_compress, minmax_u8_decompress
from ddp_compile.kernels.contract import reference

pytestmark = pytest.mark.usefixtures("implementation")


def round_trip(values: Tensor, num_chunks: int = 1) -> Tensor:
    out = torch.full_like(values, 7.0)
    minmax_u8_decompress(minmax_u8_compress(values, num_chunks), out)
    return out


@pytest.mark.parametrize("exponent", [*range(-38, 38, 4), 38])
def test_codec_error_is_half_a_step(exponent: int) -> None:
    """Up to a range that float32 does not hold."""
    values = (torch.rand(1001, generator=torch.Generator().manual_seed(exponent)) * 6 - 3) * 10.0**exponent
    error = (round_trip(values).double() - values.double()).abs()
    step = (values.max().double() - values.min().double()) / 255
    rounding = values.double().abs() * 2.0**-24 + 1.5e-45
    assert (error <= step / 2 * (1 + 1e-9) + rounding).all()


def test_codes_are_clamped() -> None:
    assert round_trip(torch.tensor([1.5, -253.5, 0.0])).tolist() == [1.5, -253.5, 0.5]


@pytest.mark.parametrize("constant", [0.0, -0.0, 1e30, -3.4e38, 1e-45, 1.0])
def test_constants_are_exact(constant: float) -> None:
    assert round_trip(torch.full((37,), constant)).tolist() == [torch.tensor(constant).item()] * 37


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("position", [0, 40, 66])
def test_bad_value_makes_its_chunk_nan(bad: float, position: int) -> None:
    values = torch.linspace(0, 1, 201)
    values[67 + position] = bad
    out = round_trip(values, num_chunks=3)
    assert out[67:134].isnan().all()
    assert out[:67].isfinite().all() and out[134:].isfinite().all()


def test_short_and_empty_chunks() -> None:
    values = torch.arange(1.0, 6.0)
    rows = minmax_u8_compress(values, num_chunks=4)  # chunks of 2, 2, 1 and 0
    assert rows.shape == (4, 16)
    headers = rows[:, :8].contiguous().view(torch.float32)
    assert headers.tolist() == [[1, 2], [3, 4], [5, 5], [0, 0]]
    assert rows[:, 8:].tolist() == [[0, 255] + [0] * 6, [0, 255] + [0] * 6, [0] * 8, [0] * 8]
    assert round_trip(values, num_chunks=4).tolist() == values.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(dtype: torch.dtype) -> None:
    values = torch.randn(1001, generator=torch.Generator().manual_seed(1))
    out = torch.randn(1001, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = (out.float() + round_trip(values, num_chunks=3)).to(dtype)
    minmax_u8_decompress(minmax_u8_compress(values, 3), out, accumulate=True)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 1000])
def test_average_into(dtype: torch.dtype, numel: int) -> None:
    x, total, copy = (torch.randn(numel, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    expected = (x.float() + (total.float() / 3 - copy.float())).to(dtype)
    average_into(x, total, copy, 3)
    assert torch.equal(x, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_add_rows_in_their_order(dtype: torch.dtype) -> None:
    rows = torch.randn(7, 333, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.empty(333, dtype=dtype)
    add_rows(rows, out, 0.7)
    wide = rows.to(torch.promote_types(dtype, torch.float32))
    assert torch.equal(out, (functools.reduce(torch.add, wide) * 0.7).to(dtype))


ROWS = torch.zeros(1, 16, dtype=torch.uint8)
MEMORY = ones(2, 4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda out: add_rows(ones(4), out), r"rows have shape \(4,\).*shape \(rows, elements\)"),
        (lambda out: add_rows(ones(0, 4), out), "at least one row"),
        (lambda out: add_rows(ones(2, 3), out), r"out of shape \(4,\)"),
        (lambda out: add_rows(ones(2, 4).half(), out), "rows are of torch.float16 on cpu, out is of torch.float32"),
        (lambda _: add_rows(ones(2, 4).int(), ones(4).int()), "one floating dtype"),
        (lambda _: add_rows(MEMORY, MEMORY[1]), "out, which is written, shares memory with rows"),
        (lambda _: minmax_u8_compress(ones(2, 2)), r"values has shape \(2, 2\).*contiguous 1-d"),
        (lambda _: minmax_u8_compress(ones(8)[::2]), r"values has shape \(4,\), strides \(2,\)"),
        (lambda _: minmax_u8_compress(ones(4).double()), "torch.float64; float32, bfloat16 and float16 are supported"),
        (lambda _: minmax_u8_compress(ones(4), 0), "num_chunks=0 must be at least 1"),
        (lambda _: minmax_u8_compress(ones(4), 2, skip_chunk=2), "skip_chunk=2 must be one of the num_chunks=2 chunks"),
        (lambda out: minmax_u8_decompress(torch.zeros(1, 16), out), "compressed is of torch.float32"),
        (lambda out: minmax_u8_decompress(ROWS[0], out), r"compressed is of torch.uint8, shape \(16,\)"),
        (lambda _: minmax_u8_decompress(ROWS, ones(9)), "1 rows of 16 bytes, but out with 9 elements needs.* 32"),
        (lambda _: minmax_u8_decompress(ROWS, ones(2, 2)), "out has shape"),
        (lambda out: minmax_u8_decompress(ROWS.to("meta"), out), "compressed is on meta but out is on cpu"),
        (lambda _: minmax_u8_decompress(MEMORY.view(torch.uint8)[:1], MEMORY[0]), "out, .* memory with compressed"),
        (lambda out: average_into(out, ones(3), ones(4), 2), "total has 3 elements.*x has 4"),
        (lambda out: average_into(out, ones(4), ones(4).half(), 2), "copy has 4 elements of torch.float16"),
        (lambda out: average_into(out, ones(4), ones(4), 0), r"count=0\.0 must be positive"),
        (lambda out: average_into(out, out[:], ones(4), 2), "x, which is written, shares memory with total"),
    ],
)
def test_refusals(call: Callable[[Tensor], object], message: str) -> None:
    out = ones(4)
    with pytest.raises(ValueError, match=message):
        call(out)
    assert (out == 1).all() and (MEMORY == 1).all()


class NoneOnTheHost(TorchDispatchMode):
    """Refuses tensors on the host, from which a device would copy while the host waits."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for value in tree_leaves((args, kwargs, result)):
            assert not (isinstance(value, Tensor) and value.is_cpu), f"{function} has a tensor on the host"
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_copies_nothing_from_host(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "tensor", lambda *_, **__: pytest.fail("torch.tensor copies from the host"))
    x, total, copy = (torch.empty(1000, dtype=dtype, device="meta") for _ in range(3))
    rows = torch.empty(2, reference.row_bytes(500), dtype=torch.uint8, device="meta")
    with NoneOnTheHost():
        reference.minmax_u8_compress(x, rows)
        reference.minmax_u8_decompress(rows, x)
        reference.minmax_u8_decompress(rows, x, accumulate=True)
        reference.average_into(x, total, copy, 3)
        reference.add_rows(x.view(2, 500), total[:500], 0.5)
        reference.scale_into([x, total], [total, copy], 0.5)
