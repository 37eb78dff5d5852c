"""Finds, loads and declares the compiled library, csrc/library.cpp."""

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch

from ddp_compile.errors import KernelUnavailableError
from ddp_compile.kernels.native.source_hash import source_hash

# The folders of the library and of its sources. Not every installation has them.
FOLDER = Path(__file__).parent
SOURCES = FOLDER / "csrc"

# Must equal ddp_compile_interface() of the library.
INTERFACE = 6

# Numbers of formats.h.
DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
# kOther, for tensors that are left to the reference.
OTHER_CODE = 255

# Numbers of Fit in tensor_table.h.
FITS, OTHER_LAYOUT, MISMATCH, PYTHON_ERROR, OUT_OF_MEMORY = range(5)

_HANDLE = ctypes.c_void_p
_INT = ctypes.c_int64
_INTS = ctypes.POINTER(ctypes.c_int64)

# Functions that read Python objects, and so need Python's lock: name, result, arguments.
_WITH_LOCK: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("table_new", _HANDLE, (_HANDLE, ctypes.py_object, _INTS)),
    ("table_free", None, (_HANDLE,)),
    ("table_read", _INT, (_HANDLE, _HANDLE, ctypes.py_object)),
)
_WITHOUT_LOCK: tuple[tuple[str, Any, tuple[Any, ...]], ...] = (
    ("interface", _INT, ()),
    ("source_hash", ctypes.c_char_p, ()),
    ("instruction_set", ctypes.c_char_p, ()),
    ("instruction_set_at", ctypes.c_char_p, (_INT,)),
    ("set_instruction_set", _INT, (ctypes.c_char_p,)),
    ("table_place_at", _INT, (_HANDLE, _INTS, _INT)),
    ("table_any_overlap", _INT, (_HANDLE,)),
    ("table_first_astray", _INT, (_HANDLE, ctypes.c_uint64, _INT, _INT)),
    ("table_sizes", _INTS, (_HANDLE, _INT, _INTS)),
    ("table_size", _INT, (_HANDLE,)),
    ("table_numels", _INTS, (_HANDLE,)),
    ("table_offsets", _INTS, (_HANDLE,)),
    ("table_addresses", _HANDLE, (_HANDLE,)),
    ("table_dtypes", ctypes.POINTER(ctypes.c_uint8), (_HANDLE,)),
    ("table_num_others", _INT, (_HANDLE,)),
    ("table_others", _INTS, (_HANDLE,)),
    ("copy", None, (_HANDLE, ctypes.c_void_p, _INT, _INT, ctypes.c_float, _INT)),
    ("average", None, (_INT, *[ctypes.c_void_p] * 3, _INT, ctypes.c_float, _INT)),
    ("add_rows", None, (_INT, ctypes.c_void_p, _INT, _INT, ctypes.c_float, ctypes.c_void_p, _INT)),
    ("minmax_u8_compress", None, (_INT, ctypes.c_void_p, *[_INT] * 5, ctypes.c_void_p, _INT)),
    ("minmax_u8_decompress", None, (_INT, ctypes.c_void_p, *[_INT] * 5, ctypes.c_void_p, _INT)),
)


class NativeLibrary:
    """The functions of csrc/library.cpp, unprefixed, and torch's exchange API; may raise a KernelUnavailableError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            libraries = (ctypes.PyDLL(str(path)), _WITH_LOCK), (ctypes.CDLL(str(path)), _WITHOUT_LOCK)
            for library, functions in libraries:
                for name, result, arguments in functions:
                    function = getattr(library, f"ddp_compile_{name}")
                    function.restype, function.argtypes = result, list(arguments)
                    setattr(self, name, function)
        except (OSError, AttributeError) as error:
            raise KernelUnavailableError(f"{path} cannot be used, install ddp_compile again: {error}") from error
        if self.interface() != INTERFACE:
            raise KernelUnavailableError(
                f"{path} has interface {self.interface()}, but {INTERFACE} is needed; install ddp_compile again"
            )
        if source_hash(SOURCES) not in ("", self.source_hash().decode()):
            raise KernelUnavailableError(
                f"{path} was built from other sources than those in {SOURCES}; build it again with pip install -e ."
            )
        self.exchange_api = _exchange_api()

    def __getattr__(self, name: str) -> Any:
        # For type checkers only: __init__ has set the functions.
        raise AttributeError(f"{self.path} has no function ddp_compile_{name}")


@functools.cache
def load() -> NativeLibrary:
    """The library beside this file; raises KernelUnavailableError if it was not built, or cannot be loaded."""
    found = sorted(path for pattern in ("_core*.so", "_core*.pyd") for path in FOLDER.glob(pattern))
    if not found:
        raise KernelUnavailableError(
            "the C++ library was not built: ddp_compile was installed without a C++ compiler, or its build failed;"
            " install it again with DDP_COMPILE_NATIVE=1 to see why"
        )
    return NativeLibrary(found[0])


def _exchange_api() -> int:
    """Address of the C functions for reading a torch.Tensor (DLPack 1.3)."""
    if (capsule := getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)) is None:
        raise KernelUnavailableError(f"torch {torch.__version__} has no DLPack exchange API")
    # Its own prototype, since the whole process shares ctypes.pythonapi.
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    get_pointer = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
    address = get_pointer(capsule, b"dlpack_exchange_api")
    major = ctypes.c_uint32.from_address(address).value
    if major != 1:
        raise KernelUnavailableError(f"torch {torch.__version__} has version {major} of the DLPack exchange API, not 1")
    return int(address)
