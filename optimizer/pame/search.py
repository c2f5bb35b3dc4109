"""PAME's search for exits: one after the other, each by its time matrix and batching pattern (section 6).

The first exit is the one with the least mean answer time, among those that slow down few enough batches and keep the
precision; the next ones are sought behind it in the same way, by the least tail, until none is left that helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from earlyexit.errors import PlanError
from optimizer.pame.batches import ROUNDING, Seconds, TimeMatrix, time_matrix
from optimizer.pame.checks import Checks, Configured, configured
from profiles.records import IntArray, batch_counts
from profiles.scores import BoolArray, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """What is promised."""

    slower: float = 0.02
    """tau_l: largest share of batches that may take longer than without exits."""
    kept: float | None = 0.99
    """eta: of the full model's precision, the share that must be exceeded; None: thresholds are as they were given,
    and what they keep was decided with them."""

    def __post_init__(self) -> None:
        if not 0 <= self.slower < 1:
            raise PlanError(f"the share of slower batches must be at least 0 and below 1, not {self.slower}")
        if self.kept is not None and not 0 < self.kept <= 1:
            raise PlanError(f"the share of precision that is kept must be above 0 and at most 1, not {self.kept}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """An exit as one step of the search sees it."""

    ramp: int
    configured: Configured | None
    """None where no setting of its check keeps the precision; the rest is then as if no input left."""
    left_K: IntArray
    """Inputs of every batch that move on."""
    slow_K: BoolArray
    """Batches that take longer than without exits, by this exit or by one before it."""
    allowed: int
    """n_i: the most inputs that may move on; -1 where not even none may."""
    mean_s: float
    """Equation 2, the mean answer time with this exit alone behind those that were found."""
    tail_s: float
    """Equation 3's T_tail: with the largest number of inputs that moves on, batches apart that are slow anyway."""

    @property
    def slower(self) -> float:
        """Share of the batches."""
        return float(self.slow_K.mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Step:
    """One step: all candidates, and the one that was taken."""

    matrix: TimeMatrix
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    """None in the last step of a search that ran out of candidates that help."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FoundExits:
    """What a search found."""

    batch: int
    options: SearchOptions
    steps: tuple[Step, ...]

    @property
    def chosen(self) -> tuple[Candidate, ...]:
        """The exits in the order in which they were found, which is that of the model."""
        return tuple(step.chosen for step in self.steps if step.chosen is not None)

    @property
    def ramps(self) -> tuple[int, ...]:
        return tuple(each.ramp for each in self.chosen)

    @property
    def thresholds(self) -> dict[int, float]:
        """Of exits whose thresholds were searched."""
        settings = [each.configured.setting for each in self.chosen if each.configured is not None]
        return {each.ramp: each.threshold for each in settings if each.threshold is not None}

    @property
    def confidences(self) -> dict[int, float]:
        """The same, of the confidence above which a principal value counts."""
        settings = [each.configured.setting for each in self.chosen if each.configured is not None]
        return {each.ramp: each.confidence for each in settings if each.confidence is not None}


def find_exits(seconds: Seconds, checks: Checks, batch: int, options: SearchOptions | None = None) -> FoundExits:
    """Exits for batches of `batch`, on the recorded inputs of `checks`; raises PlanError where they make no batch."""
    options = options or SearchOptions()
    num_inputs = len(checks.end_losses_N)
    if not 1 <= batch <= num_inputs:
        raise PlanError(f"{num_inputs} recorded inputs make no batch of {batch}")
    state: _State | None = _State(
        first=0,
        size=batch,
        batch=batch,
        inside_N=np.ones(num_inputs, dtype=bool),
        slow_K=np.zeros(num_inputs // batch, dtype=bool),
        lost_N=checks.end_losses_N,
    )
    steps: list[Step] = []
    while state is not None:
        steps.append(_step(seconds, checks, state, options))
        state = _behind(checks, state, steps[-1].chosen)
    return FoundExits(batch=batch, options=options, steps=tuple(steps))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _State:
    """Where a search is: behind the exits that it has found."""

    first: int
    size: int
    """n, then n_l: of the stage that begins here."""
    batch: int
    inside_N: BoolArray
    slow_K: BoolArray
    lost_N: FloatArray
    """What answers cost with the exits so far."""


def _behind(checks: Checks, state: _State, chosen: Candidate | None) -> _State | None:
    """The state behind an exit; None where the search ends: no exit was found or is left, or no input moves on."""
    if chosen is None or chosen.configured is None or chosen.allowed < 1:
        return None
    inside_N = state.inside_N & ~chosen.configured.setting.leave_N
    if not inside_N.any() or chosen.ramp == checks.ramps[-1]:
        return None
    return _State(
        first=chosen.ramp + 1,
        size=chosen.allowed,
        batch=state.batch,
        inside_N=inside_N,
        slow_K=chosen.slow_K,
        lost_N=chosen.configured.lost_N,
    )


def _step(seconds: Seconds, checks: Checks, state: _State, options: SearchOptions) -> Step:
    ramps = [ramp for ramp in checks.ramps if ramp >= state.first]
    matrix = time_matrix(seconds, state.first, ramps, state.size)
    candidates = tuple(_candidate(checks, state, matrix, row, options) for row in range(len(ramps)))
    is_first = state.first == 0
    helping = [each for each in candidates if _helps(each, matrix, options, is_first=is_first)]
    return Step(
        matrix=matrix,
        candidates=candidates,
        chosen=min(helping, key=lambda each: each.mean_s if is_first else each.tail_s, default=None),
    )


def _candidate(checks: Checks, state: _State, matrix: TimeMatrix, row: int, options: SearchOptions) -> Candidate:
    ramp = matrix.exits[row]
    least = None if options.kept is None else options.kept * (1 - float(checks.end_losses_N.mean()))
    found = configured(checks, ramp, state.inside_N, state.lost_N, least)
    staying_N = state.inside_N if found is None else state.inside_N & ~found.setting.leave_N
    left_K = batch_counts(staying_N, state.batch)
    allowed = matrix.allowed_E[row]
    slow_K = state.slow_K | (left_K > allowed)
    quick_K = left_K[~slow_K]
    return Candidate(
        ramp=ramp,
        configured=found,
        left_K=left_K,
        slow_K=slow_K,
        allowed=allowed,
        mean_s=mean_answer_s(matrix, row, left_K),
        tail_s=float(matrix.seconds_EJ[row, quick_K.max()]) if len(quick_K) else np.inf,
    )


def mean_answer_s(matrix: TimeMatrix, row: int, left_K: IntArray) -> float:
    """Equation 2: inputs that leave wait for t[i, 0], inputs that move on for t[i, j].

    With C[i, j] batches in which j inputs move on, 1 / (n k) times the sum over j of
    ((n - j) t[i, 0] + j t[i, j]) C[i, j]; here batch by batch.
    """
    left_K = np.minimum(left_K, matrix.batch)
    moving_K = left_K / matrix.batch
    times_J = matrix.seconds_EJ[row]
    return float(((1 - moving_K) * times_J[0] + moving_K * times_J[left_K]).mean())


def _helps(each: Candidate, matrix: TimeMatrix, options: SearchOptions, *, is_first: bool) -> bool:
    """Whether inputs leave there, both promises are kept, and time is won: else the model is better off without."""
    if each.configured is None or not each.configured.leaving or each.slower > options.slower:
        return False
    return (each.mean_s if is_first else each.tail_s) < matrix.whole_s * (1 - ROUNDING)
