"""Memory that is freed and needed again. Each setting runs in a separate process, since it cannot be undone."""

import os
import platform
import subprocess
import sys

import pytest

from ddp_compile.runtime import host_memory

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="sets the allocator of glibc")

# Frees 128 MiB in blocks of 1 MiB, taken as torch takes those of tensors, and takes them again, three times after one
# that does not count; before and after the call. To import torch itself takes seconds.
FAULTS = """
import ctypes, resource, runpy, sys

libc = ctypes.CDLL(None)

def step():
    blocks = [ctypes.c_void_p() for _ in range(128)]
    for block in blocks:
        assert libc.posix_memalign(ctypes.byref(block), ctypes.c_size_t(64), ctypes.c_size_t(2**20)) == 0
        libc.memset(block, 1, ctypes.c_size_t(2**20))
    for block in blocks:
        libc.free(block)

def num_faults():
    step()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        step()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(num_faults())
print(runpy.run_path(sys.argv[1])["keep_freed_memory"]())  # the file alone: to import all of the package takes seconds
print(num_faults())
"""


def run(**environment: str) -> list[str]:
    inherited = {name: value for name, value in os.environ.items() if "MALLOC" not in name and name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-c", FAULTS, host_memory.__file__]
    return subprocess.run(
        command, env=inherited | environment, check=True, capture_output=True, text=True
    ).stdout.split()


def test_freed_memory_is_kept() -> None:
    before, done, after = run()
    assert done == "True" and int(after) < 8192
    assert int(before) > 16384  # a page is 4 KiB


@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, marks=pytest.mark.long),
    ],
)
def test_allocator_set_by_the_environment(setting: dict[str, str]) -> None:
    _, done, after = run(**setting)
    assert done == "False" and int(after) > 16384
