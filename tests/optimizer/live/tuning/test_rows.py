"""What tuners read of live inputs: what their answers lost, the end's of texts without some of their words too."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from optimizer.live.tuning.base import answered_losses_N, outcome_of, records_of
from tests.optimizer.live.tuning.logs import NOBODY, mixed

SEEN = replace(mixed(4, {0: 0.8, 1: 0.99}), probe_N=np.full(4, True), stayed_N=np.full(4, False))
"""Unsure, sure, unsure, sure: the unsure ones are answered at the end, and ramp 0 is wrong about them."""
PRUNED = replace(SEEN, end_losses_N=np.array([1, 1, 0, np.nan], dtype=np.float32))


def test_the_end_of_a_pruned_text_alone_loses_what_pruning_changed() -> None:
    assert SEEN.exits_N.tolist() == [2, 0, 2, 0]
    assert answered_losses_N(SEEN).tolist() == [0, 0, 0, 0]
    assert records_of(SEEN, (0, 1)).end_losses_N is None
    assert answered_losses_N(PRUNED).tolist() == [1, 0, 0, 0], "the second was answered before"
    assert outcome_of(PRUNED).losses_N.tolist() == [1, 0, 0, 0]
    records = records_of(PRUNED, (0, 1))
    assert records.outcome(NOBODY).losses_N.tolist() == [1, 1, 0, 0]
