"""A cluster of 6 whose plan has 3 replicas in one stage and 1 in the other."""

from __future__ import annotations

from deployments.controller.observe import BELIEVED_S
from deployments.controller.observe import MissingAccelerators as Missing
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage

DEVICES = {"split-cpu-0": "cpu", "split-cpu-1": "cpu"}
PLACED = PlacedPlan(
    plan=Plan(
        stages=(
            Stage(device="cpu", replicas=3, splits=(Split(first=0, end=1, batch=1),)),
            Stage(device="cpu", replicas=1, splits=(Split(first=1, end=2, batch=1),)),
        )
    ),
    slots=("split-cpu-0", "split-cpu-1"),
)
ALL = {"split-cpu-0": 3, "split-cpu-1": 1}
WITHOUT_STAGE = {"split-cpu-0": 2, "split-cpu-1": 0}


def left(missing: Missing, running: dict[str, int], at_s: float, *, counted: int = 6) -> int:
    return missing.left({"cpu": counted}, running, PLACED, at_s)["cpu"]


def test_a_stage_that_stays_empty_tells_what_is_gone() -> None:
    missing = Missing(DEVICES)
    assert left(missing, ALL, 0.0) == 6
    assert left(missing, WITHOUT_STAGE, 2.0) == 6
    assert left(missing, WITHOUT_STAGE, 4.0) == 4  # 2 of the 4 that the plan needs run


def test_a_stage_that_is_back_at_the_next_look_lost_nothing() -> None:
    missing = Missing(DEVICES)
    left(missing, ALL, 0.0)
    assert [left(missing, running, 2.0) for running in (WITHOUT_STAGE, ALL, WITHOUT_STAGE, ALL)] == [6, 6, 6, 6]


def test_fewer_replicas_in_a_stage_are_left_to_serve() -> None:
    missing = Missing(DEVICES)
    left(missing, ALL, 0.0)
    assert [left(missing, {"split-cpu-0": 1, "split-cpu-1": 1}, at_s) for at_s in (2.0, 4.0, 6.0)] == [6, 6, 6]


def test_a_stage_that_has_not_started_yet_is_waited_for() -> None:
    missing = Missing(DEVICES)
    assert [left(missing, WITHOUT_STAGE, at_s) for at_s in (0.0, 2.0, 4.0)] == [6, 6, 6]


def test_in_a_change_over_nothing_is_missed() -> None:
    missing = Missing(DEVICES)
    left(missing, ALL, 0.0)
    assert [missing.left({"cpu": 6}, WITHOUT_STAGE, None, at_s)["cpu"] for at_s in (2.0, 4.0, 6.0)] == [6, 6, 6]


def test_once_ray_has_noticed_its_own_count_is_taken() -> None:
    missing = Missing(DEVICES)
    left(missing, ALL, 0.0)
    left(missing, WITHOUT_STAGE, 2.0)
    assert left(missing, WITHOUT_STAGE, 4.0) == 4
    assert left(missing, ALL, 6.0) == 4
    assert left(missing, ALL, 8.0, counted=5) == 5
    assert left(missing, ALL, 10.0) == 6


def test_after_a_while_it_is_tried_whether_they_are_back() -> None:
    missing = Missing(DEVICES)
    left(missing, ALL, 0.0)
    left(missing, WITHOUT_STAGE, 2.0)
    assert left(missing, WITHOUT_STAGE, 4.0) == 4
    assert left(missing, ALL, 4.0 + BELIEVED_S - 1.0) == 4
    assert left(missing, ALL, 4.0 + BELIEVED_S) == 6
