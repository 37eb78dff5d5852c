"""From a source archive to an installed wheel: with a compiler, without one, and where a failed build is an error."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NO_COMPILER = {"CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def run(*command: str | Path, cwd: Path, native: str | None = None, **environment: str) -> subprocess.CompletedProcess:
    """Run with ``DDP_COMPILE_NATIVE`` as given, whatever it is here, and without this environment's search path."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("DDP_COMPILE_NATIVE", "PYTHONPATH")}
    if native is not None:
        environment["DDP_COMPILE_NATIVE"] = native
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env={**inherited, **environment}, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive, built from what git would commit, so that nothing built here gets in."""
    folder = tmp_path_factory.mktemp("sdist")
    tree = folder / "tree"
    files = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).stdout.split("\n")
    for name in files:
        source, target = ROOT / name, tree / name
        if not name or not (source.is_symlink() or source.exists()):
            continue  # deleted, and not yet committed
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            target.symlink_to(source.readlink())
        else:
            target.write_bytes(source.read_bytes())
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(folder)!r})"
    result = run(sys.executable, "-c", build, cwd=tree)
    assert result.returncode == 0, result.stderr
    (archive,) = folder.glob("*.tar.gz")
    return archive


def build_wheel(sdist: Path, folder: Path, native: str | None = None, **environment: str) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", folder)
    result = run(*pip, sdist, cwd=folder, native=native, **environment)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel


def status_when_installed(wheel: Path, folder: Path) -> dict[str, str]:
    """What `kernels.status()` says on a CPU in a new environment, which has only torch from this one."""
    environment = folder / "venv"
    venv.create(environment)
    python = environment / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).stdout.strip())
    # A path in a .pth file: the .pth files there, such as this project's own editable install, are not read.
    (site / "torch_from_elsewhere.pth").write_text(sysconfig.get_path("purelib") + "\n")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "import ddp_compile, torch\n"
        "from ddp_compile import kernels\n"
        f"assert ddp_compile.__file__.startswith({str(environment)!r}), ddp_compile.__file__\n"
        "flat = torch.empty(3)\n"
        "kernels.flatten_scale([torch.ones(2), torch.ones(1)], flat, 0.5)\n"
        "assert flat.tolist() == [0.5] * 3\n"
        "for row in kernels.status():\n"
        "    print(row.op, row.device_type, row.implementation, sep='\\t')\n"
    )
    result = run(python, "-c", code, cwd=folder)
    assert result.returncode == 0, result.stderr
    rows = [line.split("\t") for line in result.stdout.splitlines()]
    return {op: implementation for op, device_type, implementation in rows if device_type == "cpu"}


def test_with_a_compiler_the_wheel_holds_the_library_and_fits_every_python(sdist: Path, tmp_path: Path) -> None:
    # Without the loops for each instruction set, which take most of the compiler's time; the environment of these tests
    # has a build with them.
    wheel = build_wheel(sdist, tmp_path, native="1", CXXFLAGS="-DDDP_COMPILE_NO_INTRINSICS")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("ddp_compile/kernels/native/_core.") for name in names)
    assert any(name.startswith("ddp_compile/kernels/cuda/source/") for name in names)
    assert {name.split("/")[0] for name in names if not name.startswith("ddp_compile-")} == {"ddp_compile"}
    assert set(status_when_installed(wheel, tmp_path).values()) == {"native"}


def test_without_a_compiler_it_installs_and_torch_does_the_work(sdist: Path, tmp_path: Path) -> None:
    wheel = build_wheel(sdist, tmp_path, **NO_COMPILER)
    assert not any("_core" in name for name in zipfile.ZipFile(wheel).namelist())
    assert set(status_when_installed(wheel, tmp_path).values()) == {"reference"}


def test_a_failed_build_is_an_error_where_the_library_is_wanted(sdist: Path, tmp_path: Path) -> None:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", tmp_path)
    result = run(*pip, sdist, cwd=tmp_path, native="1", **NO_COMPILER)
    assert result.returncode != 0
    assert "/nonexistent/c" in result.stdout + result.stderr


def test_what_an_earlier_build_left_does_not_outlive_a_failed_one(sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (tree,) = tmp_path.iterdir()
    for native, command in ((None, "build_ext --inplace"), ("1", "build_ext --inplace"), ("0", "--version")):
        left_over = tree / "ddp_compile" / "kernels" / "native" / "_core.abi3.so"
        left_over.write_bytes(b"built from other sources")
        result = run(sys.executable, "setup.py", *command.split(), cwd=tree, native=native, **NO_COMPILER)
        assert (result.returncode == 0) == (native != "1"), result.stdout + result.stderr
        assert not left_over.exists()


def test_a_setting_that_means_nothing_is_refused(sdist: Path, tmp_path: Path) -> None:
    result = run(sys.executable, "setup.py", "--version", cwd=ROOT, native="yes")
    assert result.returncode != 0 and "DDP_COMPILE_NATIVE='yes' must be 1" in result.stderr
