"""Memory of the machine that this process runs on."""

from __future__ import annotations

from pathlib import Path

import psutil

LIMIT = Path("/sys/fs/cgroup/memory.max")
USED = Path("/sys/fs/cgroup/memory.current")


def machine_memory(limit_file: Path = LIMIT, used_file: Path = USED) -> tuple[int, int]:
    """Returns total and free memory in bytes; in a container, within its limit."""
    memory = psutil.virtual_memory()
    limit, used = _number(limit_file), _number(used_file)
    if limit is None or used is None or limit >= memory.total:
        return memory.total, memory.available
    return limit, min(memory.available, max(0, limit - used))


def _number(path: Path) -> int | None:
    """Returns the number in a file; None if there is no file, or no limit in it."""
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
