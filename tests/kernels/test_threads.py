"""The C++ library on several threads: the same bits, and not more threads than are useful or available."""

import os
import resource
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from kernel_values import DTYPES, same_bits, using
from process_copies import run_in_copy
from torch import Tensor

from ddp_compile import kernels

# kMinElementsPerThread in native/csrc/library.cpp.
MIN_ELEMENTS_PER_THREAD = 1 << 19


SetThreads = Callable[[int], None]


@pytest.fixture
def set_threads() -> Iterator[SetThreads]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def new_outs(values: Tensor, num_chunks: int) -> list[Tensor]:
    """Memory for the results of `everything`."""
    rows = torch.full_like(kernels.minmax_u8_compress(values, num_chunks), 7)
    return [rows, *(torch.full_like(values, 7.0) for _ in range(4))]


def everything(values: Tensor, num_chunks: int, outs: list[Tensor]) -> None:
    """Run each kernel on the same values."""
    (rows, out, flat, x, total), numel = outs, values.numel()
    rows.copy_(kernels.minmax_u8_compress(values, num_chunks))
    kernels.minmax_u8_decompress(rows, out)
    kernels.minmax_u8_decompress(rows, out, accumulate=True)
    kernels.flatten_scale([values[:5], values[5:]], flat, 1 / 3)
    kernels.average_into(x.fill_(1), flat, out, 3)
    kernels.add_rows(values[: numel // 2 * 2].view(2, -1), total[: numel // 2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 7, 1001])
def test_bits_do_not_depend_on_threads(set_threads: SetThreads, dtype: torch.dtype, num_chunks: int) -> None:
    numel = 3 * MIN_ELEMENTS_PER_THREAD + 4321
    values = torch.randn(numel, generator=torch.Generator().manual_seed(num_chunks)).to(dtype)
    # The extremes of a chunk that several threads share may be in the part of any of them.
    values[[numel // 2 - 1, numel - 1]] *= 100
    set_threads(1)
    expected = new_outs(values, num_chunks)
    everything(values, num_chunks, expected)
    with using("reference"):
        assert torch.equal(expected[0], kernels.minmax_u8_compress(values, num_chunks))
    for num_threads in (2, 3):
        set_threads(num_threads)
        found = new_outs(values, num_chunks)
        everything(values, num_chunks, found)
        assert torch.equal(found[0], expected[0])
        assert all(same_bits(a, b) for a, b in zip(found[1:], expected[1:], strict=True))


def most_threads_during(work: Callable[[], object], expected: int) -> int:
    """How many threads ``work`` has at one time, as far as is seen; looks again while they are fewer than expected."""

    def number() -> int:
        return len(os.listdir("/proc/self/task"))

    most = 0
    for _ in range(20):
        start = threading.Event()
        worker = threading.Thread(target=lambda start=start: start.wait() and work())
        worker.start()
        before = number()
        start.set()
        while worker.is_alive():
            most = max(most, 1 + number() - before)
        worker.join()
        if most >= expected:
            break
    return most


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
@pytest.mark.parametrize("op", ["compress", "decompress", "average_into", "flatten"])
def test_number_of_threads(set_threads: SetThreads, op: str) -> None:
    def calls(numel: int, times: int) -> Callable[[], None]:
        values = torch.rand(numel)
        rows, other = kernels.minmax_u8_compress(values), torch.ones(numel)
        call = {
            "compress": lambda: kernels.minmax_u8_compress(values, 3),
            "decompress": lambda: kernels.minmax_u8_decompress(rows, other),
            "average_into": lambda: kernels.average_into(other, values, values, 2),
            "flatten": lambda: kernels.flatten_scale([values], other, 0.5),
        }[op]
        return lambda: [call() for _ in range(times)] and None

    set_threads(3)
    large, small = calls(20 * MIN_ELEMENTS_PER_THREAD, 2), calls(2 * MIN_ELEMENTS_PER_THREAD - 1, 20)
    assert most_threads_during(large, expected=3) == 3
    assert most_threads_during(small, expected=1) == 1
    set_threads(1)
    assert most_threads_during(large, expected=1) == 1


def check_without_threads() -> None:
    """Run by the test below in a separate process, in which no thread has left a stack that another could reuse."""
    values = torch.rand(3 * MIN_ELEMENTS_PER_THREAD)
    expected, outs = new_outs(values, 2), new_outs(values, 2)
    everything(values, 2, expected)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    # Too little for the stack of a thread.
    resource.setrlimit(resource.RLIMIT_AS, (used + (6 << 20), resource.RLIM_INFINITY))
    with pytest.raises(RuntimeError, match="can't start new thread"):
        threading.Thread(target=int).start()
    # Only for our kernels, since torch's own operations end the process if they cannot start a thread.
    torch.get_num_threads = lambda: 3
    everything(values, 2, outs)
    assert all(torch.equal(a, b) for a, b in zip(outs, expected, strict=True))


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_without_threads() -> None:
    ended = run_in_copy(check_without_threads)
    assert ended.exit_code == 0, ended.stderr
