"""What processors can do: bfloat16, AMX tiles that a hypervisor hides, and how long threads wait for them."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path
from threading import get_ident

CPUINFO = Path("/proc/cpuinfo")
SCHEDSTAT = Path("/proc/thread-self/schedstat")
WINDOW_S = 0.25
"""The window over which waiting is measured: a few batches."""
ISA = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX10_1_512"
"""The most that oneDNN knows below AMX."""
TILE_LEAF = 0x1D
"""Of CPUID: how large AMX's tiles are."""

BFLOAT16 = {"amx_bf16", "avx512_bf16"}
"""Flags of processors that multiply it."""


def avoid_hidden_tiles(environ: MutableMapping[str, str], cpuinfo: Path = CPUINFO) -> None:
    """Keep oneDNN from AMX where the virtual machine reports AMX, but not the size of its tiles.

    Some hypervisors do so. oneDNN then takes the tiles to be empty, and the first bfloat16 product ends the process by
    SIGILL. oneDNN reads the variable at its first use, so call this before. A variable that is set stays as it is.
    """
    if ISA not in environ and cpuinfo.is_file() and hides_tiles(_first_processor(cpuinfo)):
        environ[ISA] = WITHOUT_TILES


def has_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether products in bfloat16 are faster than in float32; false where it is unknown."""
    return cpuinfo.is_file() and bool(BFLOAT16 & set(_first_processor(cpuinfo).get("flags", "").split()))


def hides_tiles(fields: dict[str, str]) -> bool:
    """Whether a processor, as Linux describes it, has AMX without the CPUID leaf of its tiles."""
    level = fields.get("cpuid level", "")
    return "amx_tile" in fields.get("flags", "").split() and level.isdigit() and int(level) < TILE_LEAF


def _first_processor(cpuinfo: Path) -> dict[str, str]:
    fields = {}
    with cpuinfo.open(encoding="utf-8") as lines:
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:  # an empty line: the next processor, which is the same
                break
            fields[name.strip()] = value.strip()
    return fields


class Contention:
    """The share of the time in which a thread wanted a processor that it waited for one; 0 where it is unknown.

    A thread with a processor of its own never waits. Work of Linux's SCHED_IDLE makes no thread wait, though it keeps
    processors busy.
    """

    def __init__(self, schedstat: Path = SCHEDSTAT) -> None:
        self._schedstat = schedstat
        self._share = 0.0
        self._since: dict[int, tuple[float, int, int]] = {}
        """By thread: when it asked last, and the nanoseconds that it had run and waited until then."""

    def share(self, now_s: float) -> float:
        """Returns the share over the last window that has ended, of the calling thread."""
        thread = get_ident()
        since = self._since.get(thread)
        if since is not None and now_s < since[0] + WINDOW_S:
            return self._share
        found = self._nanoseconds()
        if found is None:
            return 0.0
        if since is not None and (wanted := sum(found) - since[1] - since[2]) > 0:
            self._share = (found[1] - since[2]) / wanted
        self._since[thread] = now_s, *found
        return self._share

    def _nanoseconds(self) -> tuple[int, int] | None:
        """Returns the time run and the time waited (Linux, Documentation/scheduler/sched-stats.rst)."""
        try:
            ran, waited = self._schedstat.read_text(encoding="ascii").split()[:2]
        except OSError:  # not Linux, or no file descriptor is left: the device's thread goes on without the figure
            return None
        return int(ran), int(waited)
