"""What the machine spends: CPU shares, memory, and which of our processes does what."""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Shares of all cores of the machine."""

    machine: float
    """Everything that ran, ours or not: above about 0.6 emulated accelerators begin to be late."""
    ours: float
    """This process and all that it started; of those that ended meanwhile nothing is known."""
    client: float
    """This process: the load's client, and Ray's driver."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Resident memory of this process and all that it started, shared pages counted in each."""

    processes: int
    resident_bytes: int

    @property
    def resident_mib(self) -> float:
        return self.resident_bytes / MIB


def memory() -> Memory:
    """Now."""
    sizes = [_resident_bytes(process) for process in _family()]
    return Memory(processes=len(sizes), resident_bytes=sum(sizes))


def replica_pids(app: str) -> dict[str, list[int]]:
    """Processes of this process's services, by deployment: Ray names every replica's process after it."""
    prefix = f"ray::ServeReplica:{app}:"
    found: dict[str, list[int]] = {}
    for process in psutil.Process().children(recursive=True):
        title = _title(process)
        if title.startswith(prefix):
            deployment = title.removeprefix(prefix).partition(".")[0].split()[0]
            found.setdefault(deployment, []).append(process.pid)
    return found


def _family() -> list[psutil.Process]:
    me = psutil.Process()
    return [me, *me.children(recursive=True)]


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:  # it ended meanwhile
        return 0.0
    return float(times.user + times.system)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:  # it ended meanwhile
        return ""


def _resident_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:  # it ended meanwhile
        return 0
