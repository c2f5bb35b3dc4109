"""The memory of the machine on which this process runs."""

from __future__ import annotations

from pathlib import Path

import psutil

LIMIT = Path("/sys/fs/cgroup/memory.max")
USED = Path("/sys/fs/cgroup/memory.current")


def machine_memory(limit_file: Path = LIMIT, used_file: Path = USED) -> tuple[int, int]:
    """Returns total and available memory in bytes, within the container's limit if there is one."""
    memory = psutil.virtual_memory()
    limit, used = _number(limit_file), _number(used_file)
    if limit is None or used is None or limit >= memory.total:
        return memory.total, memory.available
    return limit, min(memory.available, max(0, limit - used))


def _number(path: Path) -> int | None:
    """Returns the number in a file; None if the file does not exist or has no number (`max` stands for no limit)."""
    text = path.read_text(encoding="utf-8").strip() if path.is_file() else ""
    return int(text) if text.isdigit() else None
