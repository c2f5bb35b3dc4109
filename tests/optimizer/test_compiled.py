from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from inspect import getclosurevars
from pathlib import Path
from re import MULTILINE, search
from typing import Any

import numpy as np
import pytest

from optimizer.problems.problem import Link, MaximizeRate, MinimizeCost, MinimizeLatency, Objective, PlanProblem
from optimizer.search.decision import Planned
from optimizer.search.kernels import ALL_AT_SCALE, AT_SCALE, EXACT, small_problem
from optimizer.search.planner import solve
from optimizer.search.space import SPACES, Space

ADD = """
from optimizer.search.compiled import compiled


@compiled
def add(one: int, other: int) -> int:
    return one + other
"""


def test_machine_code_is_kept_between_processes(tmp_path: Path) -> None:
    (tmp_path / "kernel.py").write_text(ADD, encoding="utf-8")
    kept = tmp_path / "kept"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}", "NUMBA_CACHE_DIR": str(kept)}
    count = "import kernel; assert kernel.add(2, 3) == 5; print(sum(kernel.add.stats.cache_hits.values()))"
    run = [sys.executable, "-c", count]
    hits = [subprocess.check_output(run, env=environment, text=True).strip() for _ in range(2)]
    assert hits == ["0", "1"]


def test_without_a_writable_cache_kernels_work_with_a_warning() -> None:
    # The code of a function without a file cannot be cached.
    make = "exec('def add(a, b):\\n    return a + b\\ndef take(a, b):\\n    return a - b')"
    use = "assert compiled(add)(2, 3) + compiled(take)(3, 1) == 7"
    code = f"from optimizer.search.compiled import compiled; {make}; {use}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.count("compiled anew in every process") == 1


@pytest.mark.parametrize(("problem", "space"), [*AT_SCALE, *EXACT])
def test_the_problems_that_compile_the_kernels_have_plans(problem: PlanProblem, space: Space) -> None:
    # A problem that is refused early would not run all kernels.
    assert isinstance(solve(problem, space), Planned)


def kernels() -> set[Any]:
    modules = [module for name, module in sys.modules.items() if name.startswith("optimizer.")]
    return {value for module in modules for value in vars(module).values() if hasattr(value, "nopython_signatures")}


def signatures() -> dict[str, int]:
    """Returns, per kernel, the number of argument types for which it was compiled or loaded."""
    return {f"{each.__module__}.{each.__name__}": len(each.nopython_signatures) for each in kernels()}


def test_kernels_take_numbers_only_from_files_that_hold_kernels() -> None:
    """Cached machine code is compiled again when one of these files changes."""
    texts = [path.read_text(encoding="utf-8") for path in Path("optimizer").rglob("*.py")]
    assigned = "".join(text for text in texts if "optimizer.search.compiled import" in text)
    for kernel in kernels():
        for name, value in getclosurevars(kernel.py_func).globals.items():
            is_ours = isinstance(value, int | float) or getattr(value, "__module__", "").startswith("optimizer.")
            assert not is_ours or search(rf"^(.*, )?{name}\b.* = |^(def|class) {name}\b", assigned, MULTILINE), name


def in_another_form(problem: PlanProblem) -> PlanProblem:
    supplies = {name: replace(each, usd_per_hour=int(each.usd_per_hour)) for name, each in problem.devices.items()}
    link = Link(bandwidth_bytes_per_s=int(problem.link.bandwidth_bytes_per_s), delay_s=0)
    tables = {}
    for name, table in problem.latency.items():
        block_s_NB, ramp_s_EB = np.asfortranarray(table.block_s_NB), table.ramp_s_EB.copy()
        ramp_s_EB.setflags(write=False)
        tables[name] = replace(table, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)
    objective = problem.objective
    if not isinstance(objective, MaximizeRate):
        objective = replace(objective, rate_per_s=int(objective.rate_per_s))
    return replace(
        problem,
        devices=supplies,
        link=link,
        latency=tables,
        bytes_per_sample_N=tuple(map(int, problem.bytes_per_sample_N)),
        objective=objective,
        budget_usd_per_hour=None if problem.budget_usd_per_hour is None else int(problem.budget_usd_per_hour),
    )


@pytest.mark.parametrize(
    "objective", [MaximizeRate(), MinimizeCost(rate_per_s=4000.0), MinimizeLatency(rate_per_s=1000.0)], ids=str
)
def test_equal_problems_in_another_form_do_not_compile_kernels_again(objective: Objective) -> None:
    asked = replace(small_problem(), budget_usd_per_hour=20.0, objective=objective)
    for space in (SPACES["best"], ALL_AT_SCALE):
        solve(asked, space)
        before = signatures()
        solve(in_another_form(asked), space)
        assert signatures() == before
