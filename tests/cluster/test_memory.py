from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from cluster.memory import machine_memory

MIB = 1 << 20


def test_a_containers_limit_is_all_it_has(tmp_path: Path) -> None:
    limit, used = tmp_path / "max", tmp_path / "current"
    limit.write_text(f"{64 * MIB}\n")
    used.write_text(f"{40 * MIB}\n")
    assert machine_memory(limit, used) == (64 * MIB, 24 * MIB)
    used.write_text(f"{65 * MIB}\n")
    assert machine_memory(limit, used) == (64 * MIB, 0)


@pytest.mark.parametrize("limit", ["max", str(1 << 60), None], ids=["none", "more than there is", "no container"])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str | None) -> None:
    if limit is not None:
        (tmp_path / "max").write_text(limit)
        (tmp_path / "current").write_text("1")
    total, free = machine_memory(tmp_path / "max", tmp_path / "current")
    assert total == psutil.virtual_memory().total
    assert 0 < free <= total
