from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from earlyexit.errors import InputError
from earlyexit.network.boundary import Split
from offramp.commands.plan_picture import draw_plan
from optimizer.decision import Planned
from optimizer.evaluate import evaluate
from optimizer.plan import Stage
from optimizer.problem_file import parse_problem

PROBLEM = parse_problem(
    {
        "blocks": 3,
        "ramps": [0, 1],
        "survival": [1.0, 0.5, 0.25],
        "latency": {"V100": {"batch": [2, 4], "block_s": [[0.001, 0.002]] * 3, "ramp_s": [[0.0, 0.0]] * 2}},
        "devices": {"V100": {"count": 4}},
        "link": {"bandwidth_bytes_per_s": 1e9},
        "bytes_per_sample": 1000,
        "slo": {"latency_s": 0.1},
        "objective": {"maximize": "rate"},
    }
).problem
STAGES = (
    Stage(device="V100", replicas=3, splits=(Split(first=0, end=1, batch=4, ramps=(0,)),)),
    Stage(device="V100", replicas=1, splits=(Split(first=1, end=3, batch=2, ramps=(1,)),)),
)
PLANNED = Planned(strategy="best", stages=STAGES, figures=evaluate(PROBLEM, STAGES), bound=1.0, gap=0.0)


def test_a_plan_is_drawn_with_its_stages_and_splits(tmp_path: Path) -> None:
    draw_plan(PLANNED, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text(encoding="utf-8")
    assert ElementTree.fromstring(text).tag == "{http://www.w3.org/2000/svg}svg"
    for words in ("3 x V100", "1 x V100", "with fusing", "one batch of 4 shrinks", "Batch at every block"):
        assert words in text


def test_the_same_plan_is_the_same_file(tmp_path: Path) -> None:
    draw_plan(PLANNED, tmp_path / "a.svg")
    draw_plan(PLANNED, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_an_ending_says_the_format(tmp_path: Path) -> None:
    draw_plan(PLANNED, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InputError, match=r"plan.bmp; allowed endings: .svg, .png, .pdf"):
        draw_plan(PLANNED, tmp_path / "plan.bmp")


def test_without_matplotlib_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match="pictures need matplotlib; install the extra `demo`"):
        draw_plan(PLANNED, tmp_path / "plan.svg")
