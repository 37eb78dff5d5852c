"""torchft's managers, servers and process groups: a replica is killed and comes back, and the other one trains on.

tests/multiproc/test_managed_replicas.py tests the rest, with a manager of its own.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from process_copies import context_of_copies
from torchft_replicas import Step, loss_of, make_net, make_optimizer, run_replica, steps_in

pytestmark = [
    pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed"),
    pytest.mark.long,
]
TIMEOUT_S = 60.0


class Replicas:
    """Replicas that this process starts and kills, and the lighthouse that they ask."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        from torchft.coordination import LighthouseServer

        self._folder, self._settings = folder, settings
        self._lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
        )
        self._address = f"http://localhost:{self._lighthouse.address().rpartition(':')[2]}"
        self._processes: dict[int, Any] = {}

    def start(self, replica: int, life: int, bucket_cap_mb: float = 0.0005) -> None:
        args = (sys.path, replica, life, self._address, self._folder, self._settings, bucket_cap_mb)
        self._processes[replica] = context_of_copies().Process(target=run_replica, args=args)
        self._processes[replica].start()

    def begin(self) -> None:
        """Let those that were started begin to train together."""
        deadline = time.monotonic() + TIMEOUT_S
        while len(list(self._folder.glob("ready_*"))) < len(self._processes):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (self._folder / "go").touch()

    def kill(self, replica: int) -> None:
        """By SIGKILL."""
        self._processes[replica].kill()
        self._processes[replica].join()

    def steps(self, replica: int, life: int) -> list[Step]:
        return steps_in(self._folder / f"replica_{replica}_{life}")

    def error(self, replica: int, life: int) -> str:
        """The traceback of a replica that has raised."""
        return (self._folder / f"error_{replica}_{life}").read_text()

    def wait_for(self, num: int, replica: int, life: int, kind: Callable[[Step], bool]) -> None:
        """Until a replica has committed so many steps of this kind."""
        begin = time.monotonic()
        while sum(map(kind, self.steps(replica, life))) < num:
            assert time.monotonic() < begin + TIMEOUT_S, self.steps(replica, life)[-3:]
            time.sleep(0.05)

    def stop_after(self, step: int) -> dict[int, int]:
        """Let all of them end after the same step; returns their exit codes."""
        (self._folder / "stop_").write_text(str(step))
        (self._folder / "stop_").rename(self._folder / "stop")  # never empty
        for process in self._processes.values():
            process.join(TIMEOUT_S)
        return {replica: process.exitcode for replica, process in self._processes.items()}

    def exit_code(self, replica: int) -> int | None:
        self._processes[replica].join(TIMEOUT_S)
        return self._processes[replica].exitcode

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        self._lighthouse.shutdown()


@pytest.fixture(params=[False, True], ids=["quorum_before_forward", "quorum_beside_forward"])
def replicas(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replicas]:
    started = Replicas(tmp_path, {"use_async_quorum": request.param})
    yield started
    started.close()


def are_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def gradients_of(net: torch.nn.Module, replica: int, step: int) -> list[Any]:
    net.zero_grad()
    loss_of(net, replica, step).backward()
    return [parameter.grad for parameter in net.parameters()]


def senders_of(step: Step, of_other: Step | None) -> list[int]:
    """The replicas whose gradients are in a step of replica 0, which alone always takes part."""
    if step.num_participants == 1:
        return [0]
    return [replica for replica, record in enumerate((step, of_other or step)) if record.takes_part]


def test_a_replica_is_killed_and_comes_back(replicas: Replicas, request: pytest.FixtureRequest) -> None:
    replicas.start(0, life=0)
    replicas.start(1, life=0)
    replicas.begin()
    replicas.wait_for(5, 1, 0, lambda step: step.num_participants == 2)
    replicas.kill(1)
    replicas.wait_for(5, 0, 0, lambda step: step.num_participants == 1)
    replicas.start(1, life=1)
    replicas.wait_for(5, 1, 1, lambda step: step.num_participants == 2)
    last = replicas.steps(0, 0)[-1].number + 40
    assert replicas.stop_after(last) == {0: 0, 1: 0}

    steps, of_other = replicas.steps(0, 0), {step.number: step for life in (0, 1) for step in replicas.steps(1, life)}
    assert [step.number for step in steps] == list(range(last)) and last - 1 in of_other
    for step in steps:
        if (theirs := of_other.get(step.number)) is not None:
            assert are_equal(step.gradients, theirs.gradients) and are_equal(step.parameters, theirs.parameters)

    # The same in one process. Either replica may have been the one whose parameters the other got in step 0.
    senders = {step.number: senders_of(step, of_other.get(step.number)) for step in steps}
    net = min(
        (make_net(seed) for seed in (0, 10)),
        key=lambda net: float(
            (sum(gradients_of(net, replica, 0)[0] for replica in senders[0]) / 2 - steps[0].gradients[0]).norm()
        ),
    )
    optimizer = make_optimizer(net)
    for step in steps:
        of_senders = [gradients_of(net, replica, step.number) for replica in senders[step.number]]
        net.zero_grad()
        for parameter, ours, *theirs in zip(net.parameters(), step.gradients, *of_senders, strict=True):
            parameter.grad = sum(theirs) / step.num_participants
            torch.testing.assert_close(ours, parameter.grad, rtol=1e-4, atol=1e-6)
        optimizer.step()
    # In step 0 torchft counts replicas that only receive parameters if the quorum runs beside the forward.
    is_off = [step.number for step in steps if len(senders[step.number]) != step.num_participants]
    assert is_off == ([0] if request.node.callspec.id == "quorum_beside_forward" else [])


def test_a_replica_with_other_buckets_ends_and_the_others_go_on(replicas: Replicas) -> None:
    replicas.start(0, life=0)
    replicas.begin()
    replicas.wait_for(3, 0, 0, lambda step: step.num_participants == 1)
    replicas.start(1, life=0, bucket_cap_mb=25.0)
    assert replicas.exit_code(1) == 1
    assert "ReductionError: rank 0: the replicas differ: bucket plan " in replicas.error(1, 0)
    before = len(replicas.steps(0, 0))
    replicas.wait_for(before + 5, 0, 0, lambda step: step.num_participants == 1)
    assert replicas.steps(1, 0) == []
    replicas.start(1, life=1)
    replicas.wait_for(3, 1, 1, lambda step: step.num_participants == 2)
    assert replicas.stop_after(replicas.steps(0, 0)[-1].number + 40) == {0: 0, 1: 0}
