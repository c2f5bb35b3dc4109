from __future__ import annotations

import json
from typing import Any

from deployments.ingress.core.ingress_core import IngressCore
from deployments.ops.dashboard.poller import CONTROLLER_S, MISSED, SnapshotPoller
from deployments.wire.controller_link import ControllerLink
from earlyexit.clock import ManualClock
from earlyexit.errors import ControllerUnavailableError
from optimizer.placement import PlacedPlan
from tests.deployments.ingress.dashboard.dashboard_scene import FACTS, ingress, placed, replica


class Scene(IngressCore, ControllerLink):
    """An ingress `a` that polls; what it asks is logged, what it is told may be changed."""

    suspended = None
    agreement = None

    def __init__(self, *, has_controller: bool = True) -> None:
        self.name = "a"
        self.now_placed: PlacedPlan = placed()
        self.clock = ManualClock(100.0)
        self.asked: list[str] = []
        self.ingresses: list[Any] | None = [ingress("a", answered=7)]
        self.of_slots: list[Any] | None = []
        self.controller_fails = False
        self.poller = SnapshotPoller(FACTS, self, self.ask_all, self if has_controller else None, self.clock)

    @property
    def placed(self) -> PlacedPlan:
        return self.now_placed

    async def ask_all(self, deployment: str, method: str) -> list[Any] | None:
        self.asked.append(f"{deployment} {method}")
        return self.ingresses if deployment == "ingress" else self.of_slots

    async def describe(self) -> dict[str, Any]:
        self.asked.append("describe")
        if self.controller_fails:
            raise ControllerUnavailableError("gone", retry_after_s=5.0)
        return {"epoch": 0, "reason": "period"}

    async def history(self, limit: int) -> list[dict[str, Any]]:
        self.asked.append("history")
        return []

    async def state(self) -> dict[str, Any]:
        event = await self.poller.event()
        assert event is not None
        retry, kind, data, *end = event.decode().split("\n")
        assert (retry, kind, end) == ("retry: 2000", "event: state", ["", ""])
        state: dict[str, Any] = json.loads(data.removeprefix("data: "))
        return state


async def test_each_event_asks_all_ingresses_and_replicas_also_of_types_where_some_rest() -> None:
    scene = Scene(has_controller=False)
    state = await scene.state()
    assert scene.asked == ["ingress peek", "split-cpu report", "split-emulated-P100 report"]
    assert (state["schema"], state["service"]["controller"], state["changes"]) == (4, "none", [])
    plan = scene.now_placed
    scene.now_placed = PlacedPlan(plan=plan.plan, avoided={"slow": "V100"})
    await scene.state()
    assert scene.asked[4:] == ["split-V100 report", "split-cpu report", "split-emulated-P100 report"]


async def test_the_controller_is_asked_less_often_and_what_it_said_last_is_kept_and_marked() -> None:
    scene = Scene()
    for _ in range(int(CONTROLLER_S) + 1):
        assert (await scene.state())["plan"]["reason"] == "period"
        scene.clock.advance(1.0)
    assert scene.asked.count("describe") == scene.asked.count("history") == 2
    scene.controller_fails = True
    scene.clock.advance(CONTROLLER_S)
    state = await scene.state()
    assert (state["service"]["controller"], state["plan"]["reason"]) == ("silent", "period")


async def test_serials_and_times_go_up_rates_begin_at_the_second_event_and_a_pause_is_forgotten() -> None:
    scene = Scene()
    states = [await scene.state()]
    scene.clock.advance(2.0)
    scene.ingresses = [ingress("a", answered=17)]
    states.append(await scene.state())
    scene.clock.advance(3600.0)
    states.append(await scene.state())
    assert [each["serial"] for each in states] == [1, 2, 3]
    assert [each["at_s"] for each in states] == [100.0, 102.0, 3702.0]
    assert [each["now"]["answered_per_s"] for each in states] == [None, 5.0, None]


async def test_replicas_are_those_that_answered_and_what_cannot_be_asked_is_left_out() -> None:
    scene = Scene()
    scene.of_slots = [replica("r", "split-cpu-0")]  # from either slot, each report says whose it is
    assert [stage["running"] for stage in (await scene.state())["plan"]["stages"]] == [2, 0]
    scene.ingresses, scene.of_slots = None, None
    state = await scene.state()
    assert (state["service"]["ingresses"], [stage["running"] for stage in state["plan"]["stages"]]) == (0, [0, 0])


async def test_an_ingress_that_is_missing_from_the_running_ones_twice_in_a_row_ends_its_stream() -> None:
    a, b = ingress("a"), ingress("b")
    for ingresses, ends in (
        ([[b]] * MISSED, True),
        ([[b], [a, b], [b]], False),
        ([None] * 3 * MISSED, False),  # it is not known which run
    ):
        scene, events = Scene(), []
        for each in ingresses:
            scene.ingresses = each
            events.append(await scene.poller.event())
        assert [event is None for event in events] == [False] * (len(events) - 1) + [ends]
