"""Fixtures of the unit tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from kernel_choice import INSTRUCTION_SETS, PLAIN_LOOPS, Asked

from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import NativeLibrary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def plain_library(tmp_path_factory: pytest.TempPathFactory) -> NativeLibrary:
    """The C++ library as compilers other than GCC and clang build it, built here by whichever there is."""
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed, so the plain loops cannot be built")
    folder = tmp_path_factory.mktemp("plain_loops")
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "objects")]
    environment = {**os.environ, "DDP_COMPILE_NATIVE": "1", "CXXFLAGS": "-DDDP_COMPILE_PLAIN_LOOPS"}
    subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True)
    (path,) = folder.rglob("_core*")
    built = NativeLibrary(path)
    assert built.instruction_sets() == [PLAIN_LOOPS]
    return built


@pytest.fixture(params=[*INSTRUCTION_SETS, PLAIN_LOOPS])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The C++ library with the loops of each instruction set that this processor has, and with the plain ones."""
    core = library.load()  # it has to be there: nothing may pass because it is missing
    if request.param == PLAIN_LOOPS:
        plain = request.getfixturevalue("plain_library")
        monkeypatch.setattr(library, "load", lambda: plain)
    elif request.param in core.instruction_sets():
        core.use_instruction_set(request.param)
    else:
        pytest.skip(f"this processor does not have {request.param}")
    yield request.param
    core.use_instruction_set(core.instruction_sets()[0])


@pytest.fixture(params=[None, "reference"], ids=["native", "reference"])
def asked(request: pytest.FixtureRequest) -> Asked:
    """Each implementation that a CPU has."""
    library.load()  # it has to be there: nothing may pass because it is missing
    return Asked(request.param)
