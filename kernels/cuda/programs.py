"""The units of compilation: instances of the templates in source/, and the kernels in each.

A program is compiled when one of its kernels is first needed. That takes a few tenths of a second. All programs would
take ten times as long, but a job needs only one to three.
"""

import functools
from pathlib import Path
from typing import NamedTuple

import torch

from ddp_compile.kernels.native.library import DTYPE_CODES

SOURCE_FOLDER = Path(__file__).parent / "source"

# The names in source/device.cuh.
FORMAT_OF = {torch.float32: "Float32", torch.bfloat16: "BFloat16", torch.float16: "Float16"}
FORMATS = {code: FORMAT_OF[dtype] for dtype, code in DTYPE_CODES.items()}

# Numbers of tensors in one launch, since longer arguments take longer to launch. The first is for small buckets, the
# second fills the 4 KiB of arguments that every CUDA version takes, and the third fills the 32764 bytes of CUDA 12.1
# and newer.
PACK_SIZES = (32, 168, 1360)


class Program(NamedTuple):
    """One unit of compilation."""

    name: str  #: for messages
    header: str  #: the file in source/ that has the templates
    instances: tuple[str, ...]  #: macros of that file, with their arguments
    kernels: tuple[str, ...]  #: names of the kernels that they define

    def text(self) -> str:
        """The source, which includes `header`."""
        lines = [f'#include "{self.header}"', "namespace ddp_compile {", *self.instances, "}  // namespace ddp_compile"]
        return "\n".join(lines) + "\n"


@functools.cache
def headers() -> dict[str, str]:
    """All files of source/ by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in sorted(SOURCE_FOLDER.glob("*.cuh"))}


def move_kernel(source: str, destination: str, pack_size: int) -> str:
    """The kernel between tensors and flat buffer for two of ``FORMATS`` and one of ``PACK_SIZES``."""
    return f"move_{source}_{destination}_{pack_size}"


# A kernel with the largest arguments, of the program that most jobs need.
LARGEST_KERNEL = move_kernel("Float32", "Float32", PACK_SIZES[-1])


def _move_program(source: str, destination: str) -> Program:
    return Program(
        f"move {source} to {destination}",
        "move.cuh",
        tuple(f"DDP_COMPILE_MOVE({source}, {destination}, {size})" for size in PACK_SIZES),
        tuple(move_kernel(source, destination, size) for size in PACK_SIZES),
    )


def _codec_program(name: str) -> Program:
    kernels = tuple(f"{kernel}_{name}" for kernel in ("find_minmax", "write_codes", "read_codes", "add_codes"))
    return Program(f"codec of {name}", "codec.cuh", (f"DDP_COMPILE_CODEC({name})",), kernels)


def _average_program(name: str) -> Program:
    return Program(f"average of {name}", "average.cuh", (f"DDP_COMPILE_AVERAGE({name})",), (f"average_{name}",))


def _add_rows_program(name: str) -> Program:
    return Program(f"sum of rows of {name}", "sum.cuh", (f"DDP_COMPILE_ADD_ROWS({name})",), (f"add_rows_{name}",))


PROGRAMS: tuple[Program, ...] = (
    *(_move_program(source, destination) for source in FORMATS.values() for destination in FORMATS.values()),
    *(_codec_program(name) for name in FORMATS.values()),
    *(_average_program(name) for name in FORMATS.values()),
    *(_add_rows_program(name) for name in FORMATS.values()),
)

PROGRAM_OF = {kernel: program for program in PROGRAMS for kernel in program.kernels}
