"""Several things at once: what one event must not do to the others."""

from __future__ import annotations

import pytest

from deployments.ingress.core.outcomes import LONGEST_RETRY_S
from earlyexit.errors import AdmissionError, OverloadedError
from earlyexit.network.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.ingress.core.core_scene import ALL_SLOTS, CoreScene


def three_stages(epoch: int = 1) -> PlacedPlan:
    stages = tuple(
        Stage(device="cpu", replicas=1, splits=(Split(first=first, end=end, batch=4),))
        for first, end in ((0, 2), (2, 3), (3, 4))
    )
    return PlacedPlan(plan=Plan(stages=stages, epoch=epoch), slots=ALL_SLOTS)


def test_what_is_reserved_is_the_sum_of_all_later_stages() -> None:
    scene = CoreScene(three_stages())
    scene.submit("a")
    for call, (block, took_s) in enumerate(((2, 1.0), (3, 2.0))):
        scene.now_s += took_s
        scene.go_on(call, "a", block=block)
    scene.now_s += 4.0
    scene.answer(2, "a")
    scene.submit("b", deadline_s=99.0)
    assert scene.calls[-1].reserve_s == 2.0 + 4.0
    scene.follow(three_stages(epoch=2))
    scene.submit("c", deadline_s=99.0)
    assert scene.calls[-1].reserve_s == 2.0 + 4.0  # the new plan knows what the one before has learnt


def test_a_request_of_exactly_what_waits_here_at_most_is_told_to_come_back() -> None:
    scene = CoreScene(max_queued=3)
    scene.submit("a")
    with pytest.raises(OverloadedError):
        scene.submit("bcd")


def test_who_is_refused_for_lateness_is_told_when_it_would_be_in_time() -> None:
    scene = CoreScene(slo_s=1.0)
    scene.submit("efgh")
    scene.until(10.0)  # these took longer than the SLO
    scene.submit("i")
    with pytest.raises(AdmissionError, match=r"no answer is to be had within 1 s now, but .* s later") as caught:
        scene.core.check(9, 11.0, 10.0)
    with pytest.raises(AdmissionError) as later:
        scene.core.check(18, 11.0, 10.0)
    assert 0 < caught.value.retry_after_s < later.value.retry_after_s
    with pytest.raises(AdmissionError) as much_later:
        scene.core.check(9000, 11.0, 10.0)
    assert much_later.value.retry_after_s == LONGEST_RETRY_S


def test_answers_by_an_older_plan_count_for_no_exit_of_the_present_one() -> None:
    scene = CoreScene()
    scene.submit("ab")
    scene.follow(three_stages(epoch=2))
    scene.go_on(0, "a")
    scene.answer(1, "a")  # by the present plan's stage, but it began before
    scene.answer(0, "b", block=1)
    assert (scene.core.counts.exits, scene.core.counts.answered) == ({}, 2)
