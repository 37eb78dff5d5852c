"""Fixtures of the tests of the kernels."""

import itertools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from cuda_emulation import EmulatedDevice
from filelock import FileLock
from kernel_values import INSTRUCTION_SETS, OTHER_BUILDS, using

from ddp_compile.kernels.native import library
from ddp_compile.kernels.native.library import NativeLibrary

# Its failed assertions show values too.
pytest.register_assert_rewrite("kernel_checks")

ROOT = Path(__file__).resolve().parents[2]


def build_natively(folder: Path, macro: str) -> subprocess.Popen[bytes]:
    command = ["setup.py", "-q", "build_ext", "--build-lib", str(folder), "--build-temp", f"{folder}_objects"]
    environment = {**os.environ, "DDP_COMPILE_NATIVE": "1", "CXXFLAGS": f"-D{macro}"}
    return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=environment)


@pytest.fixture(scope="session")
def other_builds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, NativeLibrary]:
    """The C++ library as it is built for other processors and by other compilers, built here with the same flags."""
    compiler = (os.environ.get("CXX") or sysconfig.get_config_var("CXX") or "c++").split()[0]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed, so what other compilers build cannot be built here")
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # every worker's, and the first one builds for all
    folders = {name: root / macro.lower() for name, (macro, _) in OTHER_BUILDS.items()}
    with FileLock(root / "other_builds.lock"):
        missing = [name for name, folder in folders.items() if not any(folder.rglob("_core*"))]
        processes = [build_natively(folders[name], OTHER_BUILDS[name][0]) for name in missing]
        assert [process.wait() for process in processes] == [0] * len(missing)
    libraries = {name: NativeLibrary(*folder.rglob("_core*")) for name, folder in folders.items()}
    # The macros have to have reached the compiler.
    assert {name: instruction_sets(built) for name, built in libraries.items()} == {
        name: [instruction_set] for name, (_, instruction_set) in OTHER_BUILDS.items()
    }
    return libraries


def instruction_sets(core: NativeLibrary) -> list[str]:
    """Those that both the library and this processor support. The first is the default."""
    return [name.decode() for name in itertools.takewhile(bool, map(core.instruction_set_at, itertools.count()))]


@pytest.fixture(params=[*INSTRUCTION_SETS, *(pytest.param(build, marks=pytest.mark.long) for build in OTHER_BUILDS)])
def loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Selects the loops of each instruction set of this processor, and those of other builds; gives their name."""
    core = library.load()  # it has to be there: nothing may pass because it is missing
    if request.param in OTHER_BUILDS:
        built = request.getfixturevalue("other_builds")[request.param]
        monkeypatch.setattr(library, "load", lambda: built)
    elif request.param in instruction_sets(core):
        assert core.set_instruction_set(request.param.encode())
    else:
        pytest.skip(f"this processor does not have {request.param}")
    yield library.load().instruction_set().decode()
    core.set_instruction_set(instruction_sets(core)[0].encode())


@pytest.fixture(scope="session")
def emulated_device(tmp_path_factory: pytest.TempPathFactory) -> EmulatedDevice:
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent  # every worker's
    (root / "emulated_device").mkdir(exist_ok=True)
    return EmulatedDevice(root / "emulated_device")


@pytest.fixture(params=["native", "reference", "cuda"])
def implementation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each implementation; that for CUDA on an emulated device."""
    device = request.getfixturevalue("emulated_device") if request.param == "cuda" else None
    with using(request.param, device):
        yield request.param
