from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from earlyexit.errors import DataError
from experiments.live.mixes import MANY, easy_and_hard, mix, mixed_records
from experiments.live.model import made_up, thresholds

# Of four blocks; at the threshold 10 % leave after block 0, 50 % after block 1, 20 % after block 2.
SURVIVAL = (1.0, 0.9, 0.4, 0.2)


def test_made_up_records_have_the_survival_that_was_asked_for() -> None:
    found = made_up(SURVIVAL, num_inputs=100, rng=np.random.default_rng(0))
    assert found.nested_survival(thresholds(found)) == pytest.approx(SURVIVAL)
    assert found.outcome(thresholds(found)).agreement == 1


def test_a_tighter_threshold_lets_fewer_of_them_out() -> None:
    found = made_up(SURVIVAL, num_inputs=1000, rng=np.random.default_rng(0))
    # Sure ones have entropies spread evenly from 0.05 to 0.4: at 0.3 about 25 in 35 of the 60 % leave before block 2.
    assert found.outcome(thresholds(found, 0.3)).survival[2] == pytest.approx(1 - 0.6 * 25 / 35, abs=0.05)


def test_easy_inputs_leave_in_the_first_half_of_the_model() -> None:
    found = made_up(SURVIVAL, num_inputs=100, rng=np.random.default_rng(0))
    easy, hard = easy_and_hard(found, thresholds(found))
    assert (len(easy), len(hard)) == (60, 40), "after blocks 0 and 1 leave 60 of 100"


@pytest.mark.parametrize("easy_share", [0.8, 0.5, 0.2])
def test_a_mix_has_its_share_of_easy_inputs(easy_share: float) -> None:
    found = made_up(SURVIVAL, num_inputs=100, rng=np.random.default_rng(0))
    easy = {found.sample_ids[row] for row in easy_and_hard(found, thresholds(found))[0]}
    keys = mix(found, thresholds(found), easy_share, np.random.default_rng(1))
    assert len(keys) == MANY
    assert sum(key in easy for key in keys) / MANY == pytest.approx(easy_share, abs=0.02)


def test_the_same_seed_gives_the_same_mix() -> None:
    found = made_up(SURVIVAL, num_inputs=100, rng=np.random.default_rng(0))
    first, again, other = (mix(found, thresholds(found), 0.5, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_who_knows_a_mix_knows_its_survival() -> None:
    found = made_up(SURVIVAL, num_inputs=100, rng=np.random.default_rng(0))
    known = mixed_records(found, thresholds(found), 0.2)
    assert len(known) == MANY
    # A fifth is easy, and none of those reaches block 2; of the hard 40, half reach block 3.
    assert known.outcome(thresholds(found)).survival == pytest.approx((1, 1 - 0.2 / 6, 0.8, 0.4), abs=0.002)
    assert set(Counter(known.sample_ids)) == set(found.sample_ids)


def test_records_of_one_kind_make_no_mix() -> None:
    found = made_up((1.0, 0.0, 0.0, 0.0), num_inputs=10, rng=np.random.default_rng(0))
    with pytest.raises(DataError, match="10 easy and 0 hard"):
        easy_and_hard(found, thresholds(found))
