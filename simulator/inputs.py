"""Exit decisions of simulated inputs, from records or from a survival; observations of probes; lengths of inputs."""

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
from earlyexit.network.boundary import Answer
from optimizer.problems.problem import PlanProblem
from profiles.lengths import MOST_TOKENS
from profiles.records import ExitRecords, ValueArray
from profiles.scores import FloatArray
from profiles.stream import shape_of

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

NOWHERE: Final = -1
"""The ramp of an input that leaves at none of a split's ramps."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByRamp:
    """Decisions in which each ramp decides by itself, by entropy or confidence (E3 section 3.4: independent exits)."""

    ramps: tuple[int, ...]
    sure_NR: BoolArray
    """Whether an input would leave at a ramp if the ramp were active."""

    @property
    def num_rows(self) -> int:
        return len(self.sure_NR)

    def leaves_N(self, ramps: tuple[int, ...], active: tuple[int, ...]) -> IntArray:
        """Returns for each row the first of a split's `ramps` at which it leaves, or NOWHERE.

        `active`: all active ramps of the plan. Raises PlanError for unknown ramps.
        """
        if not ramps:
            return np.full(self.num_rows, NOWHERE, dtype=np.int64)
        sure_NA = self.sure_NR[:, _columns(self.ramps, ramps)]
        return np.where(sure_NA.any(1), np.array(ramps)[sure_NA.argmax(1)], NOWHERE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ByPatience:
    """Decisions by patience: `patience` ramps in a row repeat the answer before an input leaves (PABEE; E3 5.6)."""

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
        """See `ByRamp.leaves_N`."""
        labels_NA = self.labels_NR[:, _columns(self.ramps, active)]
        left_N = np.full(self.num_rows, NOWHERE, dtype=np.int64)
        repeats_N = np.zeros(self.num_rows, dtype=np.int64)
        for column in range(1, len(active)):
            repeats_N = np.where(labels_NA[:, column] == labels_NA[:, column - 1], repeats_N + 1, 0)
            left_N[(left_N == NOWHERE) & (repeats_N >= self.patience)] = active[column]
        return np.where(np.isin(left_N, ramps), left_N, NOWHERE)


Decisions = ByRamp | ByPatience
"""The exit decisions of inputs. Rows are inputs."""


def recorded(records: ExitRecords, thresholds: Mapping[int, float]) -> ByRamp:
    """Returns the decisions of recorded inputs. Raises DataError for thresholds of ramps that were not recorded."""
    return ByRamp(ramps=records.ramps, sure_NR=records.sure_NR(thresholds))


def patient(records: ExitRecords, patience: int) -> ByPatience:
    """Returns the decisions of recorded inputs under PABEE's rule."""
    return ByPatience(ramps=records.ramps, labels_NR=records.answers()[:, :-1], patience=patience)


def nested(survival_N: Sequence[float], ramps: Sequence[int], rng: np.random.Generator, *, num_rows: int) -> ByRamp:
    """Returns synthetic decisions with a given survival. An input that would leave at a ramp would at all later ones.

    `survival_N`: the share of inputs that reach each block if all ramps are active. Raises DataError for 0 rows.
    """
    if num_rows < 1:
        raise DataError(f"at least one input is needed, not {num_rows}")
    position_N = (rng.permutation(num_rows) + 0.5) / num_rows
    beyond_R = np.array([survival_N[ramp + 1] for ramp in ramps])
    return ByRamp(ramps=tuple(ramps), sure_NR=position_N[:, None] > beyond_R)


def survival_of(decisions: Decisions, ramps: tuple[int, ...], num_blocks: int, rows_M: IntArray) -> tuple[float, ...]:
    """Returns the share of these rows that reach each block if all ramps are active: E3's batch profile."""
    left_M = decisions.leaves_N(ramps, ramps)[rows_M]
    reached_M = np.where(left_M == NOWHERE, num_blocks - 1, left_M)
    return tuple(float((reached_M >= block).mean()) for block in range(num_blocks))


def _columns(known: tuple[int, ...], ramps: tuple[int, ...]) -> list[int]:
    if missing := sorted(set(ramps) - set(known)):
        raise PlanError(f"the decisions have no ramps {missing}; they have {list(known)}")
    return [known.index(ramp) for ramp in ramps]


class Probing:
    """Draws the probes of one ingress, and gives the results of exits from records."""

    def __init__(self, records: ExitRecords, rows_N: IntArray, share: float, rng: random.Random) -> None:
        """`records`: the results of every exit for every row of the decisions. `share`: of probes among first calls."""
        self.share = share
        self.rng = rng
        self.shape = shape_of(records)
        self._records = records
        self._rows_N = rows_N

    def seen(self, inputs: Sequence[PendingInput], ramps: Collection[int]) -> Iterator[tuple[PendingInput, Answer]]:
        """Yields the results of these ramps and of the full model. The value of a result is its loss."""
        records = self._records
        columns = [(column, ramp) for column, ramp in enumerate(records.ramps) if ramp in ramps]
        for each in inputs:
            row = self._rows_N[each.serial % len(self._rows_N)]
            for column, ramp in columns:
                score, loss = float(records.scores_NR[row, column]), float(records.losses_NR[row, column])
                yield each, Answer(sample_id="", exit=ramp, score=score, value=loss)
            yield each, Answer(sample_id="", exit=records.num_blocks - 1, score=float("nan"), value=0.0)


def recorded_loss(early: ValueArray, full: ValueArray) -> FloatArray:
    """Returns the losses of simulated answers, which are losses themselves (see `Probing.seen`)."""
    return np.asarray(early - full, dtype=np.float64)


LEAST_KEPT = 1e-4
"""The smallest share of draws within the bounds with which drawing continues."""
AT_ONCE = 4096
"""The smallest number of draws at a time."""


def truncated_normal(num: int, *, mean: float, variance: float, low: int, high: int, seed: int) -> IntArray:
    """Returns the lengths of `num` inputs: rounded draws of a normal distribution, redrawn outside `low` to `high`.

    TCB, section 6.2.1: "3-100 tokens according to a normal distribution". Mean and variance are those before the
    truncation. A variance of 0 gives the rounded mean. Equal seeds give equal lengths. Raises DataError for invalid
    arguments.
    """
    if num < 1:
        raise DataError(f"at least one length is needed, not {num}")
    if not math.isfinite(mean):
        raise DataError(f"the mean length must be a finite number, not {mean}")
    if not 0 <= variance < math.inf:
        raise DataError(f"the variance of lengths must be a finite number from 0 on, not {variance}")
    if not 1 <= low <= high <= MOST_TOKENS:
        raise DataError(f"lengths must lie between 1 and {MOST_TOKENS} tokens, not between {low} and {high}")
    rng, deviation = np.random.default_rng(seed), math.sqrt(variance)
    kept, total = np.zeros(0, dtype=np.int64), 0
    while len(kept) < num:
        drawn = np.rint(rng.normal(mean, deviation, max(AT_ONCE, num)))
        kept = np.concatenate([kept, drawn[(drawn >= low) & (drawn <= high)].astype(np.int64)])
        total += len(drawn)
        if len(kept) < LEAST_KEPT * total:
            raise DataError(f"mean {mean:g} and variance {variance:g} give hardly any lengths within {low} to {high}")
    return kept[:num]


class NetworkTokens:
    """The tokens of inputs by network, in the order of arrival. They repeat if there are more inputs."""

    def __init__(self, problem: PlanProblem, tokens_C: IntArray) -> None:
        """`tokens_C`: the tokens in the unit of the problem's lengths."""
        num_networks = max(1, len(problem.networks))
        self._shares = problem.network_tokens or (1.0,) * num_networks
        self._left = problem.crossing_tokens or (1.0,) * num_networks
        self._tokens_C = array("i", tokens_C.astype(np.int32).tobytes())

    def of(self, number: int, network: int, *, crossed: bool = False) -> int:
        """Returns the tokens of an input in a network. `crossed`: it came from another network, with pruned words."""
        tokens = self._tokens_C[number % len(self._tokens_C)]
        share = self._shares[network] * (self._left[network] if crossed else 1.0)
        return tokens if share == 1 else max(1, round(tokens * share))

    def enter(self, inputs: Sequence[PendingInput], network: int, *, crossed: bool) -> None:
        """Sets the `tokens` of inputs that enter a network."""
        for each in inputs:
            each.tokens = self.of(each.serial, network, crossed=crossed)
