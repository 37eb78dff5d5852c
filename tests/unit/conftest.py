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
from kernel_choice import INSTRUCTION_SETS, OTHER_BUILDS, Asked

from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import NativeLibrary

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def other_builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeLibrary]:
    """The C++ library as it is built for other processors and by other compilers, built here with the same flags."""
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed, so what other compilers build cannot be built here")
    builds = {}
    for name, (macro, _) in OTHER_BUILDS.items():
        folder = tmp_path_factory.mktemp(macro.lower())
        command = ["setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", str(folder / "objects")]
        environment = {**os.environ, "DDP_COMPILE_NATIVE": "1", "CXXFLAGS": f"-D{macro}"}
        builds[name] = folder, subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment)
    assert [process.wait() for _, process in builds.values()] == [0] * len(builds)
    libraries = {name: NativeLibrary(*folder.rglob("_core*")) for name, (folder, _) in builds.items()}
    # The macros have to have reached the compiler.
    assert {name: built.instruction_sets() for name, built in libraries.items()} == {
        name: [instruction_set] for name, (_, instruction_set) in OTHER_BUILDS.items()
    }
    return libraries


@pytest.fixture(params=[*INSTRUCTION_SETS, *OTHER_BUILDS])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Puts the loops of each instruction set that this processor has to work, and those of other builds; their name."""
    core = library.load()  # it has to be there: nothing may pass because it is missing
    if request.param in OTHER_BUILDS:
        built = request.getfixturevalue("other_builds")[request.param]
        monkeypatch.setattr(library, "load", lambda: built)
    elif request.param in core.instruction_sets():
        core.use_instruction_set(request.param)
    else:
        pytest.skip(f"this processor does not have {request.param}")
    yield library.load().instruction_set().decode()
    core.use_instruction_set(core.instruction_sets()[0])


@pytest.fixture(params=[None, "reference"], ids=["native", "reference"])
def asked(request: pytest.FixtureRequest) -> Asked:
    """Each implementation that a CPU has."""
    library.load()  # it has to be there: nothing may pass because it is missing
    return Asked(request.param)
