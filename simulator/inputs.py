"""Which inputs leave at which ramp, by records or by a survival, and what probes observe."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from deployments.ingress.core.inputs import PendingInput
from earlyexit.errors import DataError, PlanError
from earlyexit.network.boundary import ExitResult
from optimizer.problem import PlanProblem
from profiles.records import ExitRecords, ValueArray
from profiles.scores import FloatArray
from profiles.stream import shape_of

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NOWHERE: Final = -1
"""The ramp of an input that leaves at none of a split's ramps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByRamp:
    """Ramps that decide each by itself (E3 section 3.4: independent exits): by entropy or by confidence."""

    ramps: tuple[int, ...]
    sure_NR: BoolArray
    """Whether a ramp, were it active, would let an input out."""

    @property
    def num_rows(self) -> int:
        return len(self.sure_NR)

    def leaves_N(self, ramps: tuple[int, ...], active: tuple[int, ...]) -> IntArray:
        """Per row, the first of a split's `ramps` that lets it out, or NOWHERE; `active`: all ramps of the plan.

        Raises PlanError for ramps of which nothing is known.
        """
        if not ramps:
            return np.full(self.num_rows, NOWHERE, dtype=np.int64)
        sure_NA = self.sure_NR[:, _columns(self.ramps, ramps)]
        return np.where(sure_NA.any(1), np.array(ramps)[sure_NA.argmax(1)], NOWHERE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByPatience:
    """Leave where `patience` active ramps in a row repeated the one before them (PABEE; E3 section 5.6)."""

    ramps: tuple[int, ...]
    labels_NR: IntArray
    patience: int

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise PlanError(f"patience must be at least 1, not {self.patience}")

    @property
    def num_rows(self) -> int:
        return len(self.labels_NR)

    def leaves_N(self, ramps: tuple[int, ...], active: tuple[int, ...]) -> IntArray:
        """As `ByRamp.leaves_N`."""
        labels_NA = self.labels_NR[:, _columns(self.ramps, active)]
        left_N = np.full(self.num_rows, NOWHERE, dtype=np.int64)
        repeats_N = np.zeros(self.num_rows, dtype=np.int64)
        for column in range(1, len(active)):
            repeats_N = np.where(labels_NA[:, column] == labels_NA[:, column - 1], repeats_N + 1, 0)
            left_N[(left_N == NOWHERE) & (repeats_N >= self.patience)] = active[column]
        return np.where(np.isin(left_N, ramps), left_N, NOWHERE)


Decisions = ByRamp | ByPatience
"""Where inputs leave; rows are inputs."""


def recorded(records: ExitRecords, thresholds: Mapping[int, float]) -> ByRamp:
    """Returns what recorded inputs do; raises DataError for thresholds of ramps that were not recorded."""
    return ByRamp(ramps=records.ramps, sure_NR=records.sure_NR(thresholds))


def patient(records: ExitRecords, patience: int) -> ByPatience:
    """Returns what recorded inputs do under PABEE's rule."""
    return ByPatience(ramps=records.ramps, labels_NR=records.answers()[:, :-1], patience=patience)


def nested(survival_N: Sequence[float], ramps: Sequence[int], rng: np.random.Generator, *, num_rows: int) -> ByRamp:
    """Made-up inputs that leave as a survival says; an input that is sure at a ramp is sure at every later one.

    `survival_N`: per block, the share that no ramp before it lets out, all of them active. Raises DataError for 0 rows.
    """
    if num_rows < 1:
        raise DataError(f"at least one input is needed, not {num_rows}")
    position_N = (rng.permutation(num_rows) + 0.5) / num_rows
    beyond_R = np.array([survival_N[ramp + 1] for ramp in ramps])
    return ByRamp(ramps=tuple(ramps), sure_NR=position_N[:, None] > beyond_R)


def survival_of(decisions: Decisions, ramps: tuple[int, ...], num_blocks: int, rows_M: IntArray) -> tuple[float, ...]:
    """Per block, the share of these rows that reach it, all ramps active: E3's batch profile."""
    left_M = decisions.leaves_N(ramps, ramps)[rows_M]
    reached_M = np.where(left_M == NOWHERE, num_blocks - 1, left_M)
    return tuple(float((reached_M >= block).mean()) for block in range(num_blocks))


def _columns(known: tuple[int, ...], asked: tuple[int, ...]) -> list[int]:
    missing = sorted(set(asked) - set(known))
    if missing:
        raise PlanError(f"nothing is known of ramps {missing}; known are {list(known)}")
    return [known.index(ramp) for ramp in asked]


class Probing:
    """Which calls of one ingress are probes, and what every exit says of their inputs."""

    def __init__(self, records: ExitRecords, rows_N: IntArray, share: float, rng: random.Random) -> None:
        """`records`: what every exit says of every row of the decisions; `share`: of first calls."""
        self.share = share
        self.rng = rng
        self.shape = shape_of(records)
        self._records = records
        self._rows_N = rows_N

    def seen(self, inputs: Sequence[PendingInput], ramps: Collection[int]) -> Iterator[tuple[PendingInput, ExitResult]]:
        """How sure these ramps are of inputs; the answer is what it costs. The full model is last."""
        records = self._records
        asked = [(column, ramp) for column, ramp in enumerate(records.ramps) if ramp in ramps]
        for each in inputs:
            row = self._rows_N[each.serial % len(self._rows_N)]
            for column, ramp in asked:
                score, loss = float(records.scores_NR[row, column]), float(records.losses_NR[row, column])
                yield each, ExitResult(sample_id="", block=ramp, score=score, value=loss)
            yield each, ExitResult(sample_id="", block=records.num_blocks - 1, score=float("nan"), value=0.0)


def recorded_loss(early: ValueArray, full: ValueArray) -> FloatArray:
    """The loss of answers that are their own losses."""
    return np.asarray(early - full, dtype=np.float64)


LEAST_KEPT = 1e-4
"""Of the draws that must lie within the bounds, so that drawing ends."""
AT_ONCE = 4096
"""Draws before bounds are taken for out of reach."""


def truncated_normal(num: int, *, mean: float, variance: float, low: int, high: int, seed: int) -> IntArray:
    """Whole tokens of `num` inputs: a normal distribution, rounded; what is outside low to high is drawn again.

    TCB, section 6.2.1: "3-100 tokens according to a normal distribution". Mean and variance are those of the whole
    distribution: what is cut off moves them, little where the bounds are several deviations away. A variance of 0 gives
    the mean, rounded. Equal seeds give equal lengths. Raises DataError for numbers that no length can have.
    """
    _check(num, mean, variance, low, high)
    rng, deviation = np.random.default_rng(seed), math.sqrt(variance)
    kept, total = np.zeros(0, dtype=np.int64), 0
    while len(kept) < num:
        drawn = np.rint(rng.normal(mean, deviation, max(AT_ONCE, num))).astype(np.int64)
        kept = np.concatenate([kept, drawn[(drawn >= low) & (drawn <= high)]])
        total += len(drawn)
        if len(kept) < LEAST_KEPT * total:
            raise DataError(f"hardly a length about {mean:g} with variance {variance:g} lies within {low} to {high}")
    return kept[:num]


def _check(num: int, mean: float, variance: float, low: int, high: int) -> None:
    if num < 1:
        raise DataError(f"at least one length is needed, not {num}")
    if not math.isfinite(mean):
        raise DataError(f"the mean length must be a finite number, not {mean}")
    if not 0 <= variance < math.inf:
        raise DataError(f"the variance of lengths must be a finite number from 0 on, not {variance}")
    if not 1 <= low <= high:
        raise DataError(f"lengths must lie between 1 and more, not between {low} and {high}")


class NetworkTokens:
    """The tokens of inputs by network, in the order of their arrival, to be repeated."""

    def __init__(self, problem: PlanProblem, tokens_C: IntArray) -> None:
        """`tokens_C`: as the problem's lengths count them."""
        num_networks = max(1, len(problem.networks))
        self._shares = problem.network_tokens or (1.0,) * num_networks
        self._left = problem.crossing_tokens or (1.0,) * num_networks
        self._tokens_C = array("i", tokens_C.astype(np.int32).tobytes())

    def of(self, number: int, network: int, *, crossed: bool = False) -> int:
        """Returns the tokens of an input that entered a network at once, or that crossed into it with words pruned."""
        tokens = self._tokens_C[number % len(self._tokens_C)]
        share = self._shares[network] * (self._left[network] if crossed else 1.0)
        return tokens if share == 1 else max(1, round(tokens * share))

    def enter(self, inputs: Sequence[PendingInput], network: int, *, crossed: bool) -> None:
        """Inputs have the tokens of the network from now on."""
        for each in inputs:
            each.tokens = self.of(each.serial, network, crossed=crossed)
