"""Transfers on a simulated link, which take time on the host or on a stream of a CUDA device.

Note [Spinning on a GPU]
A transfer on a CUDA device is one warp of one multiprocessor that spins on a side stream. That is far less than NCCL,
which uses a block for each of its channels. The spin counts cycles of the GPU's clock. If the GPU gets hot or draws too
much power, it lowers the clock, and transfers take longer than modeled, for all implementations alike.
"""

from __future__ import annotations

import queue
import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor
from torch.futures import Future

_CALIBRATION_CYCLES = 50_000_000  # about 25 ms at 2 GHz
# An idle GPU raises its clock slowly (345 MHz to 1980 MHz on an H200), so the first rounds do not count.
_LEAST_CALIBRATIONS, _MOST_CALIBRATIONS = 8, 40
_CALIBRATION_TOLERANCE = 0.02


class Transfer(NamedTuple):
    """One transfer on the link."""

    tensors: list[Tensor]  #: each element is multiplied by ``factor`` at the end
    factor: int
    seconds: float  #: how long it occupies the link
    source: Tensor | None = None  #: copied into the first tensor before the product, if given

    def apply(self) -> None:
        """Write the result in place, unseen by autograd, as with collectives: ``data`` has its own version counter."""
        if self.source is not None:
            self.tensors[0].data.copy_(self.source)
        for tensor in self.tensors:
            if self.factor != 1 and tensor.dtype is not torch.bool:  # a sum of bools is their disjunction
                tensor.data.mul_(self.factor)


class HostLink:
    """Transfers on the host's clock, completed in turn by one thread that sleeps in between.

    The thread writes the result at the deadline, just before it completes the future. So code that forgets to wait does
    not see the result, and no write comes after ``wait`` has returned. The write adds to the modeled time, but does not
    delay later deadlines.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._transfers: queue.SimpleQueue[tuple[float, Transfer, Future[list[Tensor]]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._complete_in_turn, name="simulated_link", daemon=True)
        self._thread.start()

    def launch(self, transfer: Transfer) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future()
        with self._lock:
            self._free_at_s = max(time.perf_counter(), self._free_at_s) + transfer.seconds
            self._transfers.put((self._free_at_s, transfer, future))
        return future

    def close(self) -> None:
        self._transfers.put(None)
        self._thread.join()

    def _complete_in_turn(self) -> None:
        for deadline_s, transfer, future in iter(self._transfers.get, None):
            time.sleep(max(0.0, deadline_s - time.perf_counter()))
            try:
                transfer.apply()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # raised again in wait()
            else:
                future.set_result(transfer.tensors)
            del transfer, future  # the tensors may be freed while this thread waits for the next ones


class CudaLink:
    """Transfers on a side stream of one CUDA device; see Note [Spinning on a GPU].

    The side stream writes the tensors after the caller's current stream. Its high priority lets the spin's block start
    before blocks of the computation that still wait for a multiprocessor.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self._cycles_per_second = _measure_cycles_per_second(self._stream)

    def launch(self, transfer: Transfer) -> Future[list[Tensor]]:
        future: Future[list[Tensor]] = Future(devices=[self._device])
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            _spin(round(transfer.seconds * self._cycles_per_second))
            transfer.apply()
            for tensor in transfer.tensors if transfer.source is None else [*transfer.tensors, transfer.source]:
                # If it is freed early, its memory is not reused before the side stream is done with it.
                tensor.record_stream(self._stream)
            # Records an event on the current stream, this one; waits for the future wait for this event.
            future.set_result(transfer.tensors)
        return future

    def close(self) -> None:
        self._stream.synchronize()


def _spin(cycles: int) -> None:
    """Occupy the current stream for this many cycles of the GPU's clock, with one warp."""
    # Private: torch has no public kernel that only takes time. The name is the same in torch 2.11 and 2.13.
    torch.cuda._sleep(cycles)


def _measure_cycles_per_second(stream: torch.cuda.Stream) -> float:
    """Time the spin with events until the GPU's clock has settled."""
    rates: list[float] = []
    for _ in range(_MOST_CALIBRATIONS):
        with torch.cuda.stream(stream):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            # The GPU is busy with the first spin until the host has enqueued the rest.
            _spin(_CALIBRATION_CYCLES // 10)
            start.record()
            _spin(_CALIBRATION_CYCLES)
            end.record()
        end.synchronize()
        rates.append(_CALIBRATION_CYCLES / (start.elapsed_time(end) / 1000))
        if len(rates) >= _LEAST_CALIBRATIONS and abs(rates[-1] / rates[-2] - 1) < _CALIBRATION_TOLERANCE:
            return rates[-1]
    raise RuntimeError(
        f"the clock of {stream.device} did not settle within {_CALIBRATION_TOLERANCE:.0%}: the last of {len(rates)}"
        f" measurements gave {rates[-2]:.4g} and {rates[-1]:.4g} cycles per second; is the device in use?"
    )
