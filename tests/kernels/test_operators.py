"""The kernels as operators: opcheck, torch.compile, and which implementation runs."""

import logging
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_compile import KernelUnavailableError, kernels
from ddp_compile.kernels import executors
from ddp_compile.kernels.native import library

# As they are before a test puts others in their place.
SOURCES, LIBRARY = library.SOURCES, library.load().path

OPS = torch.ops.ddp_compile


def tensors_and_flat() -> tuple[list[Tensor], Tensor]:
    return [torch.randn(3, 4), torch.randn(5)], torch.zeros(20)


@pytest.mark.parametrize(
    ("op", "arguments"),
    [
        (OPS.flatten_scale, (*tensors_and_flat(), 0.5, None)),
        (OPS.flatten_scale, (*tensors_and_flat(), 0.5, [0, 15])),
        (OPS.unflatten, (*tensors_and_flat()[::-1], 0.5, [1, 14])),
        (OPS.minmax_u8_compress, (torch.randn(33), 2, None)),
        (OPS.minmax_u8_decompress, (torch.zeros(2, 32, dtype=torch.uint8), torch.randn(33), False)),
        (OPS.minmax_u8_decompress, (torch.zeros(2, 32, dtype=torch.uint8), torch.randn(33), True)),
        (OPS.average_into, (torch.randn(5), torch.randn(5), torch.randn(5), 2.0)),
        (OPS.add_rows, (torch.randn(3, 5), torch.randn(5), 2.0)),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_opcheck(op: Any, arguments: tuple) -> None:
    results = torch.library.opcheck(op.default, arguments)
    assert set(results.values()) == {"SUCCESS"}


def step(tensors: list[Tensor], flat: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    kernels.flatten_scale(tensors, flat, 0.5, offsets=[0, 14])
    back = [torch.zeros_like(tensor) for tensor in tensors]
    kernels.unflatten(flat, back, 2.0, offsets=[0, 14])
    rows = kernels.minmax_u8_compress(flat * 2, num_chunks=3)
    kernels.minmax_u8_decompress(rows, x)
    kernels.average_into(x, flat + 1, flat, 2.0)
    return torch.cat([tensor.reshape(-1) for tensor in back]), x + 1


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.inductor, pytest.mark.long])]
)
def test_kernels_under_fullgraph(backend: str) -> None:
    torch._dynamo.reset()
    tensors, flat = tensors_and_flat()
    other_flat, x, other_x = flat.clone(), torch.randn(20), torch.empty(20)
    other_x.copy_(x)
    expected = step(tensors, flat, x)
    results = torch.compile(step, backend=backend, fullgraph=True)(tensors, other_flat, other_x)
    for a, b in zip((*expected, flat, x), (*results, other_flat, other_x), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_status_says_why() -> None:
    of_cpu, of_cuda = kernels.status()
    assert (of_cpu.device_type, of_cpu.implementation) == ("cpu", "native") and "_core" in of_cpu.reason
    assert of_cuda.device_type == "cuda" and of_cuda.reason
    assert (of_cuda.implementation == "cuda") == torch.cuda.is_available()


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An installation without a compiler."""
    library.load.cache_clear()
    executors.available.cache_clear()
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "SOURCES", tmp_path / "csrc")
    yield
    library.load.cache_clear()
    executors.available.cache_clear()


def test_without_library(no_library: None, caplog: pytest.LogCaptureFixture) -> None:
    tensors, flat = tensors_and_flat()
    with caplog.at_level(logging.WARNING, "ddp_compile"):
        for _ in range(3):
            plan = kernels.FlattenPlan.for_bucket(tensors, flat)
            plan.flatten(tensors, 1.0)
    assert plan.implementation == "reference"
    assert torch.equal(flat[:12], tensors[0].reshape(-1))
    assert len(caplog.records) == 1 and "was installed without a C++ compiler" in caplog.text
    of_cpu, _ = kernels.status()
    assert of_cpu.implementation == "reference" and "DDP_COMPILE_NATIVE=1" in of_cpu.reason


def test_broken_library(no_library: None, tmp_path: Path) -> None:
    (tmp_path / "_core.abi3.so").write_bytes(b"not a library")
    with pytest.raises(KernelUnavailableError, match=r"_core.abi3.so cannot be used, install ddp_compile again"):
        library.load()


@pytest.fixture
def another_tree(no_library: None, tmp_path: Path) -> Path:
    """The library built here, next to a copy of its sources."""
    shutil.copy(LIBRARY, tmp_path)
    return Path(shutil.copytree(SOURCES, tmp_path / "csrc"))


def test_library_of_other_sources(another_tree: Path, caplog: pytest.LogCaptureFixture) -> None:
    (another_tree / "loops.h").write_text((another_tree / "loops.h").read_text() + "// changed\n")
    tensors, flat = tensors_and_flat()
    kernels.flatten_scale(tensors, flat, 1.0)
    assert torch.equal(flat[:12], tensors[0].reshape(-1))
    reason = r"_core\..* was built from other sources than those in .*csrc; build it again with pip install -e \."
    assert re.search(reason, caplog.text)
    of_cpu, _ = kernels.status()
    assert of_cpu.implementation == "reference" and re.search(reason, of_cpu.reason)


@pytest.mark.parametrize("state", ["as they were", "with other line endings", "not installed"])
def test_library_of_its_sources(another_tree: Path, state: str) -> None:
    if state == "not installed":
        shutil.rmtree(another_tree)
    elif state == "with other line endings":
        for path in another_tree.iterdir():
            path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert library.load().path.parent == another_tree.parent


def test_negated_and_zero_tensors() -> None:
    """The imaginary part of a conjugate has its sign in a bit of the tensor; zeros may have no memory at all."""
    for numel in (1, 3):
        negated = torch.complex(torch.ones(numel), torch.full((numel,), 2.0)).conj().imag
        assert negated.is_neg()
        flat = torch.ones(numel + 4)
        kernels.flatten_scale([negated, torch._efficientzerotensor(3)], flat, 1.0)
        assert flat.tolist() == [-2.0] * numel + [0, 0, 0, 1]
