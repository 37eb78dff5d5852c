"""The PTX of the CUDA kernels, run on the CPU.

test_cuda_launcher.py runs the same sources with another device.cuh, faster and in more ways. This shows what that
cannot: conversions and accesses of the real device.cuh, and that nothing is misaligned or out of bounds.
"""

import functools
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kernel_values
import pytest
import torch
from in_ci import only
from kernel_checks import POISON, check_add_rows, check_average, check_codec, check_moves, values_of
from kernel_values import DTYPES
from ptx_interpreter import PtxDriver

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.cuda import compiler
from ddp_compile.kernels.cuda.module import KernelDevice
from ddp_compile.kernels.cuda.programs import PACK_SIZES, Program

FLOAT32, BFLOAT16, FLOAT16 = DTYPES


TARGET = "compute_80"


class Nvrtc(compiler.Compiler):
    """Asks for PTX, which NVRTC makes before the binary."""

    def __init__(self) -> None:
        super().__init__()
        ask = self._call
        self._call = lambda name, *arguments: ask(name.replace("CUBIN", "PTX"), *arguments)  # type: ignore[assignment]


def compile_with_nvcc(folder: Path, program: Program) -> bytes:
    """The same with the toolkit's compiler, which takes three times as long."""
    for name, text in {**compiler.headers(), "program.cu": program.text()}.items():
        (folder / name).write_text(text)
    command = ["nvcc", *compiler.OPTIONS, "-ptx", f"-arch={TARGET}", "program.cu", "-o", "program.ptx"]
    subprocess.run(command, check=True, cwd=folder)
    return (folder / "program.ptx").read_bytes()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Any:
    try:
        nvrtc = Nvrtc()
        return functools.cache(lambda program: nvrtc.compile(program, TARGET))
    except KernelUnavailableError as error:
        if shutil.which("nvcc") is None:
            pytest.skip(f"there is no nvcc, and {error}")
        return functools.cache(functools.partial(compile_with_nvcc, tmp_path_factory.mktemp("ptx")))


@pytest.fixture
def driver() -> Iterator[PtxDriver]:
    with PtxDriver() as driver:
        yield driver


@pytest.fixture
def device(driver: PtxDriver, compiled: Any) -> KernelDevice:
    # With so many multiprocessors that each chunk has a block, since blocks run at the same time.
    return KernelDevice(driver, compiled, lambda: 0, 72, "PTX")


def check_alignments(device: KernelDevice, dtype: torch.dtype, flat_dtype: torch.dtype, pack_size: int) -> None:
    """Move tensors with the program for this many. The larger two move them in every alignment."""
    numels = {32: [8300], 168: [2, 2500], 1360: [0, 1, 7, 37, 999]}[pack_size]
    tensors, offsets, flat_numel = kernel_values.every_alignment(numels, dtype)
    flat = torch.full((flat_numel,), POISON, dtype=flat_dtype)
    step = 7 if pack_size == 32 else 1
    scale = torch.tensor(1 / 3, dtype=torch.float64) if pack_size == 168 else 1 / 3
    check_moves(tensors[::step], flat, offsets[::step], scale, device=device)


@pytest.mark.parametrize(
    ("dtype", "flat_dtype", "pack_size"),
    only(
        [(FLOAT32, BFLOAT16, 168)],
        [(dtype, flat_dtype, size) for dtype in DTYPES for flat_dtype in DTYPES for size in PACK_SIZES],
    ),
)
def test_moves(device: KernelDevice, dtype: torch.dtype, flat_dtype: torch.dtype, pack_size: int) -> None:
    check_alignments(device, dtype, flat_dtype, pack_size)


@pytest.mark.parametrize("dtype", only([BFLOAT16], DTYPES))
@pytest.mark.parametrize(("numel", "num_chunks"), only([(9001, 3)], [(5, 4), (4099, 2), (9001, 3), (20_000, 1)]))
def test_codec(device: KernelDevice, dtype: torch.dtype, numel: int, num_chunks: int) -> None:
    values = values_of(numel, dtype, misaligned_by=numel % 2)
    values *= torch.linspace(0.1, 1, numel)
    check_codec(values, num_chunks, dtype, device)


@pytest.mark.parametrize("dtype", only([FLOAT16], DTYPES))
@pytest.mark.parametrize("misaligned_by", [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)])
def test_average(device: KernelDevice, dtype: torch.dtype, misaligned_by: tuple[int, int, int]) -> None:
    check_average([values_of(1003, dtype, seed, by) for seed, by in enumerate(misaligned_by)], device)


@pytest.mark.parametrize("dtype", only([BFLOAT16], DTYPES))
@pytest.mark.parametrize("numel", only([1008], [7, 1008]))
def test_add_rows(device: KernelDevice, dtype: torch.dtype, numel: int) -> None:
    check_add_rows(values_of(3 * numel, dtype).view(3, numel), device)


@pytest.mark.parametrize(
    ("misaligned_by", "offset", "num_bytes"), [(0, 8, 16), (3, 3, 16), (1, 5, 8), (7, 1, 4), (0, 6, 4), (0, 1, 2)]
)
def test_width_of_accesses(
    driver: PtxDriver, device: KernelDevice, misaligned_by: int, offset: int, num_bytes: int
) -> None:
    tensors = [values_of(4096, BFLOAT16, misaligned_by=misaligned_by)]
    check_moves(tensors, torch.full((5000,), POISON, dtype=BFLOAT16), [offset], device=device)
    # There and back, except for up to one packet of single elements.
    most = 2 * 4096 * 2 // num_bytes
    assert all(most - 2 <= driver.accesses[f"{operation} {num_bytes}"] <= most for operation in ("ld", "st"))


MUTANTS = {
    "swapped halves": ("device.cuh", '"f"(second), "f"(first)', '"f"(first), "f"(second)', "same_bits"),
    "a read beyond the end": ("move.cuh", "(i < num_packets) packets", "(i <= num_packets) packets", "out of bounds"),
    "one side's alignment": ("move.cuh", "!is_aligned(first, ", "!is_aligned(place, ", "misaligned"),
    "an element too few": ("move.cuh", "count - body.count, ", "count - body.count - 1, ", "same_bits"),
}


@pytest.mark.parametrize("mutant", only(["swapped halves"], MUTANTS))
def test_mutants_fail(driver: PtxDriver, compiled: Any, monkeypatch: pytest.MonkeyPatch, mutant: str) -> None:
    file, old, new, failure = MUTANTS[mutant]
    sources = compiler.headers()
    assert old in sources[file]
    monkeypatch.setattr(compiler, "headers", lambda: {**sources, file: sources[file].replace(old, new)})
    with pytest.raises(AssertionError, match=failure):
        check_alignments(KernelDevice(driver, compiled.__wrapped__, lambda: 0, 72, "PTX"), BFLOAT16, BFLOAT16, 168)
