"""What a tuner is: it is shown the stream, and says which thresholds are to be in force."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from earlyexit.errors import PlanError
from optimizer.live.exit_times import ExitTimes
from optimizer.pame.on_batches import Batching
from optimizer.risk import Guarantee
from profiles.scores import Score
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
    """Whether the thresholds in force let nobody leave."""


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


def check_followed(thresholds: Mapping[int, float] | None) -> Mapping[int, float]:
    """What is in force; raises PlanError where a tuner was never told."""
    if thresholds is None:
        raise PlanError("a tuner follows the thresholds in force before it can observe")
    return thresholds
