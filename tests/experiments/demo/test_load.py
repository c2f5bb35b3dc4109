from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.network.split import Split
from experiments.demo.load import Ran, batch_at_block, tell
from experiments.demo.picture import draw, plan_text
from optimizer.plan import Plan, PolicySpec, Stage
from tests.experiments.peers.results import load_result

FUSED = (Split(first=0, end=1, batch=16, ramps=(0,)), Split(first=1, end=4, batch=16, ramps=(2,)))
SHRINKING = (Split(first=0, end=4, batch=16, ramps=(0, 2)),)
EXITS = {0: 60, 2: 20, 3: 20}
"""Of a hundred answers, where they came from."""


def plan(splits: tuple[Split, ...]) -> Plan:
    stage = Stage(device="cpu", replicas=2, splits=splits)
    return Plan(stages=(stage,), policy=PolicySpec(thresholds=0.4))


def ran(splits: tuple[Split, ...], counts: dict[int, tuple[int, int]]) -> Ran:
    """Of a hundred requests all were answered, 70 of them in time."""
    return Ran(
        plan=plan(splits),
        result=load_result().model_copy(update={"goodput_per_s": 70.0}),
        cpu_per_answer_s=0.002,
        batch_at_block=batch_at_block(plan(splits), counts, EXITS),
        fill={split.first: (10, 0.5) for split in splits},
        mean_blocks=2.0,
        agreement=0.99,
    )


def test_a_batch_shrinks_by_those_that_leave_and_begins_anew_at_the_next_split() -> None:
    assert batch_at_block(plan(SHRINKING), {0: (10, 100)}, EXITS) == pytest.approx((10, 4, 4, 2))
    assert batch_at_block(plan(FUSED), {0: (10, 100), 1: (5, 40)}, EXITS) == pytest.approx((10, 8, 8, 4))


def test_splits_that_nobody_reached_have_empty_batches() -> None:
    assert batch_at_block(plan(FUSED), {0: (10, 100), 1: (0, 0)}, {0: 100}) == (10, 0, 0, 0)


def test_what_is_told_is_a_row_for_every_plan_how_full_splits_were_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    fused = ran(FUSED, {0: (10, 100), 1: (5, 40)})
    sides = {"stock": ran(SHRINKING, {0: (10, 100)}), "early-exit": ran(SHRINKING, {0: (10, 100)}), "planned": fused}
    tell(sides, slo_s=0.25)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2:] == [[name, "70.0%", "10", "50", "2", "2", "99.00%"] for name in sides]
    assert plan_text(fused.plan, fused.fill).splitlines() == [
        "stage 0: 2 x cpu, blocks 0 to 3",
        "  blocks 0-0  batch  16  ramps 0       fill [############            ] 50.0% over 10 batches",
        "  blocks 1-3  batch  16  ramps 2       fill [############            ] 50.0% over 10 batches",
    ]
    draw(sides, tmp_path / "plan.png")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
