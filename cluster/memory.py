"""The memory of the machine on which this process runs."""

from __future__ import annotations

import re
from pathlib import Path

import psutil

CGROUP = Path("/sys/fs/cgroup")


def machine_memory(cgroup: Path = CGROUP) -> tuple[int, int]:
    """Returns total and available memory in bytes, within the container's limit if there is one.

    As on a machine without a limit, unused files in the kernel's cache count as available.
    """
    memory = psutil.virtual_memory()
    limit, used = _number(cgroup / "memory.max", r"^(\d+)$"), _number(cgroup / "memory.current", r"^(\d+)$")
    if limit is None or used is None or limit >= memory.total:
        return memory.total, memory.available
    cached = _number(cgroup / "memory.stat", r"^inactive_file (\d+)$") or 0
    return limit, min(memory.available, max(0, limit - used + cached))


def _number(path: Path, pattern: str) -> int | None:
    """Returns a number in a file; None if the file does not exist or has no such number (`max`: no limit)."""
    found = re.search(pattern, path.read_text(encoding="utf-8"), re.MULTILINE) if path.is_file() else None
    return int(found[1]) if found else None
