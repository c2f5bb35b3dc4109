"""Which inputs of a live stream thresholds may be tuned by, as exit records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.policies import POLICIES, kind_of
from optimizer.plan import PolicySpec
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords
from profiles.scores import SCORES, BoolArray, FloatArray, Score
from profiles.stream import Observations, StreamShape


def check_tunable(policy: PolicySpec) -> None:
    """Raise PlanError for a policy without thresholds: nothing of it can be tuned while it serves."""
    if "thresholds" not in kind_of(policy.name).takes:
        can = ", ".join(name for name, kind in POLICIES.items() if "thresholds" in kind.takes)
        raise PlanError(f"the exit policy {policy.name!r} has no thresholds to tune; those that have are {can}")


def never(score: Score, ramps: Sequence[int]) -> dict[int, float]:
    """Thresholds with which nobody leaves."""
    return dict.fromkeys(ramps, SCORES[score].never)


def lets_nobody_leave(score: Score, thresholds: Mapping[int, float]) -> bool:
    """Whether no score reaches any of them."""
    return all(threshold == SCORES[score].never for threshold in thresholds.values())


def whole_N(seen: Observations, ramps: Sequence[int]) -> BoolArray:
    """Inputs of which these ramps and the full model were seen, whatever became of them.

    Of inputs that leave for good only those that are sure of nothing get to the end: no fair sample. So it takes
    probes, or inputs that stay.
    """
    columns = columns_of(seen.shape, ramps)
    return np.asarray((seen.probe_N | seen.stayed_N) & ~np.isnan(seen.losses_NR[:, columns]).any(1))


def compared_N(seen: Observations) -> BoolArray:
    """Inputs of which it is known what their answers lost, whichever ramps looked at them: a fair sample as well."""
    return np.asarray(seen.probe_N | seen.stayed_N)


def columns_of(shape: StreamShape, ramps: Sequence[int]) -> list[int]:
    """Of a stream's arrays. Raises PlanError for ramps that the stream does not have."""
    unknown = sorted(set(ramps) - set(shape.ramps))
    if unknown:
        raise PlanError(f"ramps {unknown} are not in the stream, whose ramps are {list(shape.ramps)}")
    return [shape.ramps.index(ramp) for ramp in ramps]


def answered_losses_N(seen: Observations) -> FloatArray:
    """What each answer lost against the full model's, at the ramp it left at or at the end; NaN where unknown."""
    at_NE = np.array([*seen.shape.ramps, seen.shape.num_blocks - 1]) == seen.exits_N[:, None]
    lost_N = np.where(at_NE, seen.losses_NE, 0.0).sum(1)
    return np.asarray(lost_N, dtype=np.float64)


def outcome_of(seen: Observations) -> ExitOutcome:
    """What became of some inputs, of which it is known what their answers lost; truth where it is known of all."""
    truth_NE, last = _known_truth(seen), seen.shape.num_blocks - 1
    column_N = np.searchsorted([*seen.shape.ramps, last], seen.exits_N)
    return ExitOutcome(
        num_blocks=seen.shape.num_blocks,
        exits_N=seen.exits_N.astype(np.int64),
        losses_N=answered_losses_N(seen),
        answers_N=None,
        true_losses_N=None if truth_NE is None else truth_NE[np.arange(len(seen)), column_N],
        full_true_losses_N=None if truth_NE is None else truth_NE[:, -1],
    )


def _known_truth(seen: Observations) -> FloatArray | None:
    """Losses against the truth, where it is known of all inputs."""
    truth_NE = seen.true_losses_NE
    if truth_NE is None or np.isnan(truth_NE[:, -1]).any():
        return None
    return truth_NE.astype(np.float64)


def records_of(seen: Observations, ramps: Sequence[int]) -> ExitRecords:
    """Whole inputs as exit records of these ramps; raises DataError where there is none, or one is not whole."""
    ascending = sorted(ramps)
    columns = columns_of(seen.shape, ascending)
    truth_NE = _known_truth(seen)
    return ExitRecords(
        score=seen.shape.score,
        num_blocks=seen.shape.num_blocks,
        ramps=tuple(ascending),
        sample_ids=tuple(map(str, range(len(seen)))),
        scores_NR=seen.scores_NR[:, columns],
        losses_NR=seen.losses_NR[:, columns].astype(np.float64),
        zero_one=seen.shape.zero_one,
        true_losses_NE=None if truth_NE is None else truth_NE[:, [*columns, -1]],
        times_s_N=seen.times_s_N,
        end_losses_N=seen.known_end_losses_N,
    )
