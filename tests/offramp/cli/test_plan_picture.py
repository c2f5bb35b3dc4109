from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from earlyexit.errors import InputError
from offramp.commands.plan_picture import draw_plan
from optimizer.decision import Planned
from optimizer.evaluate import evaluate
from optimizer.problem_file import parse_problem
from tests.optimizer.two_blocks import BEST, DOCUMENT

PROBLEM = parse_problem(DOCUMENT).problem
PLANNED = Planned(strategy="best", stages=BEST, figures=evaluate(PROBLEM, BEST), bound=1.0, gap=0.0)


def test_a_plan_is_drawn_with_its_splits_in_its_endings_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw_plan(PLANNED, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    for words in ("1 x V100", "2 x V100", "with fusing", "one batch of 4 shrinks", "Batch at every block"):
        assert words in text
    draw_plan(PLANNED, tmp_path / "a.svg")
    draw_plan(PLANNED, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()
    draw_plan(PLANNED, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"plan.bmp; allowed endings: .svg, .png, .pdf"):
        draw_plan(PLANNED, tmp_path / "plan.bmp")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="pictures need matplotlib; install the extra `demo`"):
        draw_plan(PLANNED, tmp_path / "plan.svg")
