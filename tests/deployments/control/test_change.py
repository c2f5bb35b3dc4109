"""How a change-over starts replicas, on a fleet whose replicas take one look to start."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from deployments.controller.act import LOOK_S, ChangeOver
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.clock import ManualClock
from earlyexit.network.split import Split
from optimizer.live.changeover import Await, Scale
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage

PLACED = PlacedPlan(
    plan=Plan(stages=(Stage(device="cpu", replicas=3, splits=(Split(first=0, end=1, batch=1),)),)),
    slots=("split-cpu-0",),
)


class SlowFleet:
    """Replicas that were asked for run after the next look."""

    def __init__(self, clock: ManualClock) -> None:
        self.log: list[str] = []
        self._clock = clock
        self._asked = {"split-cpu-0": 0}
        self._running = {"split-cpu-0": 0}

    async def sleep(self, seconds: float) -> None:
        assert seconds == LOOK_S
        self._clock.advance(seconds)
        self._running = dict(self._asked)

    async def scale(self, slot: str, replicas: int) -> None:
        self.log.append(f"{self._clock.now_s():.2f} {slot} {replicas}")
        self._asked[slot] = replicas

    async def running(self) -> dict[str, int]:
        return self._running

    async def capacity(self) -> dict[str, int]:
        return {"cpu": 4}

    async def prepare(self, placed: PlacedPlan) -> None: ...

    async def follow(self, placed: PlacedPlan) -> None: ...

    async def decide(self, placed: PlacedPlan) -> None: ...

    async def suspend(self, reason: str) -> None: ...

    async def ingress_reports(self) -> list[IngressReport]:
        return []

    async def replica_reports(self) -> list[ReplicaReport]:
        return []


@pytest.mark.parametrize(
    ("starts_at_once", "log"),
    [
        pytest.param(None, ["0.00 split-cpu-0 3"], id="all at once"),
        pytest.param(1, ["0.00 split-cpu-0 1", "0.25 split-cpu-0 2", "0.50 split-cpu-0 3"], id="singly"),
        pytest.param(2, ["0.00 split-cpu-0 2", "0.25 split-cpu-0 3"], id="two at a time"),
        pytest.param(5, ["0.00 split-cpu-0 3"], id="more than there are to start"),
    ],
)
async def test_so_many_replicas_start_at_a_time(starts_at_once: int | None, log: Sequence[str]) -> None:
    clock = ManualClock()
    fleet = SlowFleet(clock)

    async def reports() -> Sequence[IngressReport]:
        return await fleet.ingress_reports()

    change = ChangeOver(fleet, clock, fleet.sleep, reports, starts_at_once)
    steps = (Scale(slot="split-cpu-0", replicas=3), Await(replicas={"split-cpu-0": 3}))
    await change.carry_out(steps, lambda: PLACED, lambda: None)
    assert fleet.log == log
    assert await fleet.running() == {"split-cpu-0": 3}
