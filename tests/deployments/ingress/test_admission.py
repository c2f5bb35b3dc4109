from __future__ import annotations

import heapq
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import pytest

from deployments.ingress.admission import EFFICIENCY, FILLING, PROOFS, SAFETY, Admission

# The rule, by hand: 100 answers per second, a way of 0.2 s, an SLO of 1 s of which 0.9 s are counted on


def known(**predicted: float) -> Admission:
    return Admission(predicted or {"rate_per_s": 100.0, "latency_s": 0.2}, slo_s=1.0, num_ingresses=1)


def late(admission: Admission, waiting: int, *, num_inputs: int = 1, left_s: float = 1.0, at_s: float = 0.0) -> float:
    return admission.late_s(num_inputs, left_s, waiting=waiting, unanswered=waiting + 1, now_s=at_s)


@pytest.mark.parametrize(
    ("waiting", "num_inputs", "left_s", "late_s"),
    [
        pytest.param(69, 1, 1.0, 0.0, id="just-in-time"),
        pytest.param(89, 1, 1.0, 0.2, id="0.2-s-too-much-waits"),
        pytest.param(40, 50, 1.0, 0.2, id="a-request-waits-for-its-last-input"),
        pytest.param(69, 1, 0.5, 0.45, id="a-sooner-deadline"),
    ],
)
def test_before_anything_was_seen_what_waits_goes_at_the_plans_rate_and_takes_the_plans_way(
    waiting: int, num_inputs: int, left_s: float, late_s: float
) -> None:
    assert late(known(), waiting, num_inputs=num_inputs, left_s=left_s) == pytest.approx(late_s, abs=1e-9)


def test_an_ingress_has_its_part_of_the_rate() -> None:
    predicted = {"rate_per_s": 100.0, "latency_s": 0.2}
    assert Admission(predicted, slo_s=1.0, num_ingresses=4).capacity_per_s == 25.0


def test_an_idle_service_begins_whatever_comes_however_bad_its_name() -> None:
    admission = known(rate_per_s=0.001, latency_s=1000.0)
    assert admission.late_s(256, 1.0, waiting=0, unanswered=0, now_s=0.0) == 0.0
    assert admission.late_s(1, 1.0, waiting=1, unanswered=1, now_s=0.0) > 0.0


def test_inputs_that_only_fill_the_stages_are_no_reason_to_refuse_others() -> None:
    admission = known(rate_per_s=100.0, latency_s=5.0)
    most = int(FILLING * 100)
    assert admission.late_s(1, 1.0, waiting=0, unanswered=most, now_s=0.0) == 0.0
    assert admission.late_s(1, 1.0, waiting=0, unanswered=most + 1, now_s=0.0) > 0.0


def test_a_service_of_which_nothing_is_known_begins_everything_until_it_was_measured() -> None:
    admission = known(unknown=0.0)
    assert late(admission, 10_000) == 0.0
    work_a_second(admission, 0.0, answers=50, waiting=5)
    assert late(admission, 10_000, at_s=1.0) > 0.0
    assert admission.capacity_per_s == 50.0


@pytest.mark.parametrize("predicted", [{"rate_per_s": 0.0, "latency_s": 0.2}, {"rate_per_s": None, "latency_s": None}])
def test_a_plan_that_predicts_no_rate_says_nothing(predicted: dict[str, float | None]) -> None:
    admission = Admission(predicted, slo_s=1.0, num_ingresses=1)
    assert late(admission, 10_000) == 0.0
    work_a_second(admission, 0.0, answers=50, waiting=5)
    assert late(admission, 10_000, at_s=1.0) > 0.0


def work_a_second(admission: Admission, from_s: float, *, answers: int, waiting: int, latency_s: float = 0.2) -> None:
    """Answers in one moment, each with 10 inputs ahead; `waiting` inputs wait all the time."""
    admission.observe(waiting, waiting + 1, from_s)
    for _ in range(answers):
        admission.answered(from_s + 0.5)
        admission.went_deep(latency_s, 10, from_s + 0.5)


def test_the_rate_moves_half_way_to_what_is_answered_while_inputs_wait() -> None:
    admission = known()
    for second in range(3):
        work_a_second(admission, float(second), answers=60, waiting=5)
    admission.observe(0, 0, 3.0)
    assert admission.capacity_per_s == pytest.approx(60 + 40 / 2**3)


def test_few_answers_because_few_inputs_came_say_nothing_of_the_rate() -> None:
    admission = known()
    work_a_second(admission, 0.0, answers=20, waiting=0)
    admission.observe(0, 0, 1.0)
    assert admission.capacity_per_s == 100.0


def test_answers_while_nothing_departs_say_nothing_of_the_rate() -> None:
    admission = known()
    admission.answered(0.5)
    admission.observe(0, 0, 2.0)
    assert admission.capacity_per_s == 100.0


def test_what_was_learnt_of_the_rate_holds_for_the_next_plan_and_its_way_is_new() -> None:
    admission = known()
    for second in range(20):
        work_a_second(admission, float(second), answers=80, waiting=5, latency_s=0.5)
    admission.observe(0, 0, 20.0)
    admission.follow({"rate_per_s": 200.0, "latency_s": 0.3})
    assert admission.capacity_per_s == pytest.approx(160.0)
    assert late(admission, 159, at_s=20.0) == pytest.approx(160 / 160 + 0.3 - 0.9)


@pytest.mark.parametrize(("answers", "bound"), [(0, EFFICIENCY[0]), (5000, EFFICIENCY[1])], ids=["slow", "fast"])
def test_the_rate_stays_within_bounds_of_the_plans(answers: int, bound: float) -> None:
    admission = known()
    for second in range(30):
        work_a_second(admission, float(second), answers=answers, waiting=5)
    admission.observe(0, 0, 30.0)
    assert admission.capacity_per_s == pytest.approx(100 * bound)


def test_once_seen_inputs_take_what_is_ahead_of_them_and_what_99_of_100_took_beyond_that() -> None:
    admission = known()
    work_a_second(admission, 0.0, answers=99, waiting=0, latency_s=0.3)  # 0.1 s of it for 10 ahead
    admission.went_deep(9.0, 10, 0.5)
    late_s = admission.late_s(1, 1.0, waiting=1, unanswered=99, now_s=1.0)
    assert late_s == pytest.approx(100 / 100 + 0.2 - 0.9)


def test_what_was_slow_is_forgotten_with_the_seconds_in_which_it_was() -> None:
    admission = known()
    work_a_second(admission, 0.0, answers=10, waiting=0, latency_s=30.0)
    assert late(admission, 1, at_s=1.0) > 20.0
    assert late(admission, 1, at_s=10.0) == 0.0


# A service of two stages, simulated; half of the inputs leave after the first

SLO_S = 0.4


@dataclass(kw_only=True)
class SimulatedStage:
    """Replicas that run up to a batch at a time."""

    replicas: int
    batch: int = 16
    fixed_s: float = 0.016
    each_s: float = 0.002
    running: int = 0

    def seconds(self, size: int) -> float:
        return self.fixed_s + self.each_s * size

    @property
    def per_s(self) -> float:
        return self.replicas * self.batch / self.seconds(self.batch)


@dataclass(kw_only=True, eq=False)
class Input:
    arrived_s: float
    ahead: int


class Service:
    """An ingress with its admission before two stages: sends, as the dispatcher does, up to two calls per replica."""

    def __init__(self, first: SimulatedStage, second: SimulatedStage, *, known_as: float = 1.0) -> None:
        """`known_as`: the rate that the plan predicts, over the real one."""
        self.first, self.second = first, second
        self.admission = Admission(
            {"rate_per_s": self.per_s * known_as, "latency_s": 0.8 * SLO_S}, slo_s=SLO_S, num_ingresses=1
        )
        self.now_s = 0.0
        self.outcomes: list[tuple[float, str]] = []
        """When an input arrived, and what became of it."""
        self._rng = random.Random(1)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serials = count()
        self._waiting: deque[Input] = deque()
        self._calls: deque[list[Input]] = deque()
        self._between: deque[Input] = deque()
        self._unheard = 0
        self._unanswered = 0

    @property
    def per_s(self) -> float:
        return min(self.first.per_s, self.second.per_s / 0.5)

    def at(self, second: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (second, next(self._serials), action))

    def load(self, rate_per_s: float, from_s: float, until_s: float) -> None:
        while (from_s := from_s + self._rng.expovariate(rate_per_s)) < until_s:
            self.at(from_s, self.arrive)

    def run(self, from_s: float, until_s: float) -> Counter[str]:
        """What became of the inputs that arrived within."""
        while self._events and self._events[0][0] < until_s + SLO_S:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        return Counter(outcome for arrived_s, outcome in self.outcomes if from_s <= arrived_s < until_s)

    def arrive(self) -> None:
        waiting = len(self._waiting)
        if self.admission.late_s(1, SLO_S, waiting=waiting, unanswered=self._unanswered, now_s=self.now_s):
            self.outcomes.append((self.now_s, "refused"))
            return
        self._waiting.append(Input(arrived_s=self.now_s, ahead=self._unanswered))
        self._unanswered += 1
        self._pump()

    def _pump(self) -> None:
        stage = self.first
        while self._waiting and (
            self._unheard < stage.replicas or (self._unheard < 2 * stage.replicas and len(self._waiting) >= stage.batch)
        ):
            size = min(stage.batch, len(self._waiting))
            self._calls.append([self._waiting.popleft() for _ in range(size)])
            self._unheard += 1
        self.admission.observe(len(self._waiting), self._unanswered, self.now_s)
        self._start()

    def _start(self) -> None:
        while self._calls and self.first.running < self.first.replicas:
            call = [each for each in self._calls.popleft() if self._has_time(each, self.first)]
            self.first.running += 1
            self.at(self.now_s + (self.first.seconds(len(call)) if call else 0), lambda call=call: self._heard(call))  # type: ignore[misc] # binds the value
        while self._between and self.second.running < self.second.replicas:
            size = min(self.second.batch, len(self._between))
            batch = [
                each for each in (self._between.popleft() for _ in range(size)) if self._has_time(each, self.second)
            ]
            if batch:
                self.second.running += 1
                self.at(self.now_s + self.second.seconds(len(batch)), lambda batch=batch: self._ended(batch))  # type: ignore[misc] # binds the value

    def _has_time(self, each: Input, stage: SimulatedStage) -> bool:
        """A stage drops what it cannot answer in time."""
        if self.now_s + stage.seconds(stage.batch) <= each.arrived_s + SLO_S:
            return True
        self._unanswered -= 1
        self.outcomes.append((each.arrived_s, "missed"))
        self.admission.went_deep(SLO_S, each.ahead, self.now_s)
        return False

    def _heard(self, call: list[Input]) -> None:
        self.first.running -= 1
        self._unheard -= 1
        for each in call:
            if self._rng.random() < 0.5:
                self._between.append(each)
            else:
                self._answer(each, deep=False)
        self._pump()

    def _ended(self, batch: list[Input]) -> None:
        self.second.running -= 1
        for each in batch:
            self._answer(each, deep=True)
        self._pump()

    def _answer(self, each: Input, *, deep: bool) -> None:
        latency_s = self.now_s - each.arrived_s
        self._unanswered -= 1
        self.outcomes.append((each.arrived_s, "in time" if latency_s <= SLO_S else "missed"))
        self.admission.answered(self.now_s)
        if deep:
            self.admission.went_deep(latency_s, each.ahead, self.now_s)


def balanced(*, known_as: float = 1.0) -> Service:
    return Service(SimulatedStage(replicas=2), SimulatedStage(replicas=1), known_as=known_as)


def narrow_at_its_end() -> Service:
    """Its queue is before the second stage, where the ingress has nothing waiting."""
    return Service(SimulatedStage(replicas=2), SimulatedStage(replicas=1, fixed_s=0.024, each_s=0.003))


def goodput(service: Service, outcomes: Counter[str], seconds: float) -> float:
    """Over what the service can do."""
    return outcomes["in time"] / seconds / service.per_s


def kept(outcomes: Counter[str]) -> float:
    """Share of the admitted inputs that were answered in time."""
    return outcomes["in time"] / (outcomes["in time"] + outcomes["missed"])


@pytest.mark.parametrize(
    ("build", "times"),
    [
        pytest.param(balanced, 1.1, id="a-little-too-much"),
        pytest.param(balanced, 3.0, id="three-times-too-much"),
        pytest.param(lambda: balanced(known_as=3.0), 3.0, id="plan-promises-thrice-the-rate"),
        pytest.param(lambda: balanced(known_as=0.2), 3.0, id="plan-knows-a-fifth-of-the-rate"),
        pytest.param(narrow_at_its_end, 1.1, id="last-stage-narrow-a-little-too-much"),
        pytest.param(narrow_at_its_end, 3.0, id="last-stage-narrow-three-times-too-much"),
    ],
)
def test_under_overload_the_admitted_are_in_time_and_the_service_is_full(
    build: Callable[[], Service], times: float
) -> None:
    service = build()
    service.load(times * service.per_s, 0.0, 13.0)
    outcomes = service.run(3.0, 13.0)
    assert kept(outcomes) >= 0.99
    assert goodput(service, outcomes, 10.0) >= 0.95


@pytest.mark.parametrize("build", [balanced, narrow_at_its_end], ids=["balanced", "last-stage-narrow"])
def test_at_60_percent_load_nothing_is_refused(build: Callable[[], Service]) -> None:
    service = build()
    service.load(0.6 * service.per_s, 0.0, 10.0)
    assert service.run(0.0, 10.0).keys() == {"in time"}


def test_a_burst_after_idleness_fills_the_buffer_and_what_is_admitted_of_it_is_in_time() -> None:
    service = balanced()
    service.load(0.3 * service.per_s, 0.0, 5.0)
    for _ in range(1000):
        service.at(6.0, service.arrive)
    outcomes = service.run(6.0, 6.1)
    share = outcomes["in time"] / (service.per_s * SLO_S)
    assert kept(outcomes) >= 0.97
    assert 0.65 < share < 1 - SAFETY  # of what could be answered within the SLO, the way through the stages left aside


@pytest.mark.parametrize("which", ["first", "second"])
def test_a_service_that_loses_half_of_a_stage_is_followed_within_four_seconds(which: str) -> None:
    service = Service(SimulatedStage(replicas=4), SimulatedStage(replicas=2))
    service.load(0.9 * service.per_s, 0.0, 15.0)

    def lose_half() -> None:
        stage = getattr(service, which)
        stage.replicas //= 2

    service.at(5.0, lose_half)
    assert service.run(0.0, 4.0).keys() == {"in time"}
    outcomes = service.run(9.0, 15.0)
    assert kept(outcomes) >= 0.99
    assert goodput(service, outcomes, 6.0) >= 0.95


def test_a_service_that_recovers_is_full_again_within_seconds() -> None:
    service = balanced()
    service.first.replicas = 1
    service.load(3 * SimulatedStage(replicas=2).per_s, 0.0, 16.0)
    service.at(8.0, lambda: setattr(service.first, "replicas", 2))
    assert math.isclose(service.per_s, SimulatedStage(replicas=1).per_s)
    service.run(0.0, 8.0)
    outcomes = service.run(10.0, 16.0)
    assert kept(outcomes) >= 0.99
    assert goodput(service, outcomes, 6.0) >= 0.95


def proving(*, took_s: float, late: int = 0) -> Admission:
    """A second of 100 answers, each with as many ahead as came before it; the last ones late."""
    admission = known()
    for ahead in range(100):
        is_late = ahead >= 100 - late
        admission.went_deep(1.5 if is_late else took_s, ahead, 0.5)
    admission.observe(0, 0, 0.5)
    return admission


def test_an_input_is_begun_if_others_with_as_much_ahead_were_in_time_whatever_the_estimate_says() -> None:
    admission = proving(took_s=0.95)
    most = 100 - PROOFS
    assert admission.late_s(1, 1.0, waiting=1, unanswered=most, now_s=2.0) == 0.0
    assert admission.late_s(1, 1.0, waiting=1, unanswered=most + 1, now_s=2.0) > 0.0


@pytest.mark.parametrize(("late", "is_begun"), [(1, True), (2, False)])
def test_where_more_than_one_in_a_hundred_was_late_only_the_estimate_counts(late: int, *, is_begun: bool) -> None:
    admission = proving(took_s=0.95, late=late)
    assert (admission.late_s(1, 1.0, waiting=1, unanswered=90, now_s=2.0) == 0.0) == is_begun


def test_a_new_plan_begins_without_proof() -> None:
    admission = proving(took_s=0.95)
    assert admission.late_s(1, 1.0, waiting=1, unanswered=90, now_s=2.0) == 0.0
    admission.follow({"rate_per_s": 100.0, "latency_s": 0.5})
    assert admission.late_s(1, 1.0, waiting=90, unanswered=90, now_s=2.0) > 0.0
