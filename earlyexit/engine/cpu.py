"""Features of the processor: bfloat16, and AMX tiles whose size a hypervisor hides."""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
ISA = "ONEDNN_MAX_CPU_ISA"
WITHOUT_TILES = "AVX10_1_512"
"""The largest instruction set below AMX, in oneDNN's naming."""
TILE_LEAF = 0x1D
"""The CPUID leaf with the size of AMX tiles."""

BFLOAT16 = {"avx512_bf16": "AVX-512", "amx_bf16": "AMX", "bf16": "Arm"}
"""Flags of processors with instructions for bfloat16 products, and their names."""


def avoid_hidden_tiles(environ: MutableMapping[str, str], cpuinfo: Path = CPUINFO) -> None:
    """Sets an environment variable that disables AMX in oneDNN if the size of its tiles is hidden.

    Some hypervisors report AMX but hide the CPUID leaf with the size. oneDNN then assumes empty tiles, and the first
    bfloat16 product ends the process with SIGILL. Call this before oneDNN's first product, when it reads the variable.
    A variable that is already set is not changed.
    """
    if ISA not in environ:
        fields = first_processor(cpuinfo)
        level = fields.get("cpuid level", "")
        if "amx_tile" in fields.get("flags", "").split() and level.isdigit() and int(level) < TILE_LEAF:
            environ[ISA] = WITHOUT_TILES


def has_bfloat16() -> bool | None:
    """Whether the processor computes bfloat16 products faster than float32 products; None if unknown."""
    flags = processor_flags()
    return None if flags is None else bool(BFLOAT16.keys() & flags)


def processor_flags() -> frozenset[str] | None:
    """Returns the flags of the processor's features that oneDNN may use; None if unknown."""
    fields = first_processor()
    flags = fields.get("flags", fields.get("Features"))  # the latter on ARM
    hidden = {"amx_bf16"} if os.environ.get(ISA) == WITHOUT_TILES else set()
    return None if flags is None else frozenset(flags.split()) - hidden


def first_processor(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """Returns the fields of the first processor in Linux's cpuinfo; an empty dict on other systems."""
    fields: dict[str, str] = {}
    if not cpuinfo.is_file():
        return fields
    with cpuinfo.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:  # an empty line separates processors
                break
            fields[name.strip()] = value.strip()
    return fields
