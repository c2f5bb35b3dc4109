from __future__ import annotations

import numpy as np
import pytest

from optimizer.calibration.thresholds import LEVELS, NUM_CONFIDENCES, ShareArray, candidates, choose_confidences
from profiles.scores import SCORES, FloatArray


def shares_above(values_DRP: FloatArray) -> ShareArray:
    """Returns the share of values above each level, by input and ramp."""
    return np.asarray((values_DRP[..., None] > LEVELS).mean(2), dtype=np.float32)


def test_ten_confidences_are_spread_evenly_over_the_principal_values() -> None:
    values = np.linspace(0.5, 0.7, 1000).reshape(10, 1, 100)
    found = [float(LEVELS[k]) for k in candidates(shares_above(values)[:, 0])]
    assert len(found) == NUM_CONFIDENCES
    np.testing.assert_allclose(found, np.linspace(0.51, 0.69, 10), atol=0.011)
    assert len(candidates(shares_above(np.full((3, 1, 5), 0.305))[:, 0])) == 2, "below it all count, above it none"


def test_the_confidence_that_separates_lost_from_kept_answers_is_selected() -> None:
    """Kept inputs have more values above 0.8. Below 0.8, lost inputs have as many or more."""
    rng = np.random.default_rng(0)
    lost_D = np.arange(200) % 4 == 0
    values = rng.uniform(0.2, 0.8, size=(200, 1, 50))
    values[lost_D] += 0.05
    values[~lost_D, :, :5] = 0.9
    values[lost_D, :, :40] = 0.6
    (chosen,) = choose_confidences(shares_above(values), lost_D[:, None].astype(float), budget=0.01)
    score_D = shares_above(values)[:, 0, chosen]
    assert score_D[~lost_D].min() > score_D[lost_D].max()


def test_each_ramp_has_its_own_confidence() -> None:
    lost_D = np.array([False, True] * 20)
    tells, tells_not = np.where(lost_D, 0.3, 0.6), np.full(40, 0.6)
    values = np.stack([np.stack([tells, tells_not], 1), np.stack([tells_not, tells + 0.3], 1)], axis=1)
    chosen = choose_confidences(shares_above(values), np.stack([lost_D] * 2, 1).astype(float), budget=0.0)
    assert 0.3 <= LEVELS[chosen[0]] < 0.6
    assert 0.6 <= LEVELS[chosen[1]] < 0.9
    # At 0.5 all inputs have the same share, and one of them is lost, so none could leave.
    values = np.full((4, 1, 10), 0.55)
    values[:3, :, 0] = 0.75
    (alone,) = choose_confidences(shares_above(values), np.array([[0.0], [0.0], [0.0], [1.0]]), budget=0.1)
    assert 0.55 <= LEVELS[alone] < 0.75
    # Two of seven inputs are lost, and one may be. Above 0.4 the other one leaves last. Above 0.7 four inputs leave
    # first, and then three together, of which two are lost.
    low, high = [8, 8, 8, 8, 8, 9, 7], [5, 5, 5, 5, 2, 2, 2]
    rows = [
        [0.2] * (10 - least) + [0.45] * (least - most) + [0.75] * most for least, most in zip(low, high, strict=True)
    ]
    (alone,) = choose_confidences(
        shares_above(np.array(rows)[:, None]), np.array([[0.0]] * 5 + [[1.0]] * 2), budget=0.15
    )
    assert 0.2 <= LEVELS[alone] < 0.45


def test_shares_and_sureness_convert_to_each_other() -> None:
    kind = SCORES["share"]
    shares = np.array([0.0, 1 / 70, 0.5, 69 / 70, 1.0])
    sureness = kind.sureness(shares)
    assert (np.diff(sureness) > 0).all()
    np.testing.assert_allclose([kind.score_at(float(each)) for each in sureness], shares, atol=1e-12)
    assert kind.score_at(float(sureness[-1]) + 0.1) > 1, "no input is so sure"
    assert kind.score_at(float(sureness[0]) - 0.1) < 0, "every input is"
    assert kind.score_at(np.inf) == kind.never
    assert kind.sureness(np.array([1.5])) == sureness[-1], "such a share is an error of another system"
    assert SCORES["entropy"].sureness(np.array([0.0, np.inf])) == pytest.approx([16.118, -80.0], abs=1e-3)
