"""Runs the PTX of the CUDA kernels on the CPU, and checks every access to memory.

PTX is what nvcc and NVRTC make of the sources before it becomes instructions of one GPU. The threads of a launch are
lanes of numpy arrays. Lanes at the same instruction run together, those that are furthest back first, so that they
meet again after a branch. An instruction that the kernels do not have is an error.

Source: Parallel Thread Execution ISA, version 9.0.
"""

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

BLOCK = 256
POISON = 0xA5  #: Bytes of registers and shared memory that nothing has written yet.

_BITS: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_TYPES: dict[str, np.dtype[Any]] = {
    **{f"{letter}{8 * size}": np.dtype(bits) for size, bits in _BITS.items() for letter in "bu"},
    **{f"s{8 * size}": np.dtype(f"i{size}") for size in _BITS},
    **{f"f{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "pred": np.dtype(bool),
}


class Instruction(NamedTuple):
    """``@!guard operation.modifiers.type operands``"""

    guard: str
    is_negated: bool
    operation: str
    modifiers: list[str]
    type: str
    operands: list[str]


class Kernel:
    """The code of a kernel, its labels, the bytes of its registers, and the ranges of variables in shared memory."""

    def __init__(self, name: str, parameter_bytes: int, body: str, shared: dict[str, tuple[int, int]]) -> None:
        self.name, self.parameter_bytes, self.shared = name, parameter_bytes, shared
        declared = re.findall(r"\.reg \.(\w+)\s+(%[a-z]+)", body)
        self.register_bytes = {prefix: _TYPES[kind].itemsize for kind, prefix in declared}
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        for line in map(str.strip, re.sub(r"//.*", "", body).splitlines()):
            if line.endswith(":"):
                self.labels[line[:-1]] = len(self.code)
            elif line not in ("", "{", "}") and not line.startswith("."):
                found = re.fullmatch(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*?);", line)
                assert found is not None, f"not understood: {line}"
                operation, *modifiers = found[3].split(".")
                operands = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+", found[4])
                kind = modifiers.pop() if modifiers else ""
                self.code.append(Instruction(found[2] or "", bool(found[1]), operation, modifiers, kind, operands))


def parse(text: str) -> dict[str, Kernel]:
    """All kernels by name. Variables in shared memory do not touch, so that none can be reached from another."""
    shared: dict[str, tuple[int, int]] = {}
    end = 0
    for alignment, kind, name, count in re.findall(r"\.shared \.align (\d+) \.(\w+) (\S+?)(?:\[(\d+)\])?;", text):
        begin = (end // 16 + 1) * 16
        assert begin % int(alignment) == 0
        shared[name] = begin, (end := begin + int(count or 1) * _TYPES[kind].itemsize)
    entries = re.findall(r"\.entry (\w+)\(\s*\.param[^\[]*\[(\d+)\]\s*\)[^{]*\{(.*?)\n\}", text, re.DOTALL)
    return {name: Kernel(name, int(size), body, shared) for name, size, body in entries}


class Memory:
    """The memory of this process, of which only some ranges may be accessed."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        self._begins, self._ends = np.array(sorted(ranges), np.uint64).T
        self._base = int(self._begins[0]) // 16 * 16
        length = -(-int(self._ends[-1]) // 16) * 16 - self._base
        interface = {"data": (self._base, False), "shape": (length,), "typestr": "|u1", "version": 3}
        self._data = np.asarray(type("Process", (), {"__array_interface__": interface})())

    def locate(self, address: np.ndarray, kind: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The memory as elements of a type, and where in it the ``count`` elements are that each lane accesses."""
        size = np.uint64(_TYPES[kind].itemsize)
        assert (address % (count * size) == 0).all(), f"an access to {count * size} bytes is misaligned"
        nearest = np.searchsorted(self._begins, address, side="right") - 1
        inside = (nearest >= 0) & (address + count * size <= self._ends[nearest])
        assert inside.all(), f"an access to {count * size} bytes is out of bounds"
        return self._data.view(_TYPES[kind]), (address - np.uint64(self._base)) // size


class Launch:
    """One launch of a kernel, in which all blocks run at the same time."""

    def __init__(self, kernel: Kernel, num_blocks: int, parameters: int, tensors: list[tuple[int, int]]) -> None:
        self._kernel, self._num_lanes = kernel, num_blocks * BLOCK
        self._lanes = np.arange(self._num_lanes)  # those that run
        stride = (max((end for _, end in kernel.shared.values()), default=0) // 16 + 1) * 16
        self._shared = np.full(num_blocks * stride, POISON, np.uint8)  # of each block
        self._bases = {"shared": self._shared.ctypes.data}  # since addresses there have 32 bits
        copies = range(self._bases["shared"], self._bases["shared"] + len(self._shared), stride)
        shared = [(first + begin, first + end) for first in copies for begin, end in kernel.shared.values()]
        self._memory = Memory([*tensors, *shared, (parameters, parameters + kernel.parameter_bytes)])
        block, thread = np.divmod(self._lanes.astype(np.uint64), np.uint64(BLOCK))
        self._registers = {
            **{"%tid.x": thread, "%ctaid.x": block},
            **{"%ntid.x": np.full_like(block, BLOCK), "%nctaid.x": np.full_like(block, num_blocks)},
            f"{kernel.name}_param_0": np.full_like(block, parameters),
            **{name: begin + block * stride for name, (begin, _) in kernel.shared.items()},
        }
        #: Accesses of lanes to global memory, by operation and bytes: "ld 16".
        self.accesses: Counter[str] = Counter()

    def run(self) -> None:
        """Run until all lanes have returned."""
        ready: dict[int, np.ndarray] = {0: self._lanes}  # the lanes at each instruction
        waiting: dict[int, np.ndarray] = {}
        while ready or waiting:
            if not ready:
                arrived = [np.bincount(lanes // BLOCK) for lanes in waiting.values()]
                assert all(set(counts) <= {0, BLOCK} for counts in arrived), "some threads of a block miss a barrier"
                ready, waiting = waiting, {}
            at = min(ready)
            self._lanes = lanes = ready.pop(at)
            code = self._kernel.code[at]
            if code.guard:
                chosen = self._get(code.guard, "pred") != code.is_negated
                _send(ready, at + 1, lanes[~chosen])
                self._lanes = lanes = lanes[chosen]
            if code.operation == "bra":
                _send(ready, self._kernel.labels[code.operands[0]], lanes)
            elif code.operation == "bar":
                _send(waiting, at + 1, lanes)
            elif code.operation != "ret" and len(lanes):
                self._execute(code)
                _send(ready, at + 1, lanes)

    def _get(self, operand: str, kind: str) -> np.ndarray:
        """The value of an operand in each lane that runs; one for all of them if it is a constant."""
        if operand in self._registers:
            values = self._registers[operand][self._lanes]
        else:
            number = int(operand[2:], 16) if operand[:2] in ("0f", "0d") else int(operand, 0)
            values = np.array(number % 2**64, np.uint64)
        return values.astype(_BITS[_TYPES[kind].itemsize], copy=False).view(_TYPES[kind])

    def _put(self, register: str, values: np.ndarray) -> None:
        """Write a register of the lanes that run. A narrower value is extended with zeros."""
        size = self._kernel.register_bytes[register.rstrip("0123456789")]
        if register not in self._registers:
            self._registers[register] = np.full(self._num_lanes * size, POISON, np.uint8).view(_BITS[size])
        assert values.itemsize <= size
        self._registers[register][self._lanes] = values.view(_BITS[values.itemsize])

    def _execute(self, code: Instruction) -> None:
        target, *operands = code.operands
        if code.operation in ("ld", "st"):
            self._access(code)
        elif code.operation == "cvt":
            self._put(target, _converted(code, [self._get(operand, code.type) for operand in operands]))
        elif target.startswith("{"):
            assert (code.operation, code.type) == ("mov", "b64")
            for shift, register in zip((0, 32), re.findall(r"%\w+", target), strict=True):
                self._put(register, (self._get(operands[0], "b64") >> np.uint64(shift)).astype(np.uint32))
        else:
            values = [self._get(operand, "pred" if operand.startswith("%p") else code.type) for operand in operands]
            if code.operation == "setp":
                (comparison,) = code.modifiers
                self._put(target, _compared(comparison, *values))
            else:
                letters, operation = _OPERATIONS[".".join([code.operation, *code.modifiers])]
                assert code.type[0] in letters, code
                self._put(target, operation(*values))

    def _access(self, code: Instruction) -> None:
        space, *modifiers = code.modifiers
        assert set(modifiers) <= {"cs", "v2", "v4"}
        where, what = code.operands if code.operation == "st" else code.operands[::-1]
        place = re.fullmatch(r"\[([%$\w]+)\+?(-?\d+)?\]", where)
        assert place is not None, where
        shift = int(place[2] or 0) + self._bases.get(space, 0)
        address = self._get(place[1], "u64") + np.uint64(shift % 2**64)
        registers = re.findall(r"[^\s{},]+", what)
        data, first = self._memory.locate(address, code.type, len(registers))
        for number, register in enumerate(registers):
            if code.operation == "ld":
                self._put(register, data[first + np.uint64(number)])
            else:
                data[first + np.uint64(number)] = self._get(register, code.type)
        if space == "global":
            self.accesses[f"{code.operation} {len(registers) * _TYPES[code.type].itemsize}"] += len(address)


def _send(queue: dict[int, np.ndarray], to: int, lanes: np.ndarray) -> None:
    if len(lanes):
        queue[to] = np.sort(np.concatenate([queue[to], lanes])) if to in queue else lanes


def _converted(code: Instruction, values: list[np.ndarray]) -> np.ndarray:
    *rounding, to = code.modifiers
    assert rounding in ([], ["rn"])
    if to.removesuffix("x2") in ("f16", "bf16"):
        bits = [_half_bits(to.removesuffix("x2"), value) for value in values]
        # Of two operands, the first goes into the high half.
        return bits[0] if len(bits) == 1 else bits[0].astype(np.uint32) << 16 | bits[1]
    assert to[0] == "f" or code.type[0] != "f", "integers are rounded in other ways"
    return values[0].astype(_TYPES[to])


def _half_bits(kind: str, values: np.ndarray) -> np.ndarray:
    """The bits of floats that are rounded to nearest even."""
    if kind == "f16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32)
    rounded = (bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _compared(comparison: str, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of floats, ``lt`` and the like are false if one is NaN; ``ltu`` and the like are true."""
    unordered = (a != a) | (b != b)
    if comparison in ("nan", "num"):
        return unordered == (comparison == "nan")
    result = {"eq": a == b, "ne": a != b, "lt": a < b, "le": a <= b, "gt": a > b, "ge": a >= b}[comparison[:2]]
    return result | unordered if comparison[2:] == "u" else result & ~unordered


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    assert all(((x == x.astype(np.float32)) | (x != x)).all() for x in (a, b)), "the product has to be exact"
    return a * b + c


# With the first letters of the types for which this is what the operation does.
_OPERATIONS: dict[str, tuple[str, Callable[..., np.ndarray]]] = {
    "mov": ("bufsp", np.copy),
    "cvta.to.global": ("u", np.copy),
    "selp": ("bufs", lambda a, b, condition: np.where(condition, a, b)),
    "and": ("bp", np.bitwise_and),
    "or": ("bp", np.bitwise_or),
    "not": ("b", np.bitwise_not),
    "shl": ("b", np.left_shift),
    "shr": ("us", np.right_shift),
    "add": ("us", np.add),
    "sub": ("us", np.subtract),
    "neg": ("s", np.negative),
    "mul.lo": ("us", np.multiply),
    "mul.wide": ("u", lambda a, b: a.astype(f"u{2 * a.itemsize}") * b),
    "div": ("u", np.floor_divide),
    "rem": ("u", np.remainder),
    "min": ("u", np.minimum),
    "max": ("u", np.maximum),
    "abs": ("f", np.abs),
    "add.rn": ("f", np.add),
    "sub.rn": ("f", np.subtract),
    "mul.rn": ("f", np.multiply),
    "div.rn": ("f", np.divide),
    "fma.rn": ("f", _fused),
    "min.NaN": ("f", np.minimum),  # which zero is the smaller one does not matter to the kernels
    "max.NaN": ("f", np.maximum),
}


class PtxDriver(TorchFunctionMode):
    """A `ddp_compile.kernels.cuda.driver.Driver` whose binaries are PTX.

    Kernels may access the tensors that torch makes while this is active as a context.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, torch.UntypedStorage] = {}  # kept, so that no address is used again
        self.accesses: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._storages[result.untyped_storage().data_ptr()] = result.untyped_storage()
        return result

    def load(self, binary: bytes) -> dict[str, Kernel]:
        return parse(binary.decode())

    def function(self, module: dict[str, Kernel], name: str) -> Kernel:
        return module[name]

    def launch(self, function: Kernel, num_blocks: int, num_threads: int, parameters: int, stream: int) -> None:
        assert num_threads == BLOCK
        arguments = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))[0] or 0
        tensors = [(begin, begin + storage.nbytes()) for begin, storage in self._storages.items() if storage.nbytes()]
        launch = Launch(function, num_blocks, arguments, tensors)
        with np.errstate(all="ignore"):
            launch.run()
        self.accesses += launch.accesses
