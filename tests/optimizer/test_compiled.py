from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from optimizer.compiled import compiled
from optimizer.decision import Decision, Planned
from optimizer.kernels import PARTS

ADD = """
from optimizer.compiled import compiled


@compiled
def add(one: int, other: int) -> int:
    return one + other
"""


def half(of: float) -> float:
    return of / 2


def test_a_kernel_computes_what_its_python_does() -> None:
    assert compiled(half)(3.0) == half(3.0) == 1.5


def test_machine_code_is_kept_between_processes(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(ADD, encoding="utf-8")
    kept = tmp_path / "kept"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "NUMBA_CACHE_DIR": str(kept)}
    count = "import kernel; assert kernel.add(2, 3) == 5; print(sum(kernel.add.stats.cache_hits.values()))"
    hits = [
        subprocess.run(
            [sys.executable, "-c", count], env=environment, capture_output=True, text=True, check=True
        ).stdout.strip()
        for _ in range(2)
    ]
    assert hits == ["0", "1"]


def test_where_nothing_can_be_kept_kernels_work_and_it_is_said_once() -> None:
    # A function without a file has no place to keep its code beside.
    make = "exec('def add(a, b):\\n    return a + b\\ndef take(a, b):\\n    return a - b')"
    code = f"from optimizer.compiled import compiled; {make}; assert compiled(add)(2, 3) + compiled(take)(3, 1) == 7"
    environment = os.environ | {"PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr.count("compiled anew in every process") == 1


@pytest.mark.parametrize("part", PARTS)
def test_what_is_planned_to_compile_the_planner_has_a_plan(part: Callable[[], list[Decision]]) -> None:
    # What is refused early leaves kernels out.
    decisions = part()
    assert decisions
    assert all(isinstance(each, Planned) for each in decisions)
