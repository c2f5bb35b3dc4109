"""What the machine spends, and which of our processes does what."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import psutil

MIB = 2**20
OK_SHARE = 0.6
"""Of the CPU; above it emulated accelerators are late because the machine is, not because they are."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Shares of all cores of the machine."""

    machine: float
    """Everything that ran, ours or not."""
    ours: float
    """This process and all that it started; of those that ended meanwhile nothing is known."""
    client: float
    """This process: the load's client, and Ray's driver."""

    def told(self) -> str:
        """For the reader to judge by whether the emulation was disturbed."""
        verdict = "undisturbed" if self.machine < OK_SHARE else "DISTURBED: use a larger --time-scale"
        return (
            f"CPU: machine {self.machine:.0%}, of which ours {self.ours:.0%}, its client {self.client:.0%}: {verdict}"
        )


class Meter:
    """Measures from when it is made."""

    def __init__(self) -> None:
        self._since_s = time.monotonic()
        self._machine = psutil.cpu_times()
        self._processes = {process: _cpu_s(process) for process in _family()}

    def read(self) -> Usage:
        """Shares since then."""
        machine = psutil.cpu_times()
        total_s = max(1e-9, (time.monotonic() - self._since_s) * (psutil.cpu_count() or 1))
        idle_s = (machine.idle + machine.iowait) - (self._machine.idle + self._machine.iowait)
        spent_s = {each: max(0.0, _cpu_s(each) - self._processes.get(each, 0.0)) for each in _family()}
        return Usage(
            machine=max(0.0, 1 - idle_s / total_s),
            ours=sum(spent_s.values()) / total_s,
            client=spent_s[psutil.Process()] / total_s,
        )


def memory() -> tuple[int, float]:
    """Number of this process and all that it started, and their resident MiB, shared pages counted in each."""
    sizes = [_of(process, lambda each: int(each.memory_info().rss), 0) for process in _family()]
    return len(sizes), sum(sizes) / MIB


def replica_pids(app: str) -> dict[str, list[int]]:
    """Processes of this process's services, by deployment: Ray names every replica's process after it."""
    prefix = f"ray::ServeReplica:{app}:"
    found: dict[str, list[int]] = {}
    for process in psutil.Process().children(recursive=True):
        title = _of(process, lambda each: " ".join(each.cmdline()), "")
        if title.startswith(prefix):
            deployment = title.removeprefix(prefix).partition(".")[0].split()[0]
            found.setdefault(deployment, []).append(process.pid)
    return found


def _family() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    return _of(process, lambda each: float(sum(each.cpu_times()[:2])), 0.0)


def _of(process: psutil.Process, what: Callable[[psutil.Process], T], otherwise: T) -> T:
    """What a process says of itself; something else where it ended meanwhile."""
    try:
        return what(process)
    except psutil.Error:
        return otherwise
