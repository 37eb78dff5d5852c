"""Records on a device with streams, whose events have times that are known later."""

import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from plans import gradients, plan_in_frames

from ddp_compile import torch_internals
from ddp_compile.runtime.comm import streams
from ddp_compile.runtime.comm.step_records import StepRecords

PLAN = plan_in_frames(gradients(100))
CPU = torch.device("cpu")


class SlowDevice(streams.Backend):
    """The device passes one event for each ms, counted from the first one; the host says how many it has passed."""

    def __init__(self) -> None:
        super().__init__()
        self.num_recorded = self.num_passed = self.num_waits = 0

    def has_streams(self, device: torch.device) -> bool:
        return True

    def new(self, device: torch.device) -> str:
        return "side stream"

    def on(self, stream: Any) -> Any:
        return nullcontext()

    def record_timed(self, device: torch.device) -> int:
        self.num_recorded += 1
        return self.num_recorded

    def has_passed(self, event: int, wait: bool) -> bool:
        if wait and self.num_passed < event:
            self.num_waits += 1
            self.num_passed = event
        return event <= self.num_passed

    def elapsed_ns(self, since: int, until: int) -> int:
        assert max(since, until) <= self.num_passed, "torch raises"
        return (until - since) * 1_000_000


class Work(dist.Work):
    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: Any = None) -> bool:
        self.num_waits += 1
        return True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SlowDevice:
    device = SlowDevice()
    monkeypatch.setattr(streams, "backend", device)
    return device


def run_step(records: StepRecords, plan: Any, work: object) -> None:
    records.iteration_begins(0)
    records.forward_begins()
    records.backward_begins()
    records.bucket_is_ready(0)
    transfer = records.launch_begins("reduce", 0, 400)
    records.launch_ends(transfer, work)
    records.wait_ends(records.wait_begins("reduce", 0))
    records.gradients_are_handed_over()
    records.iteration_ends(plan)


def records_of(blocks_host: bool) -> StepRecords:
    return StepRecords(CPU, 1, 1, None, 8, blocks_host, lambda: None)


def test_host_does_not_wait_for_events(device: SlowDevice) -> None:
    records, work = records_of(blocks_host=False), Work()
    assert device.num_waits == 1  # for the origin of the clock
    run_step(records, PLAN, work)
    assert not records.steps and work.num_waits == 1
    device.num_passed = device.num_recorded
    run_step(records, PLAN, work)
    assert [step.number for step in records.steps] == [1] and device.num_waits == 1
    assert [step.number for step in records.read_all()] == [1, 2] and device.num_waits == 3  # and for its drift
    for step in records.steps:
        (transfer,) = step.transfers
        times = [step.began, step.backward_began, transfer.ready, transfer.launched, transfer.launch_returned]
        times += [*transfer.done, transfer.waited_from, transfer.waited_until, step.ended]
        assert [round((at - times[0]) / 1e6) for at in times] == list(range(9))  # one event each, a ms apart
    assert abs(records.steps[0].began - time.monotonic_ns()) < 60e9


def test_device_with_a_fast_clock(device: SlowDevice) -> None:
    """Ten milliseconds a step on the device, and hardly any on the host."""
    records = records_of(blocks_host=False)
    for _ in range(1000):
        run_step(records, PLAN, Work())
    last = records.read_all()[-1]
    assert last.ended - time.monotonic_ns() > 5e9
    assert abs(last.ended - last.ahead_ns - time.monotonic_ns()) < 1e9


@pytest.mark.parametrize(("value", "blocks"), [(None, False), ("0", False), ("1", True), ("true", True)])
def test_nccl_that_blocks_the_host(
    device: SlowDevice, monkeypatch: pytest.MonkeyPatch, value: str | None, blocks: bool
) -> None:
    monkeypatch.setattr(torch_internals, "backend_name", lambda group, device: "nccl")
    monkeypatch.setenv("NCCL_BLOCKING_WAIT", "0")  # which the other name goes before
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    if value is not None:
        monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", value)
    group: Any = None
    assert streams.work_blocks_host(group, CPU) == blocks


def test_end_of_a_transfer_that_its_stream_has_not_come_to(device: SlowDevice) -> None:
    """The event of its end is on another stream than that of the step, which has waited for the transfer too."""
    records, begin = records_of(blocks_host=False), device.num_recorded
    late, has_passed = begin + 6, device.has_passed  # after began, backward_began, ready, launched, launch_returned
    device.has_passed = lambda event, wait: has_passed(event, wait) and event != late  # type: ignore[method-assign]
    run_step(records, PLAN, Work())
    ((step,), (transfer,)) = (records.read_all(), records.steps[0].transfers)
    assert transfer.done == [transfer.waited_until] and transfer.waited_until < step.ended


def test_waits_that_block_the_host(device: SlowDevice) -> None:
    records, work = records_of(blocks_host=True), Work()
    run_step(records, PLAN, work)
    assert work.num_waits == 0 and records.read_all()[0].transfers[0].done == []


@pytest.mark.parametrize("is_complete", [True, False])
def test_future_of_a_device_hook(device: SlowDevice, is_complete: bool) -> None:
    records, future = records_of(blocks_host=False), torch.futures.Future()
    if is_complete:
        future.set_result(None)
    run_step(records, PLAN, SimpleNamespace(works=[future]))
    (transfer,) = records.read_all()[0].transfers
    assert (transfer.done != []) == is_complete
    assert not is_complete or transfer.launch_returned < transfer.done[0] < transfer.waited_from


def test_callback_after_the_wait() -> None:
    records, future = records_of(blocks_host=True), torch.futures.Future()
    records.iteration_begins(0)
    records.forward_begins()
    transfer = records.launch_begins("reduce", 0, 400)
    records.launch_ends(transfer, SimpleNamespace(works=[future]))
    records.wait_ends(records.wait_begins("reduce", 0))
    future.set_result(None)
    assert len(transfer.done) == 1 and transfer.done[0] > transfer.waited_until
    records.gradients_are_handed_over()
    records.iteration_ends(PLAN)
    assert records.steps[0].transfers[0].done == [transfer.waited_until]
