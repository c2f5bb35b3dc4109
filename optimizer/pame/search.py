"""PAME's search for exits, one after the other, by time matrix and batching pattern (section 6).

The first exit is the one with the least mean answer time among those that slow down few enough batches and keep the
precision. Further exits are sought behind it in the same way, by the least tail latency, until none helps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from earlyexit.errors import PlanError
from optimizer.pame.batches import ROUNDING, Seconds, TimeMatrix, time_matrix
from optimizer.pame.checks import Checks, ConfiguredExit, configure_exit
from profiles.records import IntArray, batch_counts
from profiles.scores import BoolArray, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """The promises that the exits keep."""

    slower: float = 0.02
    """tau_l: largest share of batches that may be slower than without exits."""
    kept: float | None = 0.99
    """eta: the share of the full model's precision that must be exceeded. None: no limit, because the thresholds are
    fixed and keep a promise of their own."""

    def __post_init__(self) -> None:
        if not 0 <= self.slower < 1:
            raise PlanError(f"the share of slower batches must be at least 0 and below 1, not {self.slower}")
        if self.kept is not None and not 0 < self.kept <= 1:
            raise PlanError(f"the share of precision that is kept must be above 0 and at most 1, not {self.kept}")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """An exit in one step of the search."""

    ramp: int
    configured: ConfiguredExit | None
    """None if no setting of its check keeps the precision. The other fields then assume that no input leaves."""
    remaining_K: IntArray
    """Inputs of each batch that move on."""
    slow_K: BoolArray
    """Batches that this exit or an earlier one makes slower than without exits."""
    allowed: int
    """n_i: largest number of inputs that may move on; -1 if even 0 is too slow."""
    mean_s: float
    """Equation 2: the mean answer time with this exit behind those found so far."""
    tail_s: float
    """Equation 3's T_tail: the time with the largest number of inputs that move on, without the slow batches."""

    @property
    def slower(self) -> float:
        """The share of slow batches."""
        return float(self.slow_K.mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchStep:
    """One step of the search: all candidates, and the chosen one."""

    matrix: TimeMatrix
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    """None if no candidate helps, which ends the search."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExitSearchResult:
    """The result of a search."""

    batch: int
    options: SearchOptions
    steps: tuple[SearchStep, ...]

    @property
    def chosen(self) -> tuple[Candidate, ...]:
        """The chosen exits, in the order of the model."""
        return tuple(step.chosen for step in self.steps if step.chosen is not None)

    @property
    def ramps(self) -> tuple[int, ...]:
        return tuple(each.ramp for each in self.chosen)

    @property
    def thresholds(self) -> dict[int, float]:
        """Thresholds by ramp, of the exits whose thresholds were searched."""
        settings = [each.configured.setting for each in self.chosen if each.configured is not None]
        return {each.ramp: each.threshold for each in settings if each.threshold is not None}

    @property
    def confidences(self) -> dict[int, float]:
        """Confidences by ramp, of the exits that count principal values."""
        settings = [each.configured.setting for each in self.chosen if each.configured is not None]
        return {each.ramp: each.confidence for each in settings if each.confidence is not None}


def find_exits(seconds: Seconds, checks: Checks, batch: int, options: SearchOptions | None = None) -> ExitSearchResult:
    """Returns the exits for batches of size `batch`. Raises PlanError if fewer inputs than that are recorded."""
    options = options or SearchOptions()
    num_inputs = len(checks.end_losses_N)
    if not 1 <= batch <= num_inputs:
        raise PlanError(f"the batch must have from 1 to {num_inputs} inputs, which are recorded, not {batch}")
    state: _SearchState | None = _SearchState(
        first=0,
        size=batch,
        batch=batch,
        inside_N=np.ones(num_inputs, dtype=bool),
        slow_K=np.zeros(num_inputs // batch, dtype=bool),
        lost_N=checks.end_losses_N,
    )
    steps: list[SearchStep] = []
    while state is not None:
        steps.append(_search_step(seconds, checks, state, options))
        state = _state_behind(checks, state, steps[-1].chosen)
    return ExitSearchResult(batch=batch, options=options, steps=tuple(steps))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _SearchState:
    """The state of a search behind the exits found so far."""

    first: int
    size: int
    """Batch size of the stage that begins here: n, then n_l."""
    batch: int
    inside_N: BoolArray
    slow_K: BoolArray
    lost_N: FloatArray
    """Loss of every input's answer with the exits found so far."""


def _state_behind(checks: Checks, state: _SearchState, chosen: Candidate | None) -> _SearchState | None:
    """Returns the state behind an exit, or None at the end: no exit was chosen, none remains, or no input moves on."""
    if chosen is None or chosen.configured is None or chosen.allowed < 1:
        return None
    inside_N = state.inside_N & ~chosen.configured.setting.leave_N
    if not inside_N.any() or chosen.ramp == checks.ramps[-1]:
        return None
    return _SearchState(
        first=chosen.ramp + 1,
        size=chosen.allowed,
        batch=state.batch,
        inside_N=inside_N,
        slow_K=chosen.slow_K,
        lost_N=chosen.configured.lost_N,
    )


def _search_step(seconds: Seconds, checks: Checks, state: _SearchState, options: SearchOptions) -> SearchStep:
    ramps = [ramp for ramp in checks.ramps if ramp >= state.first]
    matrix = time_matrix(seconds, state.first, ramps, state.size)
    candidates = tuple(_candidate(checks, state, matrix, row, options) for row in range(len(ramps)))
    is_first = state.first == 0
    helping = [each for each in candidates if _helps(each, matrix, options, is_first=is_first)]
    return SearchStep(
        matrix=matrix,
        candidates=candidates,
        chosen=min(helping, key=lambda each: each.mean_s if is_first else each.tail_s, default=None),
    )


def _candidate(checks: Checks, state: _SearchState, matrix: TimeMatrix, row: int, options: SearchOptions) -> Candidate:
    ramp = matrix.exits[row]
    least = None if options.kept is None else options.kept * (1 - float(checks.end_losses_N.mean()))
    exit_ = configure_exit(checks, ramp, state.inside_N, state.lost_N, least)
    staying_N = state.inside_N if exit_ is None else state.inside_N & ~exit_.setting.leave_N
    remaining_K = batch_counts(staying_N, state.batch)
    allowed = matrix.allowed_E[row]
    slow_K = state.slow_K | (remaining_K > allowed)
    fast_K = remaining_K[~slow_K]
    return Candidate(
        ramp=ramp,
        configured=exit_,
        remaining_K=remaining_K,
        slow_K=slow_K,
        allowed=allowed,
        mean_s=mean_answer_s(matrix, row, remaining_K),
        tail_s=float(matrix.seconds_EJ[row, fast_K.max()]) if len(fast_K) else np.inf,
    )


def mean_answer_s(matrix: TimeMatrix, row: int, remaining_K: IntArray) -> float:
    """Returns the mean answer time by equation 2: inputs that leave take t[i, 0], inputs that move on take t[i, j].

    The paper sums ((n - j) t[i, 0] + j t[i, j]) C[i, j] / (n k) over j, with C[i, j] batches in which j inputs move
    on. This sums batch by batch.
    """
    remaining_K = np.minimum(remaining_K, matrix.batch)
    moving_K = remaining_K / matrix.batch
    times_J = matrix.seconds_EJ[row]
    return float(((1 - moving_K) * times_J[0] + moving_K * times_J[remaining_K]).mean())


def _helps(each: Candidate, matrix: TimeMatrix, options: SearchOptions, *, is_first: bool) -> bool:
    """Returns whether inputs leave at an exit, both promises are kept, and it saves time."""
    if each.configured is None or not each.configured.leaving or each.slower > options.slower:
        return False
    return (each.mean_s if is_first else each.tail_s) < matrix.whole_s * (1 - ROUNDING)
