"""The code has a size budget: `[tool.offramp.size-budget]` in pyproject.toml limits the Python lines per folder."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROW = "{:<14}{:>8}{:>8}{:>+8}"


def lines_of(folder: Path) -> int:
    return sum(len(path.read_text(encoding="utf-8").splitlines()) for path in folder.rglob("*.py"))


def test_every_folder_of_sources_has_a_budget_and_no_more_lines() -> None:
    budgets = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["offramp"]["size-budget"]
    lines = {name: lines_of(ROOT / name) for name in budgets}
    table = "\n".join(ROW.format(name, lines[name], most, lines[name] - most) for name, most in budgets.items())
    print(f"\n{'folder':<14}{'lines':>8}{'budget':>8}{'over':>8}\n{table}")  # noqa: T201 # shown by -s and in failures
    above = [name for name, most in budgets.items() if lines[name] > most]
    assert not above, f"more lines than budgeted in {', '.join(above)}: remove some, or raise the budget and say why"
    folders = {path.relative_to(ROOT).parts[0] for path in ROOT.glob("[a-z]*/**/*.py")}
    assert folders - {"build", "runs", "venv"} == set(budgets)
