"""Tests of replicas that start, end and die, on accelerators that are lost and return."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from optimizer.plans.plan import PlacedPlan, Plan
from simulator.events import Events, SimulatedTime
from simulator.service import SimulatedService
from tests.experiments.controlled.controlled_cases import halves, rows, scenario, seconds, whole
from tests.experiments.controlled.troubles import TroubledFleet

FIRST, SECOND = "split-cpu-0", "split-cpu-1"


def fleet_of(plan: Plan) -> tuple[TroubledFleet, SimulatedService]:
    """Returns a fleet of four accelerators without work."""
    service = SimulatedService(scenario(plan, np.zeros(0), rows(0.6), duration_s=1.0), Events(), PlacedPlan(plan=plan))
    fleet = TroubledFleet(service)
    fleet.boot()
    return fleet, service


def now(asked: Coroutine[Any, Any, Any]) -> Any:
    """Returns the fleet's answer, which waits for nothing."""
    with pytest.raises(StopIteration) as answer:
        asked.send(None)
    return answer.value.value


def test_replicas_host_the_stages_of_their_type_through_starts_and_deaths() -> None:
    fleet, service = fleet_of(halves(1, 2))

    def stages() -> list[tuple[str, str]]:
        return [(report.replica.removeprefix("split-"), report.slot) for report in now(fleet.replica_reports())]

    assert stages() == [("cpu#0", FIRST), ("cpu#1", SECOND), ("cpu#2", SECOND)]
    fleet.die(FIRST)
    assert stages() == [("cpu#1", FIRST), ("cpu#2", SECOND)], "no stage is left without a replica"
    service.events.run_out()
    assert stages() == [("cpu#1", FIRST), ("cpu#2", SECOND), ("cpu#3", SECOND)]


def test_a_replica_that_has_not_started_is_stopped_first_or_restarts_on_another_accelerator() -> None:
    fleet, service = fleet_of(whole(2))
    now(fleet.scale("cpu", 4))
    now(fleet.scale("cpu", 1))
    service.events.run_out()
    assert now(fleet.running()) == {"cpu": 1}
    assert seconds(fleet.log)[2:] == ["1.00 split-cpu#1 ends"]
    fleet, service = fleet_of(whole(1))
    now(fleet.scale("cpu", 2))
    service.events.run_arrivals([2.0], lambda _: None)
    fleet.lose("cpu", (1,))
    service.events.run_out()
    assert seconds(fleet.log)[-1] == "7.00 split-cpu#1 runs"  # noticed at 3


def test_lost_accelerators_count_until_ray_notices_and_replicas_wait_for_their_return() -> None:
    fleet, service = fleet_of(whole(4))
    fleet.lose("cpu", (0, 3))
    service.events.run_arrivals([7.9], lambda _: None)
    assert now(fleet.capacity()) == {"cpu": 4}
    service.events.run_arrivals([8.0], lambda _: None)
    assert now(fleet.capacity()) == {"cpu": 2}
    assert now(fleet.running()) == {"cpu": 2}
    service.events.run_arrivals([20.0], lambda _: None)
    fleet.bring_back("cpu", (3,))
    service.events.run_out()
    assert now(fleet.capacity()) == {"cpu": 3}
    assert seconds(fleet.log) == [
        "0.00 cpu 0, 3 lost",
        "0.00 split-cpu#0 dies",
        "0.00 split-cpu#3 dies",
        "20.00 cpu 3 back",
        "24.00 split-cpu#4 runs",
    ]


async def test_simulated_time_runs_inside_another_event_loop() -> None:
    events, log = Events(), list[float]()
    outer = asyncio.get_running_loop()
    with closing(SimulatedTime(events)) as loop:

        async def tell() -> None:
            await asyncio.sleep(1.0)
            log.append(asyncio.get_running_loop().time())

        loop.create_task(tell())
        events.run_out()
    assert log == [1.0]
    assert asyncio.get_running_loop() is outer
