"""Windows of a service's inputs under a plan, for tests of estimates from them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from profiles.records import ExitRecords
from profiles.stream import Observations, StreamShape, shape_of
from profiles.windows import Window, WindowEstimate
from tests.exit_records import exit_records

SHAPE = StreamShape(score="confidence", num_blocks=6, ramps=(1, 3))
#          after 1, after 3
SCORES = [[0.9, 0.95], [0.5, 0.8], [0.75, 0.6], [0.2, 0.3]]
LABELS = [[0, 0], [0, 1], [0, 2], [1, 1]]
FACTS: dict[str, Any] = {"num_blocks": 6, "ramps": (1, 3), "sample_ids": tuple("abcd")}
ANSWERS_NE = np.column_stack([LABELS, [0, 1, 2, 2]])
RECORDS = exit_records(SCORES, answers_NE=ANSWERS_NE, truth_N=np.array([0, 1, 0, 1]), **FACTS)


def observe(
    records: ExitRecords,
    plan: dict[int, float],
    probe_N: npt.NDArray[np.bool_],
    times_s_N: Any = None,
    *,
    stay: bool = False,
) -> Observations:
    """Returns the observations of a service that runs `plan` on inputs which stop at their answer, or stay."""
    exits_N = records.outcome(plan).exits_N
    active_NR = np.tile([ramp in plan for ramp in records.ramps], (len(records), 1))
    stayed_N = np.full(len(records), stay)
    reached_NR = (np.array(records.ramps) <= exits_N[:, None]) | stay
    seen_NR = (active_NR & reached_NR) | probe_N[:, None]
    end_N1 = ((exits_N == records.num_blocks - 1) | stayed_N | probe_N)[:, None]
    assert records.true_losses_NE is not None
    truth_NE = np.where(np.hstack([seen_NR, end_N1]), records.true_losses_NE, np.nan)
    return Observations(
        shape=shape_of(records),
        times_s_N=np.zeros(len(records)) if times_s_N is None else np.asarray(times_s_N, dtype=float),
        probe_N=probe_N,
        stayed_N=stayed_N,
        active_NR=active_NR,
        exits_N=exits_N.astype(np.int16),
        scores_NR=np.where(seen_NR, records.scores_NR, np.nan).astype(np.float32),
        losses_NR=np.where(seen_NR & end_N1, records.losses_NR, np.nan).astype(np.float32),
        true_losses_NE=truth_NE.astype(np.float32),
    )


def estimate(
    records: ExitRecords, plan: dict[int, float], probe_N: Any, requested: dict[int, float], *, stay: bool = False
) -> WindowEstimate:
    seen = observe(records, plan, np.array(probe_N, dtype=bool), stay=stay)
    return Window(start_s=0, observations=seen).estimate(requested)


def values(found: WindowEstimate) -> list[float]:
    assert found.survival is not None
    return [share.value for share in found.survival]


def worth(found: WindowEstimate) -> list[float]:
    """Returns the worth of the share that continues at every block but the last."""
    assert found.go_on is not None
    return [counts.effective_inputs() for counts in found.go_on]


NONE = [False] * 4


def random_records(num_inputs: int, seed: int) -> ExitRecords:
    """Returns inputs of different difficulty. Easy ones leave early, so the observed ones are a biased sample."""
    rng = np.random.default_rng(seed)
    ramps = (0, 1, 3, 4)
    ease_N1 = rng.beta(1, 1, (num_inputs, 1))
    scores_NR = np.clip(ease_N1 + 0.1 * np.array(ramps) + rng.normal(0, 0.2, (num_inputs, 4)), 0, 1)
    final_labels_N = rng.integers(0, 3, num_inputs)
    right_NR = rng.random((num_inputs, 4)) < scores_NR
    answers_NE = np.column_stack([np.where(right_NR, final_labels_N[:, None], 3), final_labels_N])
    truth_N = np.where(rng.random(num_inputs) < 0.9, final_labels_N, 4)
    return exit_records(scores_NR, answers_NE=answers_NE, num_blocks=6, ramps=ramps, truth_N=truth_N)
