"""The CUDA kernels and their launches, run on the CPU from the bytes that a launch would pass to the driver."""

from __future__ import annotations

import ctypes
import math

import kernel_values
import pytest
import torch
from cuda_checks import POISON, check_average, check_both_ways, check_codec, compressed, stats_values, values_of
from cuda_emulation import NUM_MULTIPROCESSORS, STREAM, EmulatedDevice
from in_ci import only
from kernel_values import DTYPES, same_bits

from ddp_compile.kernels.contract import reference
from ddp_compile.kernels.cuda import arguments, elementwise, programs
from ddp_compile.kernels.cuda.arguments import BLOCK_THREADS, BLOCKS_PER_MULTIPROCESSOR, CHUNK_NUMEL
from ddp_compile.kernels.cuda.executor import CudaExecutor
from ddp_compile.kernels.cuda.programs import PACK_SIZES

DTYPES_IN_CI = DTYPES[:2]  #: Where each is a program of its own, which takes the C++ compiler a second.


@pytest.fixture(scope="module")
def shared_device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    return EmulatedDevice(tmp_path_factory.mktemp("programs"))


@pytest.fixture
def device(shared_device: EmulatedDevice) -> EmulatedDevice:
    shared_device.driver.launches.clear()
    return shared_device


def test_argument_sizes(device: EmulatedDevice) -> None:
    numels = [torch.ones(size, dtype=torch.int64) for size in PACK_SIZES]
    structures = {
        programs.STATS_KERNEL: arguments.StatsArguments(),
        "find_minmax_Float32": arguments.CodecArguments(),
        "average_Float32": arguments.AverageArguments(),
        **{
            programs.move_kernel("Float32", "Float32", len(ones)): arguments.Pack(0, ones, ones).structure
            for ones in numels
        },
    }
    for kernel, structure in structures.items():
        assert device.argument_bytes(kernel) == ctypes.sizeof(structure), kernel
    sizes = [ctypes.sizeof(structures[programs.move_kernel("Float32", "Float32", size)]) for size in PACK_SIZES]
    # What a launch took before CUDA 12.1, and what it takes now.
    assert sizes[1] <= 4096 and sizes[2] <= 32764


@pytest.mark.parametrize("flat_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_alignment(device: EmulatedDevice, dtype: torch.dtype, flat_dtype: torch.dtype) -> None:
    tensors, offsets, numel = kernel_values.every_alignment([0, 1, 2, 7, 37, 64, 999], dtype)
    check_both_ways(device, tensors, torch.full((numel,), POISON, dtype=flat_dtype), offsets)


@pytest.mark.parametrize("with_stats", [False, True])
@pytest.mark.parametrize(
    ("num_tensors", "sizes"),
    [(0, []), (1, []), (32, [32]), (33, [168]), (168, [168]), (169, [1360]), (1360, [1360]), (1430, [1360, 168])],
)
def test_launches_by_number_of_tensors(
    device: EmulatedDevice, num_tensors: int, sizes: list[int], with_stats: bool
) -> None:
    numels = [i % 11 for i in range(num_tensors)]
    tensors = [values_of(numel, torch.float32, i) for i, numel in enumerate(numels)]
    check_both_ways(device, tensors, torch.full((sum(numels) + 1,), POISON), with_stats=with_stats)
    moves = [launch for launch in device.driver.launches if launch.kernel.startswith("move")]
    # A single tensor here is empty. There and back.
    assert [launch.kernel for launch in moves] == [f"move_Float32_Float32_{size}" for size in sizes] * 2
    for launch in device.driver.launches:
        assert launch.stream == STREAM and launch.num_threads == BLOCK_THREADS
        assert launch.num_blocks <= BLOCKS_PER_MULTIPROCESSOR * NUM_MULTIPROCESSORS
    assert len(device.driver.launches) - len(moves) == 2 * with_stats


def test_more_chunks_than_blocks(device: EmulatedDevice) -> None:
    numel = CHUNK_NUMEL * (BLOCKS_PER_MULTIPROCESSOR * NUM_MULTIPROCESSORS + 3) + 11
    tensors = [values_of(numel, torch.float32), values_of(3, torch.float32)]
    check_both_ways(device, tensors, torch.full((numel + 3,), POISON, dtype=torch.bfloat16))
    assert device.driver.launches[0].num_blocks == BLOCKS_PER_MULTIPROCESSOR * NUM_MULTIPROCESSORS


@pytest.mark.parametrize("dtypes", only([DTYPES_IN_CI], [DTYPES_IN_CI, DTYPES]), ids=len)
def test_mixed_dtypes(device: EmulatedDevice, dtypes: list[torch.dtype]) -> None:
    tensors = [values_of(50 + i, dtypes[i % len(dtypes)], i) for i in range(10)]
    check_both_ways(device, tensors, torch.full((sum(t.numel() for t in tensors),), POISON, dtype=torch.bfloat16))
    kernels = [launch.kernel for launch in device.driver.launches[: len(dtypes)]]
    assert kernels == [f"move_{name}_BFloat16_32" for name in ("Float32", "BFloat16", "Float16")[: len(dtypes)]]


def test_other_tensors_are_left_alone(device: EmulatedDevice) -> None:
    tensors = [torch.ones(6), torch.ones(2, 3), torch.ones(4, dtype=torch.float64), torch.ones(5)]
    flat = torch.full((21,), POISON)
    executor = CudaExecutor(tensors, flat, None, device)
    given = [tensors[0], torch.ones(3, 2).t(), tensors[2], tensors[3]]
    assert list(executor.read(given, flat, written=False)) == [1, 2]
    stats = torch.full((16,), 255, dtype=torch.uint8)
    executor.move(flat, True, 2.0, stats)
    assert flat.tolist() == [2.0] * 6 + [POISON] * 10 + [2.0] * 5
    assert stats_values(stats) == (44.0, False)
    # The next step may bring tensors that fit again.
    assert list(executor.read(tensors[:2] + given[2:], flat, written=False)) == [2]
    executor.move(flat, True, 3.0, None)
    assert flat.tolist() == [3.0] * 12 + [POISON] * 4 + [3.0] * 5


@pytest.mark.parametrize("scale", [1.0, 0.5])
@pytest.mark.parametrize("with_stats", [False, True])
def test_tensors_in_place_are_scaled(device: EmulatedDevice, scale: float, with_stats: bool) -> None:
    flat = values_of(20000, torch.bfloat16)
    before = flat.clone()
    tensors = [flat[:9001], torch.full((5,), 10.0, dtype=torch.bfloat16), flat[9006:]]
    executor = CudaExecutor(tensors, flat, None, device)
    executor.read(tensors, flat, written=False)
    stats = torch.empty(16, dtype=torch.uint8) if with_stats else None
    executor.move(flat, True, scale, stats)
    before[9001:9006] = 10
    assert same_bits(flat, (before.float() * scale).bfloat16())
    if stats is not None:
        assert stats_values(stats)[0] == pytest.approx((before.double() * scale).square().sum().item())


@pytest.mark.parametrize("flat_dtype", DTYPES)
@pytest.mark.parametrize(
    ("value", "non_finite_in"),
    [
        (math.nan, DTYPES),
        (math.inf, DTYPES),
        (-math.inf, DTYPES),
        (65519.0, []),
        (65520.0, [torch.float16]),
        (-3.3895e38, [torch.float16]),
        (3.3961775e38, [torch.bfloat16, torch.float16]),
    ],
)
def test_non_finite_flag(
    device: EmulatedDevice, flat_dtype: torch.dtype, value: float, non_finite_in: list[torch.dtype]
) -> None:
    tensors = [torch.ones(CHUNK_NUMEL), torch.ones(CHUNK_NUMEL + 3)]
    tensors[1][CHUNK_NUMEL + 1] = value
    flat = torch.zeros(2 * CHUNK_NUMEL + 3, dtype=flat_dtype)
    executor = CudaExecutor(tensors, flat, None, device)
    executor.read(tensors, flat, written=False)
    stats = torch.empty(16, dtype=torch.uint8)
    executor.move(flat, True, 1.0, stats)
    sum_of_squares, non_finite = stats_values(stats)
    assert non_finite == (flat_dtype in non_finite_in) == (not flat.isfinite().all().item())
    # In double, squares of large numbers do not overflow.
    expected = sum(tensor.double().square().sum().item() for tensor in tensors)
    assert sum_of_squares == pytest.approx(expected, nan_ok=True)


def test_statistics_of_many_blocks(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "num_multiprocessors", 132)
    tensors = [values_of(1, torch.float32, i) for i in range(3 * BLOCK_THREADS)]
    check_both_ways(device, tensors, torch.zeros(3 * BLOCK_THREADS))
    assert device.driver.launches[0].num_blocks == 3 * BLOCK_THREADS


def test_wrong_tensors_launch_nothing(device: EmulatedDevice) -> None:
    flat = torch.zeros(10)
    executor = CudaExecutor([torch.ones(4), torch.ones(6)], flat, None, device)
    shared = torch.ones(8)
    for tensors, message in (
        ([torch.ones(4)], "1 tensors were given to a plan for 2"),
        ([torch.ones(4), torch.ones(5)], r"tensor 1 has shape \(5,\) but its place in flat was made for \(6,\)"),
        ([flat[1:5], torch.ones(6)], "tensor 0 shares memory with flat but is not in its place"),
        ([shared[:4], shared[2:]], "tensors 0 and 1 share memory"),
    ):
        with pytest.raises(ValueError, match=message):
            executor.read(tensors, flat, written=True)
    with pytest.raises(ValueError, match="tensor 1 with 6 elements at offset 2 does not fit into flat with 7"):
        CudaExecutor([torch.ones(2), torch.ones(6)], flat[:7], None, device)
    assert device.driver.launches == []


def test_other_default_device(device: EmulatedDevice) -> None:
    tensors, flat = [torch.ones(3), torch.ones(4)], torch.zeros(7)
    with torch.device("meta"):
        executor = CudaExecutor(tensors, flat, None, device)
        executor.read(tensors, flat, written=False)
        executor.move(flat, True, 2.0, None)
    assert flat.tolist() == [2.0] * 7


@pytest.mark.parametrize("dtype", only(DTYPES_IN_CI, DTYPES))
@pytest.mark.parametrize(
    ("numel", "num_chunks"),
    only(
        [(0, 3), (1, 1), (5, 4), (4096, 1), (70001, 3)],
        [(0, 1), (0, 3), (1, 1), (5, 4), (4096, 1), (4099, 2), (70001, 3), (200_000, 1), (200_000, 4)],
    ),
)
def test_codec_bits(device: EmulatedDevice, dtype: torch.dtype, numel: int, num_chunks: int) -> None:
    values, rows = check_codec(device, numel, dtype, num_chunks)
    expected_rows = rows.clone()
    for skip_chunk in range(num_chunks):
        for of_rows in (rows, expected_rows):
            of_rows.fill_(77)
        reference.minmax_u8_compress(values, expected_rows, skip_chunk)
        elementwise.minmax_u8_compress(values, rows, skip_chunk, device=device)
        assert torch.equal(rows, expected_rows) and (rows[skip_chunk] == 77).all()


@pytest.mark.parametrize(
    "special",
    [
        [math.nan],
        [math.inf],
        [-math.inf],
        [math.inf, -math.inf],
        [3.4e38, -3.4e38],
        [1e-45, 0.0],
        [-0.0] * 4500,
        [0.0] + [-0.0] * 4499,
    ],
    ids=lambda special: str(special[:2]),
)
@pytest.mark.parametrize("dtype", only(DTYPES_IN_CI, DTYPES))
def test_codec_at_range_edges(device: EmulatedDevice, special: list[float], dtype: torch.dtype) -> None:
    values = torch.zeros(9000, dtype=dtype)
    values[4500 : 4500 + len(special)] = torch.tensor(special, dtype=dtype)
    rows, expected = compressed(values, 2), compressed(values, 2)
    reference.minmax_u8_compress(values, expected)
    elementwise.minmax_u8_compress(values, rows, device=device)
    assert torch.equal(rows, expected)
    out, expected_out = torch.full_like(values, POISON), torch.full_like(values, POISON)
    reference.minmax_u8_decompress(rows, expected_out)
    elementwise.minmax_u8_decompress(rows, out, device=device)
    assert same_bits(out, expected_out)
    # The C++ library writes the same NaN.
    nan_bits = {torch.float32: 0x7FC00000, torch.bfloat16: 0x7FC0, torch.float16: 0x7E00}[dtype]
    bits = out.view(torch.int32 if dtype == torch.float32 else torch.int16)
    assert (bits[out.isnan()] == nan_bits).all()
    reference.minmax_u8_decompress(rows, expected_out, accumulate=True)
    elementwise.minmax_u8_decompress(rows, out, accumulate=True, device=device)
    torch.testing.assert_close(out, expected_out, rtol=0, atol=0, equal_nan=True)


def test_misaligned_rows_are_refused(device: EmulatedDevice) -> None:
    rows = torch.zeros(100, dtype=torch.uint8)[4:20].view(1, 16)
    with pytest.raises(ValueError, match=r"rows begin at address 0x[0-9a-f]*4, which is not a multiple of 16"):
        elementwise.minmax_u8_compress(torch.ones(3), rows, device=device)


@pytest.mark.parametrize("dtype", only(DTYPES_IN_CI, DTYPES))
@pytest.mark.parametrize("numel", [0, 1, 1003, 60_001])
@pytest.mark.parametrize("misaligned_by", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_average_bits(
    device: EmulatedDevice, dtype: torch.dtype, numel: int, misaligned_by: tuple[int, int, int]
) -> None:
    check_average(device, numel, dtype, misaligned_by)
