"""torchft's managers, servers and process groups: a replica is killed and comes back, and the other one trains on.

tests/features/test_managed_replicas.py tests the rest, with a manager of its own.
"""

import itertools
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from process_copies import context_of_copies
from torchft_replicas import Start, Step, loss_of, make_net, make_optimizer, run_rank, steps_in

pytestmark = [pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed"), pytest.mark.long]
TIMEOUT_S = 60.0


class Replicas:
    """Replicas whose ranks this process starts and kills, and the lighthouse that they ask."""

    def __init__(self, folder: Path, num_ranks: int, settings: dict[str, bool]) -> None:
        from torchft.coordination import LighthouseServer

        self.num_ranks, self.settings = num_ranks, settings
        self._folder = folder
        self._lighthouse = LighthouseServer(
            bind="[::]:0", min_replicas=1, join_timeout_ms=5000, quorum_tick_ms=50, heartbeat_timeout_ms=1000
        )
        self._address = f"http://localhost:{self._lighthouse.address().rpartition(':')[2]}"
        self._processes: dict[tuple[int, int], Any] = {}  # by replica and rank

    def start(self, replica: int, life: int) -> None:
        for rank in range(self.num_ranks):
            start = Start(replica, life, rank, self.num_ranks, self._address, self._folder, self.settings)
            process = context_of_copies().Process(target=run_rank, args=(sys.path, start))
            process.start()
            self._processes[replica, rank] = process

    def begin(self) -> None:
        """Let those that were started begin to train together."""
        _wait_until(lambda: len(list(self._folder.glob("ready_*"))) == len(self._processes))
        (self._folder / "go").touch()

    def kill(self, replica: int) -> None:
        """By SIGKILL: first the last rank, then the others, as torchrun does when one has ended."""
        for rank in reversed(range(self.num_ranks)):
            self._processes[replica, rank].kill()
            self._processes[replica, rank].join()

    def exit_codes(self, replica: int) -> list[int | None]:
        processes = [self._processes[replica, rank] for rank in range(self.num_ranks)]
        for process in processes:
            process.join(TIMEOUT_S)
        return [process.exitcode for process in processes]

    def steps(self, replica: int, life: int, rank: int = 0) -> list[Step]:
        return steps_in(self._folder / f"steps_{replica}_{life}_{rank}")

    def wait_for(self, num: int, replica: int, life: int, num_participants: int) -> None:
        """Until a replica has committed so many steps of so many replicas."""
        _wait_until(lambda: sum(s.num_participants == num_participants for s in self.steps(replica, life)) >= num)

    def stop_soon(self) -> list[list[int | None]]:
        """Let all ranks of both replicas end after the same step; returns their exit codes."""
        (self._folder / "stop_").write_text(str(self.steps(0, 0)[-1].number + 40))
        (self._folder / "stop_").rename(self._folder / "stop")  # never empty
        return [self.exit_codes(replica) for replica in (0, 1)]

    def close(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.join()
        self._lighthouse.shutdown()


def _wait_until(holds: Callable[[], bool]) -> None:
    begin = time.monotonic()
    while not holds():
        assert time.monotonic() < begin + TIMEOUT_S
        time.sleep(0.05)


WAYS = {
    "quorum before forward": (1, {"use_async_quorum": False, "init_sync": True}),
    "quorum beside forward": (1, {"use_async_quorum": True, "init_sync": True}),
    "two ranks": (2, {"use_async_quorum": False, "init_sync": False}),
    "two ranks, quorum beside forward": (2, {"use_async_quorum": True, "init_sync": False}),
}


@pytest.fixture(params=WAYS.values(), ids=WAYS.keys())
def replicas(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Replicas]:
    started = Replicas(tmp_path, *request.param)
    yield started
    started.close()


def gradients_of(net: torch.nn.Module, replica: int, num_ranks: int, step: int) -> list[Any]:
    """Of a replica alone."""
    net.zero_grad()
    torch.stack([loss_of(net, replica, rank, step) for rank in range(num_ranks)]).mean().backward()
    return [parameter.grad for parameter in net.parameters()]


def senders_of(step: Step, of_other: Step | None) -> list[int]:
    """The replicas whose gradients are in a step of replica 0, which alone always takes part."""
    if step.num_participants == 1:
        return [0]
    return [replica for replica, record in enumerate((step, of_other or step)) if record.takes_part]


def assert_equal(ours: Step, theirs: Step) -> None:
    for one, other in zip(ours.gradients + ours.parameters, theirs.gradients + theirs.parameters, strict=True):
        assert torch.equal(one, other), ours.number


def test_a_replica_is_killed_and_comes_back(replicas: Replicas) -> None:
    replicas.start(0, life=0)
    replicas.start(1, life=0)
    replicas.begin()
    replicas.wait_for(5, 1, 0, num_participants=2)
    replicas.kill(1)
    replicas.wait_for(5, 0, 0, num_participants=1)
    replicas.start(1, life=1)
    replicas.wait_for(5, 1, 1, num_participants=2)
    assert replicas.stop_soon() == [[0] * replicas.num_ranks] * 2

    steps, of_other = replicas.steps(0, 0), {}
    for life, rank in itertools.product((0, 1), range(replicas.num_ranks)):
        of_other |= {step.number: step for step in replicas.steps(1, life, rank)}
        for step in replicas.steps(1, life, rank):
            assert_equal(steps[step.number], step)
    for step, of_same in zip(steps, replicas.steps(0, 0, replicas.num_ranks - 1), strict=True):
        assert_equal(step, of_same)
    assert [step.number for step in steps] == list(range(len(steps))) and steps[-1].number in of_other
    assert_like_one_process(steps, of_other, replicas)


def assert_like_one_process(steps: list[Step], of_other: dict[int, Step], replicas: Replicas) -> None:
    """All gradients of replica 0 are those that one process computes from the batches of those that took part."""
    senders = {step.number: senders_of(step, of_other.get(step.number)) for step in steps}

    def mean(net: torch.nn.Module, step: Step) -> list[Any]:
        of_each = [gradients_of(net, replica, replicas.num_ranks, step.number) for replica in senders[step.number]]
        return [sum(each) / step.num_participants for each in zip(*of_each, strict=True)]

    net = make_net(seed=0)
    optimizer = make_optimizer(net)
    for step in steps:
        means = mean(net, step)
        for parameter, ours, expected in zip(net.parameters(), step.gradients, means, strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-4, atol=1e-6)
            parameter.grad = expected
        optimizer.step()
    # With an asynchronous quorum and init_sync, torchft counts replicas that only receive parameters in step 0.
    is_off = [step.number for step in steps if len(senders[step.number]) != step.num_participants]
    assert is_off == ([0] if replicas.settings == {"use_async_quorum": True, "init_sync": True} else [])
