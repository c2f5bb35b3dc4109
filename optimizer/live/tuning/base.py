"""The interface of tuners, which observe the stream and choose thresholds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.policies import POLICIES, kind_of
from optimizer.calibration.thresholds import Guarantee
from optimizer.cost.batching import Batching
from optimizer.plans.plan import PolicySpec
from profiles.scores import SCORES, FloatArray, Score
from profiles.stream import Observations

Reason = Literal["alarm", "tested", "not passed", "tuned"]


@dataclass(frozen=True, slots=True, kw_only=True)
class NewThresholds:
    """Thresholds to put in force now, and why."""

    thresholds: Mapping[int, float]
    """One per followed ramp, in the unit of the stream's score."""
    why: Reason
    words: str
    at_s: float
    """Arrival time of the last input that they depend on, on the stream's clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerState:
    """The state of a tuner, for metrics and the dashboard."""

    evidence: float
    """Evidence of the alarm, as a share of the evidence at which it is raised."""
    watched: int
    """Answered inputs that the alarm has seen since it was reset."""
    rows: int
    """Fully observed inputs since the stream last changed. Thresholds may be tested on them."""
    next_test: int | None
    """Number of rows at which thresholds are tested next. None if tests do not depend on it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TunerSettings:
    """The settings of a tuner."""

    score: Score
    """The score of the stream and of its thresholds."""
    guarantee: Guarantee
    batching: Batching
    """The initial batches, and the seconds of their blocks and ramps."""


class Tuner(ABC):
    """Chooses thresholds from observations in order of arrival. It reads no clock, only the times of observations.

    Usage: `follow` the thresholds in force at the start, and `observe` all inputs. If `observe` returns new thresholds,
    put them in force as an epoch of their own, and `follow` them from the time when all ingresses have them. Whenever
    thresholds or ramps change for another reason, `follow` them too. Only fully observed inputs count, which are probes
    and inputs that stay. All others are ignored.
    """

    name: ClassVar[str]

    def __init__(self, settings: TunerSettings) -> None:
        self.settings = settings
        self._thresholds: dict[int, float] | None = None
        self._since_s = np.inf
        """The time from which on answers are judged: earlier ones were given under other thresholds."""
        self._rows: Observations | None = None
        """The last fully observed inputs."""

    @property
    def _followed(self) -> Mapping[int, float]:
        """The thresholds in force."""
        assert self._thresholds is not None, "call follow with the thresholds in force before observe"
        return self._thresholds

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """Sets the thresholds that are in force for inputs that arrive from `since_s` on.

        Only these ramps are tuned. Inputs that did not see all of them are ignored.
        """
        self._thresholds, self._since_s = dict(thresholds), since_s

    def set_batching(self, batching: Batching) -> None:  # noqa: B027 - most tuners ignore batches
        """Sets the size and the seconds of batches from now on."""

    @abstractmethod
    def observe(self, seen: Observations) -> NewThresholds | None:
        """Processes the next observations. Returns the last new thresholds that they call for, or None."""

    @property
    @abstractmethod
    def state(self) -> TunerState:
        """The current state."""


def check_tunable(policy: PolicySpec) -> None:
    """Raises PlanError for an exit policy without thresholds, because a tuner has nothing to change there."""
    if "thresholds" not in kind_of(policy.name).takes:
        tunable = ", ".join(name for name, kind in POLICIES.items() if "thresholds" in kind.takes)
        raise PlanError(f"the exit policy {policy.name!r} has no thresholds to tune; those that have are {tunable}")


def never(score: Score, ramps: Sequence[int]) -> dict[int, float]:
    """Returns thresholds that no score reaches, so that no input leaves."""
    return dict.fromkeys(ramps, SCORES[score].never)


def no_input_leaves(score: Score, thresholds: Mapping[int, float]) -> bool:
    """Returns whether no score reaches any threshold."""
    return all(threshold == SCORES[score].never for threshold in thresholds.values())


def last_observed(
    kept: Observations | None, seen: Observations, ramps: Sequence[int], most: int | None = None
) -> Observations:
    """Returns the last inputs that saw these ramps and the full model, in order of arrival, wherever they left.

    They are probes and inputs that stay. Other inputs reach the end only if no ramp is confident, so they would be a
    biased sample. `kept` holds earlier inputs, and `most` is the largest number of inputs; None: all of them.
    """
    columns = [seen.shape.ramps.index(ramp) for ramp in ramps]
    rows = seen if kept is None else Observations.join(seen.shape, [kept, seen])
    rows = rows.take((rows.probe_N | rows.stayed_N) & ~np.isnan(rows.losses_NR[:, columns]).any(1))
    return rows.take(rows.times_s_N.argsort(kind="stable")[0 if most is None else -most :])


def answered_losses_N(seen: Observations) -> FloatArray:
    """Returns each answer's loss against the full model's, at the exit where the input left; NaN if unknown."""
    is_exit_NE = np.array([*seen.shape.ramps, seen.shape.num_blocks - 1]) == seen.exits_N[:, None]
    losses_N = np.where(is_exit_NE, seen.losses_NE, 0.0).sum(1)
    return np.asarray(losses_N, dtype=np.float64)
