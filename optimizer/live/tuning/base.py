"""What a tuner is: it observes the stream, and says which thresholds shall be in force."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.policies import POLICIES, kind_of
from optimizer.live.exit_times import ExitTimes
from optimizer.pame.batches import Batching
from optimizer.plan import PolicySpec
from optimizer.risk import Guarantee
from profiles.records import ExitOutcome
from profiles.scores import SCORES, BoolArray, FloatArray, Score
from profiles.stream import Observations

Why = Literal["alarm", "tested", "not passed", "tuned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuned:
    """Thresholds to be put in force now."""

    thresholds: Mapping[int, float]
    """One for every ramp that was followed, in the unit of the stream's score."""
    why: Why
    words: str
    at_s: float
    """Arrival of the last input that it rests on, on the stream's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """For metrics and the page."""

    evidence: float
    """Of the alarm: 1 at first, where nothing is wrong below 1 by and by; it sounds at `limit`."""
    limit: float
    watched: int
    """Answered inputs that the alarm has taken since it was set."""
    watched_loss: float | None
    """Their mean loss; None of none."""
    rows: int
    """Whole inputs since the stream last changed: those that thresholds may be tested on."""
    next_test: int | None
    """Rows at which thresholds are tested next; None: that hangs on no number of rows."""
    safe: bool
    """Whether no input leaves by the thresholds in force."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What a tuner is made for."""

    score: Score
    """Of the stream, and of its thresholds."""
    guarantee: Guarantee
    times: ExitTimes
    """For what is saved by leaving early."""
    batching: Batching | None = None
    """For tuners that look at how long batches take; of those to begin with."""


class Tuner(ABC):
    """Pure: fed with observations in order of arrival, on whose times it goes; it asks no clock.

    The life of one: `follow` the thresholds in force at the start. `observe` all that comes; where that gives `Tuned`,
    put its thresholds in force, as an epoch of their own, and `follow` them from the time on at which all ingresses
    have them. What is in force may change for other reasons too, and so may the ramps: `follow` that as well.
    Inputs that are whole count alone: probes, and inputs that stay. Everything else may be passed in and is left out.
    """

    name: ClassVar[str]

    def __init__(self, question: Question) -> None:
        self.question = question
        self._thresholds: Mapping[int, float] | None = None

    @property
    def _followed(self) -> Mapping[int, float]:
        """The thresholds in force; raises PlanError before the tuner was told of any."""
        if self._thresholds is None:
            raise PlanError("a tuner follows the thresholds in force before it can observe")
        return self._thresholds

    @abstractmethod
    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """These thresholds, of these ramps, answer what arrives from a time on.

        Only these ramps are tuned, and only inputs of which all of them were seen tell anything.
        """

    def serve(self, batching: Batching) -> None:  # noqa: B027 - most tuners look at inputs, not at batches
        """Inputs enter the model in batches of this size, on this device, from now on."""

    @abstractmethod
    def observe(self, seen: Observations) -> Tuned | None:
        """Take the next observations; the last thresholds that they call for, or None."""

    @property
    @abstractmethod
    def state(self) -> TunerState:
        """As of now."""


def check_tunable(policy: PolicySpec) -> None:
    """Raise PlanError for a policy without thresholds: nothing of it can be tuned while it serves."""
    if "thresholds" not in kind_of(policy.name).takes:
        can = ", ".join(name for name, kind in POLICIES.items() if "thresholds" in kind.takes)
        raise PlanError(f"the exit policy {policy.name!r} has no thresholds to tune; those that have are {can}")


def never(score: Score, ramps: Sequence[int]) -> dict[int, float]:
    """Returns thresholds by which no input leaves."""
    return dict.fromkeys(ramps, SCORES[score].never)


def no_input_leaves(score: Score, thresholds: Mapping[int, float]) -> bool:
    """Whether no score reaches any of them."""
    return all(threshold == SCORES[score].never for threshold in thresholds.values())


def whole_N(seen: Observations, ramps: Sequence[int]) -> BoolArray:
    """Inputs of which these ramps and the full model were seen, whatever became of them.

    Of inputs that leave for good only those that are sure of nothing get to the end: no fair sample. So it takes
    probes, or inputs that stay. Raises PlanError for ramps that the stream does not have.
    """
    unknown = sorted(set(ramps) - set(seen.shape.ramps))
    if unknown:
        raise PlanError(f"ramps {unknown} are not in the stream, whose ramps are {list(seen.shape.ramps)}")
    columns = [seen.shape.ramps.index(ramp) for ramp in ramps]
    return np.asarray((seen.probe_N | seen.stayed_N) & ~np.isnan(seen.losses_NR[:, columns]).any(1))


def compared_N(seen: Observations) -> BoolArray:
    """Inputs of which it is known what their answers lost, whichever ramps looked at them: a fair sample as well."""
    return np.asarray(seen.probe_N | seen.stayed_N)


def answered_losses_N(seen: Observations) -> FloatArray:
    """What each answer lost against the full model's, at the ramp it left at or at the end; NaN where unknown."""
    at_NE = np.array([*seen.shape.ramps, seen.shape.num_blocks - 1]) == seen.exits_N[:, None]
    lost_N = np.where(at_NE, seen.losses_NE, 0.0).sum(1)
    return np.asarray(lost_N, dtype=np.float64)


def outcome_of(seen: Observations) -> ExitOutcome:
    """What became of some inputs, of which it is known what their answers lost; truth where it is known of all."""
    truth_NE, last = seen.known_truth_NE, seen.shape.num_blocks - 1
    column_N = np.searchsorted([*seen.shape.ramps, last], seen.exits_N)
    return ExitOutcome(
        num_blocks=seen.shape.num_blocks,
        exits_N=seen.exits_N.astype(np.int64),
        losses_N=answered_losses_N(seen),
        answers_N=None,
        true_losses_N=None if truth_NE is None else truth_NE[np.arange(len(seen)), column_N],
        full_true_losses_N=None if truth_NE is None else truth_NE[:, -1],
    )
