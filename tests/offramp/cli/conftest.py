from __future__ import annotations

from pathlib import Path

import pytest

from tests.offramp.cli.runs import PLAN, PROBLEM, written


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    """A problem file with one device."""
    return written(tmp_path / "problem.yaml", PROBLEM)


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    return written(tmp_path / "plan.yaml", PLAN)
