"""Compiles the C++ of the pretend accelerator, once for its sources and this torch."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from filelock import FileLock

MODULE = "pretend_accelerator_C"
SOURCES = Path(__file__).parent / "csrc"
#: Which git ignores. What other sources or another torch made stays there until ``make clean``.
BUILDS = Path(__file__).parents[2] / "build" / "pretend_accelerator"

TORCH = Path(torch.__file__).parent
# Without optimization, since the compiler's time is most of what the tests cost.
FLAGS = ["-std=c++20", "-O0", "-g0", "-fPIC", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
INCLUDES = [SOURCES, TORCH / "include", TORCH / "include/torch/csrc/api/include", sysconfig.get_path("include")]
LIBRARIES = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]


def folder() -> Path:
    """The folder of the extension module, compiled if it is not there. Processes wait for one that compiles."""
    digest = hashlib.sha256(f"{torch.__version__} {sys.version} {FLAGS}".encode())
    for path in sorted(SOURCES.rglob("*.*")):
        digest.update(path.name.encode() + path.read_bytes())
    built = BUILDS / digest.hexdigest()[:16]
    library = built / f"{MODULE}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not library.exists():
        built.mkdir(parents=True, exist_ok=True)
        with FileLock(built / "lock"):
            if not library.exists():
                _compile(library)
    return built


def _compile(library: Path) -> None:
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        raise RuntimeError("the pretend accelerator needs a C++ compiler, c++ or g++")

    def object_of(source: Path) -> Path:
        to = library.with_name(f"{source.stem}.o")
        _run([compiler, *FLAGS, *(f"-I{path}" for path in INCLUDES), "-c", str(source), "-o", str(to)])
        return to

    # The largest first, so that two cores are done at about the same time.
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(max_workers=2) as pool:
        objects = [str(path) for path in pool.map(object_of, sources)]
    unfinished = library.with_suffix(".part")
    paths = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]
    _run([compiler, "-shared", *objects, "-o", str(unfinished), *paths, *LIBRARIES])
    unfinished.rename(library)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
