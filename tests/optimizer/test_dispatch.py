from __future__ import annotations

import pytest

from deployments.wire.messages import Assignment
from earlyexit.engine.engine import Dispatch
from earlyexit.network.boundary import Split
from optimizer.plan import Plan, PlanDispatch, Stage, dispatch_on


@pytest.mark.parametrize(
    ("device", "said", "done"),
    [
        ("cpu", "auto", "filling"),
        ("V100", "auto", "work-conserving"),
        ("emulated:V100", "auto", "work-conserving"),
        ("cpu", "work-conserving", "work-conserving"),
        ("V100", "filling", "filling"),
        ("cpu", "deferred", "deferred"),
    ],
)
def test_batches_fill_by_themselves_on_processors_only(device: str, said: PlanDispatch, done: Dispatch) -> None:
    assert dispatch_on(device, said) == done


def test_every_stage_of_a_plan_does_what_suits_its_device() -> None:
    stages = (
        Stage(device="cpu", replicas=2, splits=(Split(first=0, end=1, batch=8),)),
        Stage(device="V100", replicas=1, splits=(Split(first=1, end=3, batch=4),)),
    )
    plan = Plan(stages=stages, dispatch="auto")
    assert [Assignment.of(plan, stage, "slot").dispatch for stage in plan.stages] == ["filling", "work-conserving"]
