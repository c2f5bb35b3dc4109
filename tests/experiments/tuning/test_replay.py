from __future__ import annotations

import numpy as np
import pytest

from experiments.served_streams import Fixed, TunedThresholds, observed, tuned_replay
from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.base import Question
from optimizer.live.tuning.rows import never
from optimizer.live.tuning.tuners import make_tuner
from optimizer.risk import Guarantee
from profiles.records import ExitRecords


def drawn_records(seed: int, num_ramps: int, number: int) -> ExitRecords:
    """Inputs of different ease: the deeper a ramp the surer it is, and it is as often right as its confidence says."""
    rng = np.random.default_rng(seed)
    ramps = tuple(range(num_ramps))
    ease_N1 = rng.beta(1.2, 0.8, (number, 1))
    depth_R = np.linspace(0.3, 1.3, num_ramps)
    scores_NR = 0.5 + 0.5 * np.clip(ease_N1 * depth_R + rng.normal(0, 0.08, (number, num_ramps)), 0, 0.999)
    return ExitRecords(
        score="confidence",
        num_blocks=num_ramps + 1,
        ramps=ramps,
        sample_ids=tuple(map(str, range(number))),
        scores_NR=scores_NR.astype(np.float32),
        losses_NR=(rng.random((number, num_ramps)) > scores_NR).astype(np.float64),
    )


RECORDS = drawn_records(3, num_ramps=3, number=600)
NOBODY = never("confidence", RECORDS.ramps)
TIMES = ExitTimes(block_s=(1.0,) * 4, ramp_s=dict.fromkeys(RECORDS.ramps, 0.01))
QUESTION = Question(score="confidence", guarantee=Guarantee(budget=0.1), times=TIMES)


def tuned(delay: int = 0) -> TunedThresholds:
    return TunedThresholds(make_tuner("guarantee", QUESTION), NOBODY, delay=delay)


def test_where_nobody_watches_a_replay_is_the_outcome_of_its_thresholds() -> None:
    thresholds = dict.fromkeys(RECORDS.ramps, 0.9)
    found, outcome = tuned_replay(RECORDS, Fixed(thresholds=thresholds)), RECORDS.outcome(thresholds)
    assert (found.exits_N == outcome.exits_N).all()
    assert found.agreement == pytest.approx(outcome.agreement)


def test_new_thresholds_answer_what_comes_after_the_delay() -> None:
    controller = tuned(delay=20)
    found = tuned_replay(RECORDS, controller, batch=8)
    first = controller.changes[0].at_s
    assert (found.exits_N[: int(first) + 21] == 3).all()
    assert (found.exits_N[int(first) + 21 :] < 3).any()


def test_of_inputs_that_leave_for_good_only_probes_are_whole() -> None:
    probe_N = np.arange(10) % 5 == 0
    part = RECORDS.subset(np.arange(10))
    seen = observed(part, dict.fromkeys(RECORDS.ramps, 0.5), probe_N, stay=False)
    assert (~np.isnan(seen.losses_NR).any(1) == probe_N).all()
    assert not np.isnan(observed(part, NOBODY, probe_N, stay=True).losses_NR).any()


def test_by_probes_alone_tuning_takes_as_many_inputs_more() -> None:
    whole, probes = tuned(), tuned()
    tuned_replay(RECORDS, whole)
    tuned_replay(RECORDS, probes, probe_N=np.random.default_rng(0).random(len(RECORDS)) < 0.5, stay=False)
    assert 1.5 * whole.changes[0].at_s < probes.changes[0].at_s < 3 * whole.changes[0].at_s
