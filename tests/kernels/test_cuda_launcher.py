"""The CUDA kernels and their launches, run on the CPU from the bytes that a launch would pass to the driver."""

import ctypes

import kernel_values
import pytest
import torch
from cuda_emulation import NUM_MULTIPROCESSORS, STREAM, EmulatedDevice
from in_ci import only
from kernel_checks import POISON, check_add_rows, check_average, check_codec, check_moves, values_of
from kernel_values import DTYPES, using

from ddp_compile.kernels.cuda import arguments, elementwise, programs
from ddp_compile.kernels.cuda.arguments import BLOCK_THREADS, BLOCKS_PER_MULTIPROCESSOR, CHUNK_NUMEL
from ddp_compile.kernels.cuda.executor import CudaExecutor
from ddp_compile.kernels.cuda.programs import PACK_SIZES

DTYPES_IN_CI = DTYPES[:2]  #: Where each is a program of its own, which takes the C++ compiler a second.


@pytest.fixture
def device(emulated_device: EmulatedDevice) -> EmulatedDevice:
    emulated_device.driver.launches.clear()
    return emulated_device


def new_executor(device: EmulatedDevice, tensors: list[torch.Tensor], flat: torch.Tensor) -> CudaExecutor:
    with using("cuda", device):
        return CudaExecutor(tensors, flat, None)


def test_argument_sizes(device: EmulatedDevice) -> None:
    numels = [torch.ones(size, dtype=torch.int64) for size in PACK_SIZES]
    structures = {
        "find_minmax_Float32": arguments.CodecArguments(),
        "average_Float32": arguments.AverageArguments(),
        "add_rows_Float32": arguments.AddRowsArguments(),
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
    check_moves(tensors, torch.full((numel,), POISON, dtype=flat_dtype), offsets, device=device)


@pytest.mark.parametrize(
    ("num_tensors", "sizes"),
    [(0, []), (1, []), (32, [32]), (33, [168]), (168, [168]), (169, [1360]), (1360, [1360]), (1430, [1360, 168])],
)
def test_launches_by_number_of_tensors(device: EmulatedDevice, num_tensors: int, sizes: list[int]) -> None:
    numels = [i % 11 for i in range(num_tensors)]
    tensors = [values_of(numel, torch.float32, i) for i, numel in enumerate(numels)]
    check_moves(tensors, torch.full((sum(numels) + 1,), POISON), device=device)
    launches = device.driver.launches
    # A single tensor here is empty. There and back.
    assert [launch.kernel for launch in launches] == [f"move_Float32_Float32_{size}" for size in sizes] * 2
    for launch in launches:
        assert launch.stream == STREAM and launch.num_threads == BLOCK_THREADS
        assert launch.num_blocks <= BLOCKS_PER_MULTIPROCESSOR * NUM_MULTIPROCESSORS


def test_more_chunks_than_blocks(device: EmulatedDevice) -> None:
    numel = CHUNK_NUMEL * (BLOCKS_PER_MULTIPROCESSOR * NUM_MULTIPROCESSORS + 3) + 11
    tensors = [values_of(numel, torch.float32), values_of(3, torch.float32)]
    check_moves(tensors, torch.full((numel + 3,), POISON, dtype=torch.bfloat16), device=device)
    assert device.driver.launches[0].num_blocks == BLOCKS_PER_MULTIPROCESSOR * NUM_MULTIPROCESSORS


@pytest.mark.parametrize("dtypes", only([DTYPES_IN_CI], [DTYPES_IN_CI, DTYPES]), ids=len)
def test_mixed_dtypes(device: EmulatedDevice, dtypes: list[torch.dtype]) -> None:
    tensors = [values_of(50 + i, dtypes[i % len(dtypes)], i) for i in range(10)]
    flat = torch.full((sum(tensor.numel() for tensor in tensors),), POISON, dtype=torch.bfloat16)
    for scale in (1 / 3, torch.tensor(1 / 3, dtype=torch.float64)):
        check_moves(tensors, flat, scale=scale, device=device)
    kernels = [launch.kernel for launch in device.driver.launches[: len(dtypes)]]
    assert kernels == [f"move_{name}_BFloat16_32" for name in ("Float32", "BFloat16", "Float16")[: len(dtypes)]]


def test_other_tensors_are_left_alone(device: EmulatedDevice) -> None:
    tensors = [torch.ones(6), torch.ones(2, 3), torch.ones(4, dtype=torch.float64), torch.ones(5)]
    flat = torch.full((21,), POISON)
    executor = new_executor(device, tensors, flat)
    given = [tensors[0], torch.ones(3, 2).t(), tensors[2], tensors[3]]
    assert list(executor.read(given, flat, written=False)) == [1, 2]
    executor.move(flat, True, 2.0)
    assert flat.tolist() == [2.0] * 6 + [POISON] * 10 + [2.0] * 5
    # The next step may bring tensors that fit again.
    assert list(executor.read(tensors[:2] + given[2:], flat, written=False)) == [2]
    executor.move(flat, True, 3.0)
    assert flat.tolist() == [3.0] * 12 + [POISON] * 4 + [3.0] * 5


def test_other_default_device(device: EmulatedDevice) -> None:
    tensors, flat = [torch.ones(3), torch.ones(4)], torch.zeros(7)
    with torch.device("meta"):
        executor = new_executor(device, tensors, flat)
        executor.read(tensors, flat, written=False)
        executor.move(flat, True, 2.0)
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
    values = values_of(numel, dtype, misaligned_by=numel % 2)
    values *= torch.linspace(0.1, 1, numel)  # each slice has another minimum and maximum
    check_codec(values, num_chunks, dtype, device)


def test_misaligned_rows_are_refused(device: EmulatedDevice) -> None:
    rows = torch.zeros(100, dtype=torch.uint8)[4:20].view(1, 16)
    said = r"rows begin at address 0x[0-9a-f]*4, which is not a multiple of 16"
    with using("cuda", device), pytest.raises(ValueError, match=said):
        elementwise.minmax_u8_compress(torch.ones(3), rows)


@pytest.mark.parametrize("dtype", only(DTYPES_IN_CI, DTYPES))
@pytest.mark.parametrize("numel", [0, 1, 1003, 60_001])
@pytest.mark.parametrize("misaligned_by", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)])
def test_average_bits(
    device: EmulatedDevice, dtype: torch.dtype, numel: int, misaligned_by: tuple[int, int, int]
) -> None:
    check_average([values_of(numel, dtype, seed, by) for seed, by in enumerate(misaligned_by)], device)


@pytest.mark.parametrize("dtype", only(DTYPES_IN_CI, DTYPES))
@pytest.mark.parametrize(("num_rows", "numel"), [(1, 5), (2, 1003), (5, 60_000)])
def test_add_rows_bits(device: EmulatedDevice, dtype: torch.dtype, num_rows: int, numel: int) -> None:
    check_add_rows(values_of(num_rows * numel, dtype).view(num_rows, numel), device)
