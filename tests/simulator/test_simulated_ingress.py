"""When an ingress sends what to whom: the rules of the live dispatcher, on timetables."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from optimizer.placement import initial_placement
from optimizer.plan import Plan
from tests.simulator.ingress_scene import IngressScene
from tests.simulator.tiny_cases import plan, problem, scenario, split, stage

FIRST, SECOND = "split-cpu-0", "split-cpu-1"


def one_stage(replicas: int = 1, batch: int = 4) -> Plan:
    return plan(stage(replicas, split(0, 4, batch)))


TWO_STAGES = plan(stage(1, split(0, 2)), stage(1, split(2, 4)))


def scene(served_by: Plan, arrivals_s: Sequence[float], **options: Any) -> IngressScene:
    return IngressScene(scenario(served_by, arrivals_s, **options))


def test_what_some_replica_can_start_now_is_sent_at_once_and_the_rest_waits_for_a_full_batch() -> None:
    made = scene(one_stage(), [1, 2, 3, 4, 5, 6])
    made.arrive(6)
    assert made.log == ["1 call 0 to split-cpu-0 for block 0: [0]", "5 call 1 to split-cpu-0 for block 0: [1 2 3 4]"]
    assert (made.ingress.core.num_waiting, made.ingress.core.num_unanswered) == (1, 6)


def test_as_many_calls_as_replicas_start_at_once_and_as_many_again_queue_behind_them() -> None:
    made = scene(one_stage(replicas=2, batch=1), [1, 1, 1, 1, 1])
    made.arrive(1)
    assert [call.members[0].payload.input for call in made.calls] == [0, 1, 2, 3]


def test_more_calls_per_replica_are_sent_where_the_scenario_says_so() -> None:
    made = scene(one_stage(batch=1), [1] * 5, calls_per_replica=3)
    made.arrive(1)
    assert len(made.calls) == 3


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


def test_calls_to_later_stages_do_not_keep_new_inputs_from_the_first() -> None:
    made = scene(TWO_STAGES, [1, 2, 2])
    made.arrive(1)
    made.go_on(0, 2)
    made.arrive(2, first=1)
    assert [line.split("to ")[1] for line in made.log if "call 2" in line] == ["split-cpu-0 for block 0: [1]"]


def test_calls_take_the_way_to_the_first_stage_and_answers_the_way_back() -> None:
    made = scene(one_stage(), [1.0], entry_s=0.5, answer_s=0.25)
    made.arrive(3)
    assert made.log == ["1.5 call 0 to split-cpu-0 for block 0: [0]"]
    made.answer(0, 3)
    assert math.isnan(made.ledger.latency_s[0])
    made.events.run_until(4)
    assert made.ledger.latency_s[0] == 2.25


def test_a_deadline_is_the_arrival_and_the_slo_wherever_an_input_waits() -> None:
    made = scene(one_stage(), [1, 2], slo_s=10.0)
    made.arrive(2)
    made.answer(0, 3)
    assert [flight.deadline_s for call in made.calls for flight in call.flights] == [11, 12]


def test_who_waits_at_the_ingress_until_the_deadline_is_given_up_and_fills_no_batch() -> None:
    made = scene(one_stage(), [0, 0.2, 0.4, 3, 10.5], slo_s=10.0)
    made.arrive(10.5)
    made.answer(0, 3)  # inputs 1 and 2 were to be answered by 10.2 and 10.4
    assert made.log[1:] == [
        "10.5 a call of 1 to split-cpu-0 has ended",
        "10.5 call 1 to split-cpu-0 for block 0: [3 4]",
    ]
    assert made.drops() == ["deadline", "deadline", "deadline", None, None]


def test_a_full_batch_is_one_of_inputs_that_somebody_still_waits_for() -> None:
    made = scene(one_stage(), [0, 0.5, 10.2, 10.3, 10.8], slo_s=10.0)
    made.arrive(10.8)  # four came after the first call, but the owner of the first of them has gone at 10.5
    assert len(made.calls) == 1
    assert made.ingress.core.num_unanswered == 3


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
    assert made.ingress.core.itinerary.first.expected_s == 0  # what is dropped tells nothing of how long calls take


def test_legs_learn_what_their_calls_take_and_later_ones_are_reserved() -> None:
    made = scene(TWO_STAGES, [1, 4])
    made.arrive(1)
    made.events.run_until(3)
    made.go_on(0, 2)  # 2 s in the first stage
    made.events.run_until(3.5)
    made.answer(1, 3)  # 0.5 s in the second
    made.arrive(4, first=1)
    assert [leg.expected_s for leg in made.ingress.core.itinerary.legs] == [2, 0.5]
    assert [call.reserve_s for call in made.calls] == [0, 0, 0.5]


def test_with_an_slo_its_slack_is_reserved_besides() -> None:
    made = scene(TWO_STAGES, [1.0], slo_s=10.0, problem=problem())
    made.arrive(1)
    assert made.calls[0].members[0].reserve_s == 2  # 20 %


def test_where_stages_wait_and_a_later_one_is_unknown_all_time_is_reserved() -> None:
    made = scene(plan(*TWO_STAGES.stages, dispatch="deferred"), [1.0], slo_s=10.0)
    made.arrive(1)
    assert made.calls[0].members[0].reserve_s == 10


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


def test_a_dead_replica_makes_room_at_once() -> None:
    made = scene(one_stage(), [1, 1, 1])
    made.arrive(1)
    made.die(0)
    assert made.log[-1] == "1 call 1 to split-cpu-0 for block 0: [1 2]"


def test_a_call_that_finds_no_replica_waits_for_one() -> None:
    made = scene(one_stage(), [1.0], slo_s=10.0)
    made.slots[FIRST].replica = None
    made.arrive(1)
    assert [(call.members[0].payload.input, block) for call, block, _ in made.slots[FIRST].pending] == [(0, 0)]


@pytest.mark.parametrize(
    ("max_queued", "drops"),
    [
        pytest.param(None, [None] * 6, id="no limit"),
        pytest.param(4, [None] * 4 + ["overloaded"] * 2, id="four unanswered"),
        pytest.param(5, [None] * 4 + ["overloaded"] * 2, id="all of a request or none"),
    ],
)
def test_beyond_its_limit_of_unanswered_inputs_an_ingress_refuses_requests(
    max_queued: int | None, drops: list[str | None]
) -> None:
    made = scene(one_stage(), [1, 1, 1], inputs_per_request=2, max_queued=max_queued)
    made.arrive(1)
    assert made.drops() == drops


def test_admission_refuses_what_would_be_late_at_the_plans_rate() -> None:
    # One input per second is served, a plan's way takes 4 s, so with 10 % kept, in 9 s there is room for 5 before one.
    served_by = plan(stage(1, split(0, 4, 1)), rate_per_s=1.0, latency_s=4.0)
    made = scene(served_by, [0.0] * 9, slo_s=10.0, admission=True)
    made.arrive(0)
    assert made.drops() == [None] * 7 + ["admission"] * 2  # two are sent, five wait
    assert made.ingress.core.num_unanswered == 7


def test_without_a_plan_what_waits_and_what_comes_is_refused_until_there_is_one_again() -> None:
    made = scene(one_stage(), [1, 1, 2, 3])
    made.arrive(1)
    made.ingress.suspend("")
    made.arrive(2, first=2)
    assert made.drops() == [None, "stage_unavailable", "stage_unavailable", None]
    made.follow(initial_placement(replace(one_stage(replicas=2), epoch=1)))
    made.arrive(3, first=3)
    assert made.log[-1] == "3 call 1 to split-cpu-0 for block 0: [3]"


def test_a_new_plan_sends_what_waits_by_its_own_batch_and_replicas() -> None:
    made = scene(one_stage(), [1, 1, 1])
    made.arrive(1)
    made.follow(initial_placement(replace(one_stage(replicas=2), epoch=1)))
    assert made.log[-1] == "1 call 1 to split-cpu-0 for block 0: [1 2]"
