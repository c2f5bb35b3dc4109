"""Timetables of replicas: a block takes 1 s, and 0.25 s more for every further input."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from optimizer.plans.plan import Plan
from optimizer.problems.problem import Link, Supply
from simulator.events import CONTROLS
from simulator.outcome import DROPS, Outcome
from simulator.service import SimulatedService
from simulator.simulate import booted, play, simulate
from tests.simulator.tiny_cases import AT_0, AT_1, AT_2, POLICY, TO_END, kill, plan, problem, scenario, split, stage

WHOLE = plan(stage(1, split(0, 4)))
EVERY_RAMP = plan(stage(1, split(0, 4, ramps=(0, 1, 2))))


def latencies_s(served_by: Plan, arrivals_s: Sequence[float], rows: Sequence[int] = (TO_END,), **options: Any) -> Any:
    return simulate(scenario(served_by, arrivals_s, rows, **options)).latency_s_N.tolist()


def test_a_batch_takes_the_time_of_its_size_and_later_arrivals_form_the_next() -> None:
    for size, seconds in ((1, 4.0), (2, 5.0), (3, 6.0), (4, 7.0)):
        assert latencies_s(WHOLE, [0.0], inputs_per_request=size) == [seconds] * size
    assert latencies_s(WHOLE, [0, 1, 1, 1]) == [4, 9, 9, 9]  # three inputs from 4 s to 10 s


def test_inputs_leave_at_inner_ramps_and_a_batch_ends_with_its_last_input() -> None:
    outcome = simulate(scenario(EVERY_RAMP, [0.0], (TO_END, AT_1, AT_0, AT_2), inputs_per_request=4))
    assert outcome.latency_s_N.tolist() == [5.5, 3.25, 1.75, 4.5]  # 1.75 + 1.5 + 1.25 + 1
    assert outcome.exit_N.tolist() == [3, 1, 0, 2]
    outcome = simulate(scenario(EVERY_RAMP, [0, 0.5, 0.5], [AT_0, AT_1, AT_1]))
    assert outcome.latency_s_N.tolist() == [1, 3, 3]  # one block, then two of two inputs
    assert [each.busy_s for each in outcome.splits] == [3.5]


def test_an_active_ramp_takes_time_too() -> None:
    rows = (AT_0, AT_1, AT_2, TO_END)
    slow_ramps = problem(ramp_s=0.5)
    assert latencies_s(EVERY_RAMP, [0.0], rows, inputs_per_request=4, problem=slow_ramps) == [2.25, 4.25, 6.0, 7.0]


def test_survivors_take_the_link_or_wait_on_the_device_for_a_full_batch() -> None:
    served_by = plan(stage(1, split(0, 2, ramps=(1,))), stage(1, split(2, 4)))
    rows = (TO_END, AT_1, TO_END)
    # Two blocks of three inputs, 0.5 s for each of the two that continue, two blocks of two.
    assert latencies_s(served_by, [0.0], rows, inputs_per_request=3) == [3 + 1 + 2.5, 3, 3 + 1 + 2.5]
    # If the replica hosts their next split too, they wait in it.
    served_by = plan(stage(1, split(0, 2, 2, ramps=(1,)), split(2, 4, 2)))
    assert latencies_s(served_by, [0.0], (*rows, AT_1), inputs_per_request=4) == [7.5, 2.5, 7.5, 5.0]


def test_a_replica_sends_one_batchs_survivors_at_a_time_and_computes_meanwhile() -> None:
    served_by = plan(stage(1, split(0, 1, 1)), stage(2, split(1, 4, 1)))
    slow_link = replace(problem(), link=Link(bandwidth_bytes_per_s=0.5))
    shared_card = replace(problem(), devices={"cpu": Supply(count=8, per_node=4)})  # of 2 bytes per second
    # Computed from 0 to 1 and from 1 to 2, sent from 1 to 3 and from 3 to 5, three blocks each.
    assert latencies_s(served_by, [0, 0], problem=slow_link) == [6, 8]
    assert latencies_s(served_by, [0, 0], problem=shared_card) == [6, 8]


@pytest.mark.parametrize(
    ("batch", "arrivals_s", "size", "expected_s"),
    [
        # Of 20 s, 4 s are slack and 7 s are a full batch's; so it starts at 9 s, and takes 4 s for one input.
        pytest.param(4, [0.0], 1, [13], id="waits until the SLO less its slack would be at risk"),
        pytest.param(4, [0.0], 4, [7] * 4, id="starts a full batch at once"),
        # Alone the first would start at 20 - 4 - 5 = 11 s; filled at 6 s, it ends then, and the third starts at 17 s.
        pytest.param(2, [0, 6, 6], 1, [11, 5, 15], id="forgets when it meant to start"),
    ],
)
def test_a_deferred_stage_waits(batch: int, arrivals_s: list[float], size: int, expected_s: list[float]) -> None:
    served_by = plan(stage(1, split(0, 4, batch)), dispatch="deferred")
    assert latencies_s(served_by, arrivals_s, slo_s=20.0, inputs_per_request=size) == expected_s


def test_inputs_that_cannot_be_in_time_are_dropped_unrun() -> None:
    outcome = simulate(scenario(WHOLE, [0.0, 1.2], slo_s=5.0))  # 4 s from 4 on end after 6.2
    assert outcome.latency_s_N.tolist() == [4, pytest.approx(math.nan, nan_ok=True)]
    assert [DROPS[reason] for reason in outcome.drop_N if reason >= 0] == ["deadline"]
    assert [each.batches for each in outcome.splits] == [1]
    # After one block of four inputs none leaves, so a batch of four takes 7 s, a second more than remains.
    outcome = simulate(scenario(WHOLE, [0.0], slo_s=6.0, inputs_per_request=4))
    assert outcome.figures().drops == {"deadline": 4}
    assert outcome.splits == ()


def at(service: SimulatedService, second: float, action: Any) -> Outcome:
    """Runs a service, and acts on its first replica at this second."""
    replica = next(iter(service.replicas()))
    service.events.at(second, CONTROLS, lambda _: action(replica))
    return play(service)


def test_inputs_of_a_dead_replica_start_again_on_others() -> None:
    service = booted(scenario(plan(stage(2, split(0, 4))), [0.0]))
    assert at(service, 1.0, partial(kill, service)).latency_s_N.tolist() == [pytest.approx(1.05 + 4)]
    service = booted(scenario(plan(stage(2, split(0, 2)), stage(1, split(2, 4))), [0.0]))
    # Two blocks until 2, sent until 2.5; dead at 2.25, again at 2.3: two blocks, the link, two blocks.
    assert at(service, 2.25, partial(kill, service)).latency_s_N.tolist() == [pytest.approx(2.3 + 2 + 0.5 + 2)]
    chains = Plan(stages=(stage(1, split(0, 4)),) * 2, shares=(0.5, 0.5), policy=POLICY)
    service = booted(scenario(chains, [0.0, 0.5, 3.0, 3.1]))
    # The replica that is left hosts the first chain, which gets all inputs: one from 4.5 to 8.5, two until 13.5.
    assert at(service, 1.0, partial(kill, service)).latency_s_N.tolist() == pytest.approx([8.5, 4, 10.5, 10.4])
    service = booted(scenario(replace(chains, stages=(stage(2, split(0, 4)),) * 2), [float(k) for k in range(1, 7)]))
    at(service, 0.5, partial(kill, service))
    assert service.ingresses[0].core.counts.assigned == {0: 4, 1: 2}  # the second chain has one replica left
    cut, whole = (stage(1, split(0, 2)), stage(1, split(2, 4))), stage(1, split(0, 4))
    service = booted(scenario(Plan(stages=(*cut, whole), shares=(0.4, 0.6), policy=POLICY), [1.0]))
    # The two replicas that are left host the chain with the larger share.
    assert at(service, 0.5, partial(kill, service)).latency_s_N.tolist() == [4]


def test_a_stopped_replica_finishes_its_inputs_and_gets_no_more() -> None:
    service = booted(scenario(plan(stage(2, split(0, 4))), [0.0, 2.0]))
    outcome = at(service, 1.0, service.stop)
    assert outcome.latency_s_N.tolist() == [4, 4]
    assert sum(slot.replica_s for slot in outcome.slots) == 1.0 + 6.0
