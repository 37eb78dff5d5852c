"""Compiles the C++ of the pretend accelerator, once for its sources and this torch."""

import hashlib
import shutil
import subprocess
import sys
import sysconfig
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

    # In one piece, since most of the compiler's time is reading torch's headers.
    everything = "".join(f'#include "{source.name}"\n' for source in sorted(SOURCES.glob("*.cpp")))
    unfinished = library.with_suffix(".part")
    paths = [f"-L{TORCH / 'lib'}", f"-Wl,-rpath,{TORCH / 'lib'}"]
    compiling = [compiler, *FLAGS, *(f"-I{path}" for path in INCLUDES), "-x", "c++", "-"]
    command = [*compiling, "-shared", "-o", str(unfinished), *paths, *LIBRARIES]
    done = subprocess.run(command, input=everything, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr}")
    unfinished.rename(library)
