"""How an ingress drives the live core, on timetables; the core's own rules are tested beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from optimizer.placement import initial_placement
from optimizer.plan import Plan
from tests.simulator.ingress_scene import IngressScene
from tests.simulator.tiny_cases import plan, scenario, split, stage

FIRST = "split-cpu-0"
TWO_STAGES = plan(stage(1, split(0, 2)), stage(1, split(2, 4)))


def one_stage(replicas: int = 1, batch: int = 4) -> Plan:
    return plan(stage(replicas, split(0, 4, batch)))


def scene(served_by: Plan, arrivals_s: Sequence[float], **options: Any) -> IngressScene:
    return IngressScene(scenario(served_by, arrivals_s, **options))


def test_what_some_replica_can_start_now_is_sent_at_once_and_the_rest_waits_for_a_full_batch() -> None:
    made = scene(one_stage(), [1, 2, 3, 4, 5, 6])
    made.arrive(6)
    assert made.log == ["1 call 0 to split-cpu-0 for block 0: [0]", "5 call 1 to split-cpu-0 for block 0: [1 2 3 4]"]
    assert (made.ingress.core.num_waiting, made.ingress.core.num_unanswered) == (1, 6)


def test_the_first_part_of_a_reply_makes_room_for_the_next_call() -> None:
    made = scene(one_stage(), [1, 1, 1, 2])
    made.arrive(3)
    made.answer(0, 1)
    assert made.log[1:] == ["3 a call of 1 to split-cpu-0 has ended", "3 call 1 to split-cpu-0 for block 0: [1 2 3]"]
    made.events.run_until(4)
    made.answer(1, 0, number=1)
    made.answer(1, 3)
    assert made.log[3:] == ["4 a call of 3 to split-cpu-0 has ended"]
    assert made.ledger.latency_s.tolist() == [2, 3, 3, 2]
    assert made.ledger.exit.tolist() == [1, 0, 3, 3]
    assert made.ingress.core.num_unanswered == 0


def test_inputs_of_one_request_leave_together_and_are_parted_where_a_batch_is_full() -> None:
    made = scene(one_stage(replicas=2), [1.0], inputs_per_request=5)
    made.arrive(1)
    assert made.log == ["1 call 0 to split-cpu-0 for block 0: [0 1 2 3]", "1 call 1 to split-cpu-0 for block 0: [4]"]


def test_survivors_go_to_the_stage_that_hosts_their_next_block() -> None:
    made = scene(TWO_STAGES, [1, 1])
    made.arrive(1)
    made.events.run_until(3)
    made.go_on(0, 2)
    assert made.log[1:] == [
        "3 a call of 1 to split-cpu-0 has ended",
        "3 call 1 to split-cpu-1 for block 2: [0]",
        "3 call 2 to split-cpu-0 for block 0: [1]",
    ]
    assert [call.is_first for call in made.calls] == [True, False, True]


def test_calls_take_the_way_to_the_first_stage_and_answers_the_way_back() -> None:
    made = scene(one_stage(), [1.0], entry_s=0.5, answer_s=0.25)
    made.arrive(3)
    assert made.log == ["1.5 call 0 to split-cpu-0 for block 0: [0]"]
    made.answer(0, 3)
    assert math.isnan(made.ledger.latency_s[0])
    made.events.run_until(4)
    assert made.ledger.latency_s[0] == 2.25


def test_a_deadline_is_the_arrival_and_the_slo_and_the_problems_slack_is_reserved() -> None:
    made = scene(one_stage(), [1, 2], slo_s=10.0)
    made.arrive(2)
    made.answer(0, 3)
    assert [flight.deadline_s for call in made.calls for flight in call.flights] == [11, 12]
    assert made.calls[1].members[0].reserve_s == 2  # 20 %


def test_stages_of_which_nothing_is_known_and_that_wait_have_all_time_reserved() -> None:
    made = scene(plan(*TWO_STAGES.stages, dispatch="deferred"), [1.0], slo_s=10.0)
    made.arrive(1)
    assert made.calls[0].members[0].reserve_s == 10


def test_legs_learn_from_the_clock_of_the_simulation_what_their_calls_take() -> None:
    made = scene(TWO_STAGES, [1.0])
    made.arrive(3)
    made.go_on(0, 2)  # 2 s in the first stage
    made.events.run_until(3.5)
    made.answer(1, 3)  # 0.5 s in the second
    assert [leg.expected_s for leg in made.ingress.core.itinerary.legs] == [2, 0.5]


def test_who_waits_at_the_ingress_until_the_deadline_is_given_up_and_fills_no_batch() -> None:
    made = scene(one_stage(), [0, 0.2, 0.4, 3, 10.5], slo_s=10.0)
    made.arrive(10.5)
    made.answer(0, 3)  # inputs 1 and 2 were to be answered by 10.2 and 10.4
    assert made.log[1:] == [
        "10.5 a call of 1 to split-cpu-0 has ended",
        "10.5 call 1 to split-cpu-0 for block 0: [3 4]",
    ]
    assert made.drops() == ["deadline", "deadline", "deadline", None, None]


def test_a_call_of_which_nothing_comes_is_given_up_a_second_after_its_last_deadline() -> None:
    made = scene(one_stage(), [0, 0.5, 8], slo_s=10.0)
    made.arrive(12)
    assert made.log[1:] == [
        "11 call 0 is forgotten",
        "11 a call of 1 to split-cpu-0 has ended",
        "11 call 1 to split-cpu-0 for block 0: [2]",
    ]


def test_what_a_stage_drops_is_dropped_for_its_deadline_and_makes_room() -> None:
    made = scene(one_stage(), [1, 2])
    made.arrive(2)
    made.lose(0)
    assert made.log[1:] == ["2 a call of 1 to split-cpu-0 has ended", "2 call 1 to split-cpu-0 for block 0: [1]"]
    assert made.drops() == ["deadline", None]
    assert made.ingress.core.itinerary.legs[0].expected_s == 0  # what is dropped tells nothing of how long calls take


def test_what_was_inside_a_dead_replica_starts_again_in_front_after_a_pause() -> None:
    made = scene(one_stage(), [1, 1, 1, 1, 1, 1])
    made.arrive(1)  # call 0 has input 0, call 1 the next four
    made.answer(1, 0, number=2)
    made.die(1)
    made.events.run_until(1.01)
    assert made.ingress.core.num_waiting == 1
    made.events.run_until(2)
    assert made.ingress.core.num_waiting == 3
    made.answer(0, 3)
    assert made.log[-1] == "2 call 2 to split-cpu-0 for block 0: [3 4 5]"
    assert made.ingress.core.num_unanswered == 3


def test_a_call_that_finds_no_replica_waits_for_one() -> None:
    made = scene(one_stage(), [1.0], slo_s=10.0)
    made.slots[FIRST].replica = None
    made.arrive(1)
    assert [(call.members[0].payload.input, block) for call, block, _ in made.slots[FIRST].pending] == [(0, 0)]


@pytest.mark.parametrize(
    ("served_by", "arrivals", "options", "calls", "drops"),
    [
        (one_stage(batch=1), 5, {"calls_per_replica": 3}, 3, [None] * 5),
        (one_stage(), 3, {"inputs_per_request": 2, "max_queued": None}, 2, [None] * 6),
        (one_stage(), 3, {"inputs_per_request": 2, "max_queued": 5}, 1, [None] * 4 + ["overloaded"] * 2),
        # One input per second is served in 4 s: with 10 % kept, 10 s have room for 5 before one; two more are sent.
        (
            plan(stage(1, split(0, 4, 1)), rate_per_s=1.0, latency_s=4.0),
            9,
            {"slo_s": 10.0, "admission": True},
            2,
            [None] * 7 + ["admission"] * 2,
        ),
    ],
    ids=["calls per replica", "no limit", "a limit of whole requests", "admission"],
)
def test_an_ingress_has_the_scenarios_limits(
    served_by: Plan, arrivals: int, options: dict[str, Any], calls: int, drops: list[str | None]
) -> None:
    made = scene(served_by, [0.0] * arrivals, **options)
    made.arrive(0)
    assert (len(made.calls), made.drops()) == (calls, drops)


def test_without_a_plan_what_waits_and_what_comes_is_refused_until_there_is_one_again() -> None:
    made = scene(one_stage(), [1, 1, 2, 3])
    made.arrive(1)
    made.ingress.suspend("")
    made.arrive(2, first=2)
    assert made.drops() == [None, "stage_unavailable", "stage_unavailable", None]
    made.follow(initial_placement(replace(one_stage(replicas=2), epoch=1)))
    made.arrive(3, first=3)
    assert made.log[-1] == "3 call 1 to split-cpu-0 for block 0: [3]"
