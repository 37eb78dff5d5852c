"""Slow links between ranks: their rates, and that they leave nothing behind, however the process ends."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from harness_runs import namespaces_of
from in_ci import only

from ddp_compile.bench import link as link_module
from ddp_compile.bench.link import LinkError, NamespacedLink, remove_stale, unavailable_reason
from ddp_compile.validation.rates import Rate

pytestmark = pytest.mark.alone
ROOT = Path(__file__).parents[2]

RECEIVE = """
import socket
server = socket.create_server(("", 5000))
print("listening", flush=True)
connection, _ = server.accept()
buffer, received = bytearray(1 << 20), 0
while count := connection.recv_into(buffer):
    received += count
print(received)
"""

SEND = """
import socket, sys
connection = socket.create_connection((sys.argv[1], 5000))
for _ in range(int(sys.argv[2])):
    connection.sendall(bytes(1 << 20))
"""

HOLD = """
import time
from ddp_compile.bench.link import NamespacedLink
with NamespacedLink(2):
    print("held", flush=True)
    while True:
        time.sleep(0.05)
"""


@pytest.fixture
def leaves_nothing() -> Iterator[None]:
    """Skips without links; at the end, the namespaces are those of the beginning."""
    if (reason := unavailable_reason()) is not None:
        pytest.skip(reason)
    before = namespaces_of(os.getpid())
    yield
    assert namespaces_of(os.getpid()) == before


@contextlib.contextmanager
def running(command: list[str], *arguments: str) -> Iterator[subprocess.Popen[str]]:
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*command, sys.executable, "-c", *arguments], cwd=ROOT, text=True, **streams)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    if line not in map(str.rstrip, process.stdout):
        raise AssertionError(f"no line {line!r} from a process that said: {process.communicate()[1]}")


@pytest.mark.parametrize(
    ("text", "bits_per_second", "canonical"),
    [
        ("1gbit", 10**9, "1gbit"),
        ("10Gbit", 10**10, "10gbit"),
        ("0.5gbit", 500 * 10**6, "500mbit"),
        (" none ", None, "none"),
    ],
)
def test_a_rate_is_read_and_written(text: str, bits_per_second: int | None, canonical: str) -> None:
    rate = Rate.parse(text)
    assert rate == Rate(bits_per_second) == Rate.parse(canonical)
    assert str(rate) == canonical


@pytest.mark.parametrize("text", ["", "1", "gbit", "1 gbit", "-1gbit", "1e3mbit", "0.5mbit", "401gbit", "nan", "٣gbit"])
def test_a_bad_rate_is_named_with_what_is_accepted(text: str) -> None:
    with pytest.raises(ValueError) as caught:
        Rate.parse(text)
    for part in (f"rate={text!r}", "1mbit", "400gbit", "none"):
        assert part in str(caught.value)


def test_too_many_ranks() -> None:
    with pytest.raises(ValueError, match="world_size=255 must be between 1 and 254"):
        NamespacedLink(255)


@pytest.mark.parametrize(("user", "said"), [(1000, "root"), (0, "iproute2")])
def test_without_root_or_iproute2_the_reason_says_so(
    user: int, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert said in (unavailable_reason() or "")


def test_links_are_apart_from_each_other_and_from_the_machine(leaves_nothing: None) -> None:
    machine, before = os.listdir("/sys/class/net"), len(namespaces_of(os.getpid()))
    first = NamespacedLink(3)
    with pytest.raises(KeyError, match="mine"), first, NamespacedLink(1) as second:
        assert len(namespaces_of(os.getpid())) == before + 6  # one for each rank and one for each bridge
        assert {link.command_prefix(0)[-1] for link in (first, second)} <= set(namespaces_of(os.getpid()))
        assert os.listdir("/sys/class/net") == machine
        with pytest.raises(LinkError, match="entered already"):
            first.__enter__()
        raise KeyError("mine")  # deletes everything, and passes
    with first:
        assert first.sent_bytes(2) >= 0


def fail(run: Callable[..., str]) -> str:
    return run("ip", "link", "show", "dev", "missing0")


def interrupt(_: Callable[..., str]) -> str:
    raise KeyboardInterrupt


@pytest.mark.parametrize("last_that_works", only([6], [0, 1, 3, 6, 9, 15]))
@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        (fail, LinkError, r"ip link show dev missing0.*exit status.*does not exist"),
        (interrupt, KeyboardInterrupt, None),
    ],
)
def test_an_end_half_way_leaves_nothing(
    leaves_nothing: None,
    monkeypatch: pytest.MonkeyPatch,
    last_that_works: int,
    how: Callable[[Callable[..., str]], str],
    error: type[BaseException],
    said: str | None,
) -> None:
    run, left = link_module._run, [last_that_works]

    def end_once(*command: str) -> str:
        left[0] -= 1
        return how(run) if left[0] == -1 else run(*command)

    monkeypatch.setattr(link_module, "_run", end_once)
    with pytest.raises(error, match=said), NamespacedLink(2):
        pytest.fail("entered")
    assert left[0] < -1 or last_that_works == 0


@pytest.mark.long
def test_stale_namespaces_are_those_of_processes_that_are_gone(leaves_nothing: None) -> None:
    with running([], HOLD) as killed, running([], HOLD) as living:
        wait_for(killed, "held")
        wait_for(living, "held")
        theirs, kept = namespaces_of(killed.pid), namespaces_of(living.pid)
        assert remove_stale(pid_is_alive=lambda pid: True) == []
        os.kill(killed.pid, signal.SIGKILL)
        # Not waited for yet: its number is still taken, but it no longer runs.
        os.waitid(os.P_PID, killed.pid, os.WEXITED | os.WNOWAIT)
        assert namespaces_of(killed.pid) == theirs
        removed = remove_stale()
        assert sorted(name for name in removed if name.startswith(f"ddpbench-{killed.pid}-")) == theirs
        assert namespaces_of(killed.pid) == []
        assert namespaces_of(living.pid) == kept and len(kept) == 3
        living.send_signal(signal.SIGINT)
        living.communicate(timeout=30)


@pytest.mark.long
def test_shaping_changes_the_rate_of_open_connections(leaves_nothing: None) -> None:
    with NamespacedLink(2) as link, running(link.command_prefix(1), RECEIVE) as receiver:

        def sent_mbit() -> float:
            time.sleep(0.1)
            start, before = time.perf_counter(), link.sent_bytes(0)
            time.sleep(0.4)
            return (link.sent_bytes(0) - before) * 8e-6 / (time.perf_counter() - start)

        wait_for(receiver, "listening")
        link.shape(Rate(200 * 10**6))
        with running(link.command_prefix(0), SEND, link.address(1), "100000"):
            time.sleep(0.3)
            for mbit in (400, 100):
                link.shape(Rate(mbit * 10**6))
                # The closest, since others may be busy on the same cores; 95.6 % of what is sent is payload.
                shares = [sent_mbit() / mbit for _ in range(4)]
                assert min(abs(share - 0.956) for share in shares) < 0.1, shares
            link.shape(Rate(None))
            time.sleep(0.5)
            assert max(sent_mbit() for _ in range(3)) > 2000
