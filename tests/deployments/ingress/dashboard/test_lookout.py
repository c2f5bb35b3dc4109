from __future__ import annotations

import json
from typing import Any

from deployments.ops.dashboard.poller import CONTROLLER_S, MISSED, SnapshotPoller
from earlyexit.clock import ManualClock
from earlyexit.errors import ControllerUnavailableError
from optimizer.placement import PlacedPlan
from tests.deployments.ingress.dashboard.dashboard_scene import FACTS, ingress, placed, replica


class Scene:
    """An ingress `a` that looks; what it asks is logged, what it is told may be changed."""

    name = "a"
    suspended: str | None = None
    agreement: float | None = None

    def __init__(self, *, has_controller: bool = True) -> None:
        self.placed: PlacedPlan = placed()
        self.clock = ManualClock(100.0)
        self.asked: list[str] = []
        self.ingresses: list[Any] | None = [ingress("a", answered=7)]
        self.of_slots: list[Any] | None = []
        self.controller_fails = False
        self.lookout = SnapshotPoller(FACTS, self, self.ask_all, self if has_controller else None, self.clock)

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
        event = await self.lookout.event()
        assert event is not None
        [data] = [line for line in event.decode().split("\n") if line.startswith("data: ")]
        state: dict[str, Any] = json.loads(data.removeprefix("data: "))
        return state


async def test_an_event_is_one_state_in_the_form_of_server_sent_events() -> None:
    event = await Scene().lookout.event()
    assert event is not None
    lines = event.decode().split("\n")
    assert lines[:2] == ["retry: 2000", "event: state"]
    assert lines[2].startswith('data: {"schema":4')
    assert lines[3:] == ["", ""]


async def test_every_look_asks_all_ingresses_and_the_slots_of_the_plan() -> None:
    scene = Scene(has_controller=False)
    await scene.state()
    assert scene.asked == ["ingress peek", "split-cpu-0 report", "split-emulated-P100-0 report"]


async def test_slots_in_which_replicas_rest_are_asked_too() -> None:
    scene = Scene(has_controller=False)
    plan = scene.placed
    scene.placed = PlacedPlan(plan=plan.plan, slots=plan.slots, avoided={"slow": "split-cpu-3"})
    await scene.state()
    assert scene.asked[1:] == ["split-cpu-0 report", "split-emulated-P100-0 report", "split-cpu-3 report"]


async def test_the_controller_is_asked_less_often() -> None:
    scene = Scene()
    for _ in range(int(CONTROLLER_S) + 1):
        assert (await scene.state())["plan"]["reason"] == "period"
        scene.clock.advance(1.0)
    assert scene.asked.count("describe") == scene.asked.count("history") == 2


async def test_what_a_silent_controller_said_last_is_kept_and_marked() -> None:
    scene = Scene()
    await scene.state()
    scene.controller_fails = True
    scene.clock.advance(CONTROLLER_S)
    state = await scene.state()
    assert (state["service"]["controller"], state["plan"]["reason"]) == ("silent", "period")


async def test_without_a_controller_nobody_is_asked_for_its_words() -> None:
    state = await Scene(has_controller=False).state()
    assert (state["service"]["controller"], state["changes"]) == ("none", [])


async def test_serials_and_times_go_up_and_rates_begin_at_the_second_look() -> None:
    scene = Scene()
    first = await scene.state()
    scene.clock.advance(2.0)
    scene.ingresses = [ingress("a", answered=17)]
    second = await scene.state()
    assert [first["serial"], second["serial"]] == [1, 2]
    assert [first["at_s"], second["at_s"]] == [100.0, 102.0]
    assert [first["now"]["answered_per_s"], second["now"]["answered_per_s"]] == [None, 5.0]


async def test_counts_from_before_a_long_pause_are_forgotten() -> None:
    scene = Scene()
    await scene.state()
    scene.clock.advance(3600.0)
    assert (await scene.state())["now"]["seconds"] is None


async def test_who_cannot_be_asked_is_left_out() -> None:
    scene = Scene()
    scene.ingresses, scene.of_slots = None, None
    state = await scene.state()
    assert (state["service"]["ingresses"], [stage["running"] for stage in state["plan"]["stages"]]) == (0, [0, 0])


async def test_replicas_are_those_that_answered() -> None:
    scene = Scene()
    scene.of_slots = [replica("r", "split-cpu-0")]  # from either slot, each report says whose it is
    assert [stage["running"] for stage in (await scene.state())["plan"]["stages"]] == [2, 0]


async def test_an_ingress_that_is_no_longer_among_the_running_ones_ends_its_stream() -> None:
    scene = Scene()
    scene.ingresses = [ingress("b")]
    for _ in range(MISSED - 1):
        assert await scene.lookout.event() is not None
    assert await scene.lookout.event() is None


async def test_an_ingress_goes_on_where_nobody_knows_who_runs() -> None:
    scene = Scene()
    scene.ingresses = None
    for _ in range(3 * MISSED):
        assert await scene.lookout.event() is not None


async def test_an_ingress_that_was_missed_once_goes_on() -> None:
    scene = Scene()
    for present in ([ingress("b")], [ingress("a"), ingress("b")], [ingress("b")]):
        scene.ingresses = present
        assert await scene.lookout.event() is not None
