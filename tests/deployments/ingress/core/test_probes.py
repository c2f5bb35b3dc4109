from __future__ import annotations

import math
import random
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest

from deployments.ingress.core import probes
from deployments.ingress.core.inputs import PendingInput
from deployments.ingress.core.probes import ExitObservations, Watch
from earlyexit.network.boundary import Answer, PackedArray, Split
from earlyexit.tasks.label import label_loss
from optimizer.plans.plan import Plan, PolicySpec, Stage
from profiles.records import ValueArray
from profiles.scores import FloatArray, Score
from profiles.stream import StreamShape

SHAPE = StreamShape(score="entropy", num_blocks=4, ramps=(0, 2))
BOTH = frozenset({0, 2})
Probed = PendingInput
SCORES: tuple[Score, ...] = ("entropy", "confidence")


def flight(serial: int, *, deadline_s: float = 10.0) -> Probed:
    return PendingInput(serial, 1.5, deadline_s)


def seen(each: Probed, block: int, *, score: float = 0.5, label: int = 1) -> tuple[Probed, Answer]:
    return each, Answer(sample_id="", exit=block, score=math.nan if block == 3 else score, value=label)


def plan(active: Iterable[int] = BOTH, *, stay: bool = False) -> Plan:
    split = Split(first=0, end=4, batch=4, ramps=tuple(sorted(active)), after_answer="stay" if stay else "stop")
    return Plan(stages=(Stage(device="cpu", replicas=1, splits=(split,)),), policy=PolicySpec(thresholds=0.5))


def begun(
    *flights: Probed,
    active: Iterable[int] = BOTH,
    stay: bool = False,
    watch: Watch = "probe",
) -> ExitObservations:
    book = ExitObservations(SHAPE, label_loss)
    assert book.begin(flights, plan(active, stay=stay), watch, 2.0)
    return book


def test_answers_of_any_shape_have_losses() -> None:
    def wrong_pixels(early: ValueArray, full: ValueArray) -> FloatArray:
        return np.asarray((early != full).mean((1, 2)), dtype=np.float64)

    probe = flight(1)
    book = ExitObservations(replace(SHAPE, zero_one=False), wrong_pixels)
    book.begin([probe], plan(), "probe", 2.0)
    book.answered(probe, 2, BOTH)
    for block, pixels in ((0, [[1, 1], [0, 0]]), (2, [[0, 1], [0, 0]]), (3, [[0, 0], [0, 0]])):
        book.observe([(probe, replace(seen(probe, block)[1], value=PackedArray.of(np.array(pixels))))])
    assert book.agreement == 0.75
    observations = book.take_completed()
    assert observations is not None
    assert observations.losses_NR.tolist() == [[0.5, 0.25]]


@pytest.mark.parametrize(
    ("exit_block", "blocks", "score"),
    [
        pytest.param(1, (0, 2), 0.5, id="an-exit-that-is-no-ramp"),
        pytest.param(0, (2,), 0.5, id="a-ramp-that-said-nothing"),
        pytest.param(0, (0, 2), math.nan, id="a-score-that-is-no-number"),
    ],
)
def test_inconsistent_probes_are_not_reported(exit_block: int, blocks: tuple[int, ...], score: float) -> None:
    probe = flight(1)
    book = begun(probe)
    book.answered(probe, exit_block, BOTH)
    book.observe([*(seen(probe, block, score=score) for block in blocks), seen(probe, 3)])
    assert (book.take_completed(), book.num_complete) == (None, 0)


@pytest.mark.parametrize(
    ("active_now", "active"),
    [
        pytest.param(frozenset({0}), [True, False], id="the-plan-at-its-answer"),
        pytest.param(frozenset({2}), None, id="neither-plan"),
    ],
)
def test_an_exit_at_a_newly_active_ramp_counts_for_the_current_plan(
    active_now: frozenset[int], active: list[bool] | None
) -> None:
    probe = flight(1)
    book = begun(probe, active={2})
    book.answered(probe, 0, active_now)
    book.observe([seen(probe, block) for block in (0, 2, 3)])
    observations = book.take_completed()
    assert (None if observations is None else observations.active_NR[0].tolist()) == active


def test_the_number_of_open_observations_is_limited() -> None:
    book = ExitObservations(SHAPE, label_loss, most_open=2)
    assert book.begin([flight(1)], plan(), "probe", 2.0)
    assert not book.begin([flight(2), flight(3)], plan(), "probe", 2.0)
    assert book.begin([flight(4)], plan(), "probe", 2.0)


def test_only_policies_with_the_same_score_can_be_observed() -> None:
    entropy, confidence = (ExitObservations(replace(SHAPE, score=score), label_loss) for score in SCORES)
    policies = [
        PolicySpec(name="entropy", thresholds=0.5),
        PolicySpec(name="recorded", thresholds=0.5, records="records.npz"),
        PolicySpec(name="confidence", thresholds=0.5),
        PolicySpec(name="patience", patience=2),
        None,
    ]
    assert [entropy.can_observe(policy) for policy in policies] == [True, True, False, False, False]
    assert [confidence.can_observe(policy) for policy in policies] == [False, True, True, False, True]


def test_inputs_that_stay_are_observed_at_the_active_ramps_only() -> None:
    inputs = [flight(serial) for serial in range(3)]
    book = begun(*inputs, active={0}, stay=True, watch="stay")
    for each, exit_block in zip(inputs, (0, 3, 0), strict=True):
        book.answered(each, exit_block, frozenset({0}))
    book.observe([seen(inputs[0], 0, score=0.25, label=2), seen(inputs[0], 3)])
    book.observe([seen(inputs[1], 0), seen(inputs[1], 2), seen(inputs[1], 3)])  # ramp 2 is of an earlier plan
    book.observe([seen(inputs[2], 3)])  # without a result of ramp 0
    found = book.take_completed()
    assert found is not None
    assert (found.stayed_N.tolist(), found.probe_N.tolist()) == ([True, True], [False, False])
    assert (found.exits_N.tolist(), found.active_NR.tolist()) == ([0, 3], [[True, False]] * 2)
    np.testing.assert_array_equal(found.scores_NR, np.array([[0.25, np.nan], [0.5, np.nan]], dtype=np.float32))
    np.testing.assert_array_equal(found.losses_NR, np.array([[1, np.nan], [0, np.nan]], dtype=np.float32))
    assert book.agreement == 0.5


def test_a_plan_that_stays_observes_all_inputs_and_a_share_of_them_as_probes() -> None:
    book = ExitObservations(SHAPE, label_loss)
    rng = random.Random(1)

    def drawn(served: Plan, share: float, count: int = 200) -> list[Watch | None]:
        return [book.draw([flight(serial)], served, share, rng, 2.0) for serial in range(count)]

    assert set(drawn(plan(), 0.0)) == {None}
    assert set(drawn(plan(stay=True), 0.0)) == {"stay"}
    assert set(drawn(plan((), stay=True), 0.0)) == {None}  # no ramp is active, so nothing would be observed
    assert 30 <= drawn(plan(stay=True), 0.25).count("probe") <= 70  # 50 are expected, with a standard deviation of 6
    patient = replace(plan(stay=True), policy=PolicySpec(name="patience", patience=2))
    assert set(drawn(patient, 0.25)) == {None}


@pytest.mark.parametrize("many", [1, 3, 1000])
def test_reports_do_not_depend_on_when_losses_are_computed(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "LOSS_BATCH", many)
    monkeypatch.setattr(probes, "MOST_COMPLETE", 5)
    inputs = [flight(serial) for serial in range(7)]
    book = begun(*inputs, stay=True, watch="stay")
    for label, each in enumerate(inputs):
        book.answered(each, 0, BOTH)
        book.observe([seen(each, 0, label=label), seen(each, 2, label=5), seen(each, 3, label=5)])
    found = book.take_completed(1.0)
    assert found is not None
    assert (found.losses_NR[:, 0].tolist(), found.times_s_N.tolist()) == ([1, 1, 1, 0, 1], [2.5] * 5)
    assert book.num_complete == 7
    assert book.agreement == pytest.approx(1 / 7)


def test_a_loss_function_that_fails_costs_only_observations(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> FloatArray:
        raise ValueError("a task's own loss fails")

    probe = flight(1)
    book = ExitObservations(SHAPE, fail)
    assert book.begin([probe], plan(), "probe", 2.0)
    book.answered(probe, 3, BOTH)
    book.observe([seen(probe, block) for block in (0, 2, 3)])
    assert (book.take_completed(), book.agreement) == (None, None)
    assert (book.num_complete, probe in book.open) == (0, False)
    assert "the losses of 1 observed inputs could not be computed" in caplog.text
