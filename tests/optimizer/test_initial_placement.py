from __future__ import annotations

from earlyexit.split import Split
from optimizer.placement import initial_placement
from optimizer.plan import Plan, Stage


def test_every_stage_has_the_next_slot_of_its_accelerator_type() -> None:
    devices = ("cpu", "V100", "cpu")
    stages = tuple(
        Stage(device=device, replicas=1, splits=(Split(first=index, end=index + 1, batch=1),))
        for index, device in enumerate(devices)
    )
    assert initial_placement(Plan(stages=stages)).slots == ("split-cpu-0", "split-V100-0", "split-cpu-1")
