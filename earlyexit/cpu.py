"""What processors can, for mixed precision, and promises that oneDNN would believe, and die of; how busy they are."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
STAT = Path("/proc/stat")
WINDOW_S = 0.25
"""Over which processors are looked at: 25 of Linux's ticks for each."""
ISA = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX10_1_512"
"""The most that oneDNN knows below AMX."""
TILE_LEAF = 0x1D
"""Of CPUID: how large AMX's tiles are."""

BFLOAT16 = {"amx_bf16", "avx512_bf16"}
"""Flags of processors that multiply it."""


def avoid_hidden_tiles(environ: MutableMapping[str, str], cpuinfo: Path = CPUINFO) -> None:
    """Keep oneDNN from AMX where the virtual machine says that it is there, but not how large its tiles are.

    Some hypervisors do. oneDNN takes the tiles to be empty, and the first bfloat16 product ends the process by SIGILL.
    It reads the variable when it is first used: call this before. Who set the variable wants it so.
    """
    if ISA not in environ and cpuinfo.is_file() and hides_tiles(_first_processor(cpuinfo)):
        environ[ISA] = WITHOUT_TILES


def has_bfloat16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether products in bfloat16 are faster than in float32: false where nobody can say."""
    return cpuinfo.is_file() and bool(BFLOAT16 & set(_first_processor(cpuinfo).get("flags", "").split()))


def hides_tiles(fields: dict[str, str]) -> bool:
    """Whether a processor, as Linux describes it, has AMX and no CPUID leaf of its tiles."""
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


class Processors:
    """How busy the machine's processors are, with whatever, where the system tells; 0 where it does not (not Linux)."""

    def __init__(self, stat: Path = STAT) -> None:
        self._stat = stat
        self._share = 0.0
        self._since: tuple[float, int, int] | None = None
        """When it was looked at last, ticks that were spent since the start of the machine, and those in all."""

    def share(self, now_s: float) -> float:
        """Of all processors' time, over the last window that has ended."""
        if self._since is not None and now_s < self._since[0] + WINDOW_S:
            return self._share
        found = self._ticks()
        if found is None:
            return 0.0
        if self._since is not None and found[1] > self._since[2]:
            self._share = (found[0] - self._since[1]) / (found[1] - self._since[2])
        self._since = now_s, *found
        return self._share

    def _ticks(self) -> tuple[int, int] | None:
        """Spent, and in all: proc(5), whose fields 4 and 5 are idle and waiting; the two of guests are in others."""
        if not self._stat.is_file():
            return None
        with self._stat.open(encoding="ascii") as lines:
            ticks = [int(field) for field in lines.readline().split()[1:9]]
        return sum(ticks) - sum(ticks[3:5]), sum(ticks)
