"""What processors can do: bfloat16, and AMX tiles that a hypervisor hides."""

from __future__ import annotations

from collections.abc import MutableMapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
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
    if ISA not in environ:
        fields = first_processor(cpuinfo)
        level = fields.get("cpuid level", "")
        if "amx_tile" in fields.get("flags", "").split() and level.isdigit() and int(level) < TILE_LEAF:
            environ[ISA] = WITHOUT_TILES


def has_bfloat16() -> bool:
    """Whether products in bfloat16 are faster than in float32; false where it is unknown."""
    return bool(BFLOAT16 & set(first_processor().get("flags", "").split()))


def first_processor(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """Returns what Linux says of the first processor, by its words; nothing on other systems."""
    fields: dict[str, str] = {}
    if not cpuinfo.is_file():
        return fields
    with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:  # an empty line: the next processor, which is the same
                break
            fields[name.strip()] = value.strip()
    return fields
