"""Slow links between ranks on one machine: a network namespace for each rank, one bridge, and a rate held by tc."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ddp_compile.validation.rates import Rate

# Note [Numbers of the shaper]
# Payload as a share of the rate; Python sender and receiver, 16 to 256 MB, two cores of an EPYC, Linux 6.18:
#   burst, above the largest packet   100 mbit   1 gbit   2 gbit   4 gbit   4 gbit, both ways (the slower)
#              what is sent in   0 us   96.1 %   94.6 %   92.4 %   87.3 %   85.3 %
#                               50 us   96.1 %   95.7 %   95.7 %   94.1 %   92.4 %
#                              100 us   96.1 %   95.7 %   95.7 %   95.7 %   93.7 %
#                              500 us        -   95.8 %   95.7 %   95.7 %   93.5 %
#
# Headers count, as on a wire: 1448 of 1514 bytes are payload with an MTU of 1500, so 95.6 % is all there is (and the
# burst on top). The MTU is what most Ethernet has; 9000 gave 99 % and changed nothing else.
# Burst: TCP hands over packets of up to 64 KiB (GSO), 68130 bytes with the headers of their 45 segments. With a smaller
# burst the kernel cuts them up, on the cores that are measured: 16 KiB took twice the processor time at 4 gbit. The
# timer that wakes the shaper is some 50 us late, and what would not fit the burst meanwhile is lost, hence 100 us more.
# No more than that, because it passes unshaped on an idle link: at 1 gbit, 82 kB, which arrive 0.7 ms too early.
# Limit: a full queue drops packets, and the wait for retransmissions is not that of a slow link. TCP itself bounds its
# queue: 16 connections of one rank queued at most 0.4 MB at 100 mbit and 3.4 MB at 4 gbit, and nothing was dropped.
_LARGEST_PACKET_BYTES = 70_000
_TIMER_LATENESS_US = 100
_LEAST_QUEUE_BYTES = 8 * 1024 * 1024  # and 10 ms at least
_MTU_BYTES = 1500
# Set explicitly, whatever the machine's default is. With BBR, which probes and paces itself, each direction reached 74
# to 95 % of the rate from run to run when both were busy. Cubic, the kernel's own default, reached 93 to 96 %.
_CONGESTION_CONTROL = "cubic"
_NAME = re.compile(r"ddpbench-(?P<pid>\d+)-\d+-(hub|rank\d+)")
_SUBNET = "10.77.0"
_counter = itertools.count()


class LinkError(RuntimeError):
    """A command that makes, shapes or deletes a link failed."""


def unavailable_reason() -> str | None:
    """Why this machine cannot have a `NamespacedLink`; None if one could be made and deleted."""
    if sys.platform != "linux":
        return f"links between network namespaces need Linux, and this is {sys.platform}"
    if os.geteuid() != 0:
        return f"making network namespaces needs root, and the effective uid is {os.geteuid()}"
    try:
        with NamespacedLink(1) as link:
            link.shape(Rate(10**9))
    except LinkError as error:
        return str(error)
    return None


class NamespacedLink:
    """A network namespace for each of 1 to 254 ranks, all on one bridge, which has its own namespace.

    Each rank has one address, on `interface`, and a loopback. Nothing appears among the machine's own interfaces. Only
    sending is shaped, so several ranks that send to one at the same time can exceed its rate.

    Leaving the context removes the network from processes that still use it. `remove_stale` deletes the namespaces of
    processes that ended without leaving it.

    Raises:
        ValueError: The world size, or the rank given to a method, is outside its limits.
        LinkError: From any method: the command that failed and its output.
    """

    interface: str = "bench0"

    def __init__(self, world_size: int) -> None:
        if not 1 <= world_size <= 254:
            raise ValueError(f"world_size={world_size} must be between 1 and 254, the addresses of one /24")
        self._world_size = world_size
        self._prefix: str | None = None

    def __enter__(self) -> NamespacedLink:
        if self._prefix is not None:
            raise LinkError("this link has been entered already; make a second NamespacedLink")
        try:
            self._make()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            self._delete()
        except LinkError as failure:
            if error is None:
                raise
            error.add_note(f"and the link was not deleted: {failure}")
        except BaseException:  # an interrupt, in the middle of it
            self._delete()
            raise

    def address(self, rank: int) -> str:
        """The rank's IPv4 address. It is the same in every link, since links cannot reach each other."""
        self._check_rank(rank)
        return f"{_SUBNET}.{rank + 1}"

    def command_prefix(self, rank: int) -> list[str]:
        """The words before a command that make it run on this rank's side of the link."""
        return ["ip", "netns", "exec", self._namespace(rank)]

    def shape(self, rate: Rate) -> None:
        """Make every rank send at this rate from now on, on open connections too."""
        discipline = ["noqueue"]
        if rate.bits_per_second is not None:
            bytes_per_second = rate.bits_per_second // 8
            # See Note [Numbers of the shaper].
            burst_bytes = _LARGEST_PACKET_BYTES + bytes_per_second * _TIMER_LATENESS_US // 10**6
            limit_bytes = max(_LEAST_QUEUE_BYTES, bytes_per_second // 100)
            tokens = ["rate", f"{rate.bits_per_second}bit", "burst", f"{burst_bytes}b"]
            discipline = ["tbf", *tokens, "limit", f"{limit_bytes}b"]
        for rank in range(self._world_size):
            _run("tc", "-n", self._namespace(rank), "qdisc", "replace", "dev", self.interface, "root", *discipline)

    def sent_bytes(self, rank: int) -> int:
        """Bytes that the rank's interface has sent: payload, and one header for up to 64 KiB of it."""
        shown = _run("ip", "-n", self._namespace(rank), "-j", "-s", "link", "show", "dev", self.interface)
        return int(json.loads(shown)[0]["stats64"]["tx"]["bytes"])

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self._world_size:
            raise ValueError(f"rank={rank} must be between 0 and {self._world_size - 1} on this link")

    def _namespace(self, rank: int) -> str:
        self._check_rank(rank)
        if self._prefix is None:
            raise LinkError("this link has no namespaces now; use it inside its with statement")
        return f"{self._prefix}rank{rank}"

    def _make(self) -> None:
        self._prefix = _unused_prefix()
        hub, mtu = f"{self._prefix}hub", str(_MTU_BYTES)
        _make_namespace(hub)
        _run("ip", "-n", hub, "link", "add", "name", "bridge0", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "dev", "bridge0", "up")
        for rank in range(self._world_size):
            namespace, address, port = self._namespace(rank), self.address(rank), f"port{rank}"
            _make_namespace(namespace)
            # Made in place, so that no name ever appears among the machine's own interfaces.
            peer = ["peer", "name", self.interface, "mtu", mtu, "netns", namespace]
            _run("ip", "-n", hub, "link", "add", "name", port, "mtu", mtu, "type", "veth", *peer)
            _run("ip", "-n", hub, "link", "set", "dev", port, "master", "bridge0", "up")
            _run("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", self.interface)
            _run("ip", "-n", namespace, "link", "set", "dev", self.interface, "up")
            # The kernel's own route, with a congestion control.
            route = [f"{_SUBNET}.0/24", "dev", self.interface, "proto", "kernel", "scope", "link", "src", address]
            _run("ip", "-n", namespace, "route", "replace", *route, "congctl", _CONGESTION_CONTROL)

    def _delete(self) -> None:
        if self._prefix is not None:
            _delete_namespaces([name for name in _namespaces() if name.startswith(self._prefix)])
            self._prefix = None


def _is_alive(pid: int) -> bool:
    """Whether the process runs. A zombie does not."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def remove_stale(pid_is_alive: Callable[[int], bool] = _is_alive) -> list[str]:
    """Delete the namespaces, and the bridges in them, of processes that were killed; returns the names."""
    ours = [found for name in _namespaces() if (found := _NAME.fullmatch(name))]
    return _delete_namespaces([found[0] for found in ours if not pid_is_alive(int(found["pid"]))])


def _unused_prefix() -> str:
    existing = _namespaces()
    # A killed process may have had this pid and left its namespaces: pids are reused.
    prefixes = (f"ddpbench-{os.getpid()}-{number}-" for number in _counter)
    return next(prefix for prefix in prefixes if not any(name.startswith(prefix) for name in existing))


def _namespaces() -> list[str]:
    # Lines read "name" or "name (id: 0)".
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line.strip()]


def _make_namespace(name: str) -> None:
    _run("ip", "netns", "add", name)
    _run("ip", "-n", name, "link", "set", "dev", "lo", "up")


def _delete_namespaces(names: Sequence[str]) -> list[str]:
    """Delete as many as possible, then raise for the others."""
    deleted, failures = [], []
    for name in names:
        try:
            _run("ip", "netns", "delete", name)
            deleted.append(name)
        except LinkError as failure:
            failures.append(failure)
    if failures and set(names).difference(deleted).intersection(_namespaces()):
        raise LinkError("; ".join(map(str, failures)))
    return deleted


def _run(*command: str) -> str:
    """The standard output of a command."""
    shown = shlex.join(command)
    try:
        # Ctrl-C goes to the terminal's whole process group, but a command that cleans up must survive it.
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, start_new_session=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LinkError(f"could not run `{shown}`: {error}. Links need iproute2") from error
    if done.returncode != 0:
        raise LinkError(
            f"`{shown}` failed with exit status {done.returncode}: {done.stderr.strip()}."
            " Links need root, and a kernel with network namespaces, veth, bridge and sch_tbf"
        )
    return done.stdout
