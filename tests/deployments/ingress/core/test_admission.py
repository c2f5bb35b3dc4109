"""Admission control: the limit of unanswered inputs or tokens."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.core.admission import (
    BURST,
    CONTESTED,
    DEEPEST_FALL,
    FALL,
    LEAP,
    MOST_RISE,
    PLANNED_SHARE,
    RISE,
    SAFETY,
    SPARE,
    Admission,
)
from deployments.ingress.core.generation import GenerationLoop
from deployments.ingress.core.inputs import IngressOptions
from earlyexit.engine.engine import Dispatch
from earlyexit.network.boundary import Split
from earlyexit.sequences.sequence import SequenceProgress
from optimizer.plans.plan import Plan, Stage

# The rule, by hand: 100 answers per second and an SLO of 1 s

BEGIN = 100 * (1 - BURST)
"""The first limit."""


def plan(dispatch: Dispatch = "work-conserving", *, length: int | None = None, **predicted: float | None) -> Plan:
    """Returns two replicas with batches of 8, then one with batches of 4 and 8. `length`: tokens of an input."""
    ends = ((1, 8), (2, 4), (3, 8))
    splits = [
        Split(first=end - 1, end=end, batch=batch, tokens=None if length is None else batch * length)
        for end, batch in ends
    ]
    stages = (
        Stage(device="V100", replicas=2, splits=(splits[0],)),
        Stage(device="V100", replicas=1, splits=tuple(splits[1:])),
    )
    return Plan(stages=stages, dispatch=dispatch, predicted=predicted)


def known(rate_per_s: float = 100.0) -> Admission:
    return Admission(plan(rate_per_s=rate_per_s), slo_s=1.0, num_ingresses=1)


def late(
    admission: Admission, unanswered: float, *, num_inputs: int = 1, left_s: float = 1.0, at_s: float = 0.0
) -> float:
    return admission.late_s(num_inputs, left_s, unanswered=int(unanswered), now_s=at_s)


@pytest.mark.parametrize(
    ("unanswered", "num_inputs", "left_s", "late_s"),
    [
        pytest.param(BEGIN - 1, 1, 1.0, 0.0, id="at-the-limit"),
        pytest.param(BEGIN, 1, 1.0, 1 / BEGIN, id="one-too-many"),
        pytest.param(BEGIN + 6, 1, 1.0, 0.1, id="as-many-as-are-answered-in-0.1-s"),
        pytest.param(BEGIN - 10, 17, 1.0, 0.1, id="a-request-waits-for-its-last-input"),
        pytest.param(BEGIN / 2, 7, 0.5, 0.1, id="an-earlier-deadline"),
    ],
)
def test_the_first_limit_is_a_share_of_the_plans_rate_times_the_slo(
    unanswered: float, num_inputs: int, left_s: float, late_s: float
) -> None:
    assert late(known(), unanswered, num_inputs=num_inputs, left_s=left_s) == pytest.approx(late_s)


def test_the_first_limit_is_divided_between_ingresses() -> None:
    admission = Admission(plan(rate_per_s=100.0), slo_s=2.0, num_ingresses=1)
    # With twice the SLO, the limit is twice as high, and each input still waits 1 / 70 s.
    assert late(admission, 2 * BEGIN, left_s=2.0) == pytest.approx(2 / (2 * BEGIN))
    assert Admission(plan(rate_per_s=100.0), slo_s=1.0, num_ingresses=4).limit == pytest.approx(BEGIN / 4)


def overload(admission: Admission, seconds: int = 30, answers: int = 50) -> None:
    """Adds late answers in every second."""
    for second in range(seconds):
        for _ in range(answers):
            admission.answered(1.2, 60, 1, float(second))


@pytest.mark.parametrize("rate_per_s", [0.0, None])
def test_without_a_predicted_rate_everything_is_admitted_until_an_answer_is_late(rate_per_s: float | None) -> None:
    admission = Admission(plan(rate_per_s=rate_per_s), slo_s=1.0, num_ingresses=1)
    assert late(admission, 10_000) == 0.0
    admission.answered(0.3, 5_000, 1, 0.1)
    assert late(admission, 10_000) == late(admission, 10_000, left_s=-0.1) == 0.0
    admission.answered(1.3, 300, 1, 0.2)
    assert admission.limit == pytest.approx(300 * (1 - FALL))


# Answers as (number, latency, inputs ahead, time), and the factor by which they change the limit.
ANSWERED = {
    "a late answer lowers it": ([(1, 0.95, 60, 0.1)], 1 - FALL),
    "many answers in time raise it again": ([(1, 0.95, 60, 0.1), (100, 0.85, 60, 0.2)], (1 - FALL) * (1 + RISE) ** 100),
    "simultaneous late answers lower it once, by a bounded share": ([(50, 1.2, 60, 0.1)], 1 - DEEPEST_FALL),
    "late answers after one SLO lower it again": ([(50, 1.2, 60, 0.1), (50, 1.2, 60, 1.1)], (1 - DEEPEST_FALL) ** 2),
    "an answer with few inputs ahead has no effect": ([(200, 0.2, 10, 0.1), (1, 1.2, 10, 0.1)], 1.0),
    "unless too many of these are late": ([(92, 0.2, 10, 0.1), (9, 1.2, 10, 0.6)], 1 - FALL),
    "and none was in time just before": ([(92, 0.2, 10, 0.1), (90, 1.2, 60, 0.34)], 1.0),
    "answers of the last window count less": ([(120, 0.2, 10, 0.1), (8, 1.2, 10, 4.2)], 1 - FALL),
    "8 % may be late": ([(92, 0.85, 60, 0.1), (8, 1.2, 60, 0.1)], (1 + RISE) ** 92),
    "more may not": ([(92, 0.85, 60, 0.1), (9, 1.2, 60, 0.1)], (1 + RISE) ** 92 * (1 - FALL)),
}


@pytest.mark.parametrize(("answers", "times"), ANSWERED.values(), ids=ANSWERED)
def test_answers_move_the_limit(answers: list[tuple[int, float, int, float]], times: float) -> None:
    admission = known()
    for often, latency_s, ahead, at_s in answers:
        for _ in range(often):
            admission.answered(latency_s, ahead, 1, at_s)
    assert admission.limit == pytest.approx(BEGIN * times)


@pytest.mark.parametrize(("refused", "times"), [(3, 1.0), (4, 1 - FALL)])
def test_few_late_answers_lower_the_limit_only_if_as_many_inputs_were_refused(refused: int, times: float) -> None:
    admission = known()
    for latency_s, ahead, at_s in (*[(0.2, 10, 0.1)] * 120, *[(1.2, 60, 0.6)] * 3):
        admission.answered(latency_s, ahead, 1, at_s)
    assert late(admission, BEGIN, num_inputs=refused) > 0.0
    admission.answered(1.2, 60, 1, 0.6)
    assert admission.limit == pytest.approx(BEGIN * times)


def test_a_pause_of_a_sequence_makes_one_token_late() -> None:
    loop = GenerationLoop(IngressOptions(tpot_slo_s=1.0), plan(rate_per_s=100.0), random.Random(0))
    state = loop.begin(SequenceProgress(1, 9, 1), 0.0)
    for now_s in (0.0, 5.0, 5.5, 6.0):  # the mean stays above the SLO
        loop.on_token(state, 2, now_s)
    assert loop._tpot.limit == pytest.approx(BEGIN * (1 - FALL))


def test_an_input_that_misses_the_slo_lowers_the_limit_but_not_one_with_an_earlier_deadline() -> None:
    admission = known()
    admission.given_up(0.4, 60, 1, 0.1)
    assert admission.limit == BEGIN
    admission.given_up(1.0, 60, 1, 0.1)
    assert admission.limit == pytest.approx(BEGIN * (1 - FALL))


@pytest.mark.parametrize(
    ("refuses", "slowest_s", "times"),
    [
        pytest.param(True, 0.6, SPARE * (1 - SAFETY) / 0.6, id="until-the-slowest-has-no-time-to-spare"),
        pytest.param(True, 0.1, LEAP, id="no-more-than-twice"),
        pytest.param(True, 0.8, 1.0, id="not-if-the-slowest-had-no-time-to-spare"),
        pytest.param(False, 0.3, 1.0, id="not-if-nothing-was-refused"),
    ],
)
def test_the_limit_leaps_if_inputs_were_refused_while_the_slowest_had_time_to_spare(
    refuses: bool, slowest_s: float, times: float
) -> None:
    admission = known()
    assert not refuses or late(admission, BEGIN) > 0.0
    for _ in range(100):
        admission.answered(0.1, 10, 1, 0.5)  # with so few inputs ahead, it has no effect
    admission.answered(slowest_s, 60, 1, 0.5)
    late(admission, 1, at_s=5.0)
    risen = BEGIN * (1 + RISE) * times
    assert admission.limit == pytest.approx(risen)
    admission.answered(slowest_s, 100, 1, 5.1)
    late(admission, 1, at_s=10.0)  # nothing was refused in this window
    assert admission.limit == pytest.approx(risen + min(RISE * risen, MOST_RISE))


def test_a_new_plan_begins_a_new_window() -> None:
    admission = known()
    assert late(admission, BEGIN) > 0.0
    admission.follow(plan(rate_per_s=100.0))
    assert late(admission, BEGIN, at_s=3.9) > 0.0
    admission.answered(0.1, 60, 1, 3.9)  # while the queues of the new plan fill
    assert late(admission, BEGIN + 1, at_s=4.1) > 0.0


def test_a_new_plan_takes_over_the_ratio_of_limit_to_prediction_within_bounds() -> None:
    admission = known()
    overload(admission, seconds=1)
    admission.follow(plan(rate_per_s=200.0))
    assert admission.limit == pytest.approx(2 * BEGIN * (1 - DEEPEST_FALL))
    admission.follow(plan())
    assert admission.limit == pytest.approx(2 * BEGIN * (1 - DEEPEST_FALL))
    admission = known()
    overload(admission)
    assert admission.limit == pytest.approx(1.0, abs=0.2)
    admission.follow(plan(rate_per_s=1000.0))  # the ratio is bounded, because plans may differ
    assert admission.limit == pytest.approx(10 * BEGIN * PLANNED_SHARE[0])
    admission = Admission(plan(), slo_s=1.0, num_ingresses=1)
    overload(admission, seconds=1)
    admission.follow(plan(rate_per_s=100.0))  # the first plan that predicts a rate
    assert admission.limit == pytest.approx(BEGIN)


def test_deferred_stages_admit_a_full_batch_per_replica_and_split_however_late_answers_are() -> None:
    admission = Admission(plan("deferred", rate_per_s=100.0), slo_s=1.0, num_ingresses=2)
    overload(admission)
    assert admission.limit == pytest.approx((2 * 8 + 4 + 8) / 2)
    admission.follow(plan("deferred", rate_per_s=1.0))
    assert admission.limit == pytest.approx((2 * 8 + 4 + 8) / 2)
    many = Admission(plan("deferred", rate_per_s=100.0), slo_s=1.0, num_ingresses=100)
    overload(many, answers=1)
    assert many.limit == 1.0, "each of many ingresses admits one input, however late answers are"


@pytest.mark.parametrize(
    ("dispatch", "refused"),
    [("deferred", (28, 30)), ("filling", (1, 2, 27, 28, 30)), ("work-conserving", (1, 2, 27, 28, 30))],
)
def test_idle_services_and_deferred_stages_whose_batches_cannot_fill_admit_requests_of_any_size(
    dispatch: Dispatch, refused: tuple[int, ...]
) -> None:
    admission = Admission(plan(dispatch, rate_per_s=100.0), slo_s=1.0, num_ingresses=1)
    overload(admission, seconds=60)
    inside = (0, 1, 2, 27, 28, 30)
    assert tuple(each for each in inside if admission.late_s(8, 0.999, unanswered=each, now_s=60.0)) == refused


@pytest.mark.parametrize(("slow", "times"), [(1, SPARE * (1 - SAFETY) / 0.6), (2, 1.0)])
def test_one_slow_answer_of_a_hundred_does_not_keep_the_limit_from_leaping(slow: int, times: float) -> None:
    admission = known()
    admission.late_s(1, 1.0, unanswered=0, now_s=0.0)  # a window begins
    admission.late_s(1, 1.0, unanswered=1000, now_s=0.1)
    before = admission.limit
    for latency_s in (*[0.85] * slow, *[0.6] * (100 - slow)):
        admission.answered(latency_s, 60, 1, 0.5)
    risen = admission.limit / before
    admission.answered(0.1, 0, 1, 5.0)
    assert admission.limit == pytest.approx(before * risen * times)


LENGTH = 40
"""Tokens of an input of the plan's workload."""
ROOM = 100.0 * LENGTH * (1 - BURST)
"""The first limit in tokens, for 100 inputs per second and an SLO of one second."""


@pytest.mark.parametrize(
    ("tokens", "mean", "full"),
    [
        pytest.param(10_000, 40.0, 4 * 40, id="inputs-bound-it"),
        pytest.param(100, 40.0, 100, id="tokens-bound-it"),
        pytest.param(10_000, None, 10_000, id="lengths-are-not-known"),
    ],
)
def test_a_batch_is_full_by_its_inputs_or_its_tokens(tokens: int, mean: float | None, full: float) -> None:
    stage = Stage(device="V100", replicas=1, splits=(Split(first=0, end=3, batch=4, tokens=tokens),))
    waiting = Plan(stages=(stage,), dispatch="deferred", predicted={"rate_per_s": 1e-3, "tokens_per_input": mean})
    admission = Admission(waiting, slo_s=1.0, num_ingresses=1)
    for second in range(300):
        admission.answered(1.2, 60 * LENGTH, LENGTH, float(second))
    assert admission.limit == pytest.approx(full)


Seen = tuple[str, int, int, float]
"""An event, the number of inputs before it, its inputs, and seconds."""


@settings(max_examples=200, deadline=None)
@given(
    dispatch=st.sampled_from(["work-conserving", "deferred"]),
    length=st.integers(1, 300),
    seen=st.lists(
        st.tuples(
            st.sampled_from(["ask", "answer", "answer", "give up", "follow"]),
            st.integers(0, 200),
            st.integers(1, 5),
            st.floats(0.05, 2.0),
        ),
        max_size=60,
    ),
)
def test_tokens_and_inputs_give_the_same_decisions_if_all_inputs_are_equally_long(
    dispatch: Dispatch, length: int, seen: list[Seen]
) -> None:
    one = Admission(plan(dispatch, rate_per_s=100.0), slo_s=1.0, num_ingresses=2)

    def by_its_tokens(rate_per_s: float) -> Plan:
        return plan(dispatch, length=length, rate_per_s=rate_per_s, tokens_per_input=float(length))

    many = Admission(by_its_tokens(100.0), slo_s=1.0, num_ingresses=2)
    now_s = 0.0
    for what, ahead, number, seconds in seen:
        now_s += seconds / 4
        if what == "ask":
            late_s = one.late_s(number, seconds, unanswered=ahead, now_s=now_s)
            same_s = many.late_s(number * length, seconds, unanswered=ahead * length, now_s=now_s)
            assert same_s == pytest.approx(late_s, abs=1e-9)
        elif what == "follow":
            rate_per_s = 100.0 * seconds
            one.follow(plan(dispatch, rate_per_s=rate_per_s), float(length))
            many.follow(by_its_tokens(rate_per_s), float(length))
        else:
            teach = "answered" if what == "answer" else "given_up"
            getattr(one, teach)(seconds, ahead, 1, now_s)
            getattr(many, teach)(seconds, ahead * length, length, now_s)
        assert many.limit == pytest.approx(one.limit * length)


# Limits that are low compared with the lengths of inputs


@pytest.mark.parametrize(
    ("length", "ahead"),
    [
        pytest.param(600, 0, id="longer-than-it"),
        pytest.param(250, 0, id="two-would-not-fit"),
        pytest.param(150, 150, id="two-fit-and-three-would-not"),
    ],
)
def test_a_limit_that_is_too_low_for_contested_inputs_leaps_too(length: int, ahead: int) -> None:
    admission = Admission(plan(length=LENGTH), slo_s=1.0, num_ingresses=1)
    admission.answered(1.2, 400 / (1 - FALL), LENGTH, 0.0)
    assert admission.limit == pytest.approx(400)
    assert ahead < CONTESTED * admission.limit
    admission.late_s(length, 1.0, unanswered=ahead, now_s=5.0)  # admits the request, and ends the window
    assert admission.late_s(length, 1.0, unanswered=ahead + length, now_s=5.0) > 0
    admission.answered(0.1, ahead, length, 5.1)
    admission.late_s(length, 1.0, unanswered=0, now_s=10.0)
    assert admission.limit == pytest.approx(400 * LEAP)


def test_an_input_that_is_late_because_of_its_own_length_does_not_lower_the_limit() -> None:
    admission = Admission(plan(length=LENGTH, rate_per_s=100.0, tokens_per_input=LENGTH), slo_s=1.0, num_ingresses=1)
    for second in range(20):
        admission.answered(1.2, 0, 2000, float(second))
    assert admission.limit == pytest.approx(ROOM)
    for _ in range(2):
        admission.answered(1.2, 0, 1000, 20.0)  # a shorter input
    assert admission.limit == pytest.approx(ROOM * (1 - FALL))


# Plans with another unit


def test_the_ratio_of_limit_to_prediction_is_converted_between_inputs_and_tokens() -> None:
    admission = Admission(plan(rate_per_s=100.0), slo_s=1.0, num_ingresses=1)
    admission.answered(1.2, 60, 1, 0.1)
    admission.follow(plan(length=LENGTH, rate_per_s=200.0, tokens_per_input=float(LENGTH)), 50.0)
    assert admission.limit == pytest.approx(2 * ROOM * (1 - FALL))
    admission.answered(1.2, 60 * LENGTH, LENGTH, 1.2)
    admission.follow(plan(rate_per_s=100.0), 50.0)
    assert admission.limit == pytest.approx(BEGIN * (1 - FALL) ** 2)
    admission.answered(1.2, 60, 1, 1.3)  # the lowest limit within this SLO was in tokens
    assert admission.limit == pytest.approx(BEGIN * (1 - FALL) ** 3)
    assert not admission.counts_tokens
    admission.follow(plan(rate_per_s=50.0), 50.0)
    admission.answered(1.2, 60, 1, 1.4)  # or that of a faster plan
    assert admission.limit == pytest.approx(BEGIN / 2 * (1 - FALL) ** 4)
    # A plan without a prediction keeps the limit, converted by the mean tokens of inputs.
    admission = Admission(plan(rate_per_s=100.0), slo_s=1.0, num_ingresses=1)
    admission.follow(plan(length=LENGTH), 50.0)
    assert admission.limit == pytest.approx(50 * BEGIN)
    admission.follow(plan(), 25.0)  # inputs have become shorter since
    assert admission.limit == pytest.approx(2 * BEGIN)


@pytest.mark.parametrize("to_tokens", [True, False])
def test_before_the_first_input_a_plan_with_another_unit_has_no_limit(to_tokens: bool) -> None:
    one, other = plan(rate_per_s=100.0, tokens_per_input=40.0), plan(length=LENGTH)
    if not to_tokens:
        one, other = plan(length=LENGTH, rate_per_s=100.0, tokens_per_input=40.0), plan()
    admission = Admission(one, slo_s=1.0, num_ingresses=1)
    assert math.isfinite(admission.limit)
    admission.follow(other)
    assert math.isinf(admission.limit)
