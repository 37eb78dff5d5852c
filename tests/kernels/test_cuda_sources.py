"""The CUDA sources through the compilers themselves, NVRTC and nvcc, neither of which needs a device."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.cuda.compiler import Compiler
from ddp_compile.kernels.cuda.programs import PROGRAM_OF, PROGRAMS, SOURCE_FOLDER, Program

ARCHITECTURES = ["sm_80", "sm_90", "sm_100"]

# Four blocks of 256 threads fit into a multiprocessor's 65536 registers: enough loads in flight to fill the memory.
MAX_REGISTERS = 64


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    try:
        return Compiler()
    except KernelUnavailableError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def binaries(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, str]]:
    """Every kernel for each architecture, compiled by nvcc, with ptxas's report."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    folder = tmp_path_factory.mktemp("nvcc")
    source = folder / "all.cu"
    source.write_text("".join(program.text() for program in PROGRAMS))
    flags = ["-std=c++17", "-Werror", "all-warnings", "-cubin", "-Xptxas", "-v", "-I", str(SOURCE_FOLDER)]
    known = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if missing := set(ARCHITECTURES) - set(known):
        pytest.skip(f"nvcc does not know {missing}")
    processes = {}
    for architecture in ARCHITECTURES:
        binary = folder / f"{architecture}.cubin"
        command = [nvcc, *flags, f"-arch={architecture}", str(source), "-o", str(binary)]
        # All at once: each takes a few seconds on one core.
        processes[architecture] = binary, subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    results = {
        architecture: (binary, process.communicate()[1]) for architecture, (binary, process) in processes.items()
    }
    for _, process in processes.values():
        assert process.returncode == 0, results
    return results


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.long
def test_no_kernel_spills(binaries: dict[str, tuple[Path, str]], architecture: str) -> None:
    report = binaries[architecture][1]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert frames == [("0", "0", "0")] * len(PROGRAM_OF)
    registers = [int(number) for number in re.findall(r"Used (\d+) registers", report)]
    assert len(registers) == len(PROGRAM_OF)
    assert max(registers) <= MAX_REGISTERS


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_nvrtc_compiles_every_program(compiler: Compiler, program: Program) -> None:
    binary = compiler.compile(program, "sm_90")
    assert binary.startswith(b"\x7fELF")
    assert all(f".text.{kernel}".encode() in binary for kernel in program.kernels)


def test_target_architecture(compiler: Compiler) -> None:
    assert [compiler.target(capability) for capability in ((8, 0), (8, 6), (9, 0), (10, 0))] == [
        *("sm_80", "sm_86", "sm_90", "sm_100")
    ]
    compiler.architectures = [80, 90]
    assert compiler.target((8, 9)) == "sm_80"
    with pytest.raises(KernelUnavailableError, match=r"NVRTC .* cannot compile for compute capability 12\.0"):
        compiler.target((12, 0))
    with pytest.raises(KernelUnavailableError, match=r"need compute capability 8\.0 or newer, but the device has 7\.5"):
        compiler.target((7, 5))


def test_nvrtc_error(compiler: Compiler) -> None:
    program = Program("broken", "move.cuh", ("DDP_COMPILE_MOVE(Float32, Float64, 32)",), ())
    with pytest.raises(KernelUnavailableError, match=r'cannot compile broken: .*"Float64" is undefined'):
        compiler.compile(program, "sm_90")
