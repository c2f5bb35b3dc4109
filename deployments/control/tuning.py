"""What the tuner says of thresholds, kept until the loop acts on it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from deployments.settings import ControlSettings
from earlyexit.errors import OfframpError, PlanError
from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.base import Question, Tuned, Tuner, TunerState
from optimizer.live.tuning.rows import lets_nobody_leave
from optimizer.live.tuning.tuners import make_tuner
from optimizer.pame.on_batches import Batching
from optimizer.pame.times import seconds_of
from optimizer.plan import Stage
from optimizer.problem import PlanProblem, device_names
from optimizer.risk import Guarantee
from optimizer.tokens import full_inputs
from profiles.stream import Observations, StreamShape

MakeTuner = Callable[[StreamShape], Tuner]
"""Of what all observations share."""


class Tuning:
    """The tuner of one service, made when the first observations tell what they are of."""

    def __init__(self, make: MakeTuner | None, complain: Callable[[str], None], problem: PlanProblem) -> None:
        """`make`: None where thresholds stay as they are. `complain` is told of observations that it cannot use."""
        self._make = make
        self._complain = complain
        self._problem = problem
        self._tuner: Tuner | None = None
        self._shape: StreamShape | None = None
        self._followed: tuple[Mapping[int, float], float] | None = None
        """Thresholds, and since when; None: nothing is served, or by thresholds not known, or somebody else's."""
        self._entry: tuple[str, int] | None = None
        self._batching: Batching | None = None
        """That inputs enter the model in; None before anything is served."""
        self._since_s = 0.0
        """What arrived before was answered by nobody knows what."""
        self.said: Tuned | None = None
        """The last that is still to be put in force."""

    @property
    def is_on(self) -> bool:
        return self._make is not None

    @property
    def alarm(self) -> Tuned | None:
        """What must not wait."""
        return self.said if self.said is not None and self.said.why == "alarm" else None

    @property
    def state(self) -> TunerState | None:
        """None before the first observations."""
        return None if self._tuner is None else self._tuner.state

    def is_safe(self, thresholds: Mapping[int, float]) -> bool:
        """Whether nobody leaves by them; not known before the first observations."""
        return self._shape is not None and lets_nobody_leave(self._shape.score, thresholds)

    def observe(self, parts: Sequence[Observations]) -> None:
        """Have the tuner look; what it says now replaces what nobody has acted on yet."""
        if self._make is None or self._followed is None:
            return
        try:
            seen = Observations.join(parts[0].shape, parts)
            seen = seen.take(seen.times_s_N >= self._since_s)
            if self._tuner is None:
                self._shape, self._tuner = seen.shape, self._make(seen.shape)
                self._tuner.follow(*self._followed)
                if self._batching is not None:
                    self._tuner.serve(self._batching)
            said = self._tuner.observe(seen.take(seen.times_s_N.argsort(kind="stable")))
            if said is not None:
                self.said = said if self.alarm is None or said.why == "alarm" else _as_urgent(self.alarm, said)
        except OfframpError as error:
            self._complain(f"thresholds cannot be tuned by what was seen: {error}")

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """These are in force since then, with all ingresses."""
        if self._followed is None:
            self._since_s = since_s
        elif self._followed[0] == thresholds:  # another plan by the same thresholds
            return
        self._followed = thresholds, since_s
        if self._tuner is not None:
            self._tuner.follow(thresholds, since_s)

    def serve(self, first: Stage) -> None:
        """The first stage of the plan that is followed: batches of its first split are what exits shrink."""
        entry = first.device, full_inputs(self._problem.latency[first.device], first.splits[0])
        if entry != self._entry:
            self._entry, self._batching = entry, batching_of(self._problem, *entry)
            if self._tuner is not None:
                self._tuner.serve(self._batching)

    def pause(self) -> None:
        """Look at nothing until told what to follow; what was said before is void by then."""
        self._followed = self.said = None


def _as_urgent(alarm: Tuned, said: Tuned) -> Tuned:
    """What was said after an alarm that nobody has acted on yet."""
    return replace(said, why="alarm", words=f"{alarm.words}; {said.words}")


def tuner_of(settings: ControlSettings, problem: PlanProblem) -> MakeTuner | None:
    """The one that the settings name; None where thresholds stay as they are, or there are no ramps.

    Raises PlanError where there is no budget to keep.
    """
    if settings.tuning == "off" or not problem.ramps:
        return None
    if settings.accuracy_budget is None:
        raise PlanError(
            f"tuning {settings.tuning!r} keeps an accuracy budget, and none is given: accuracy.budget says it"
        )
    guarantee = Guarantee(budget=settings.accuracy_budget, confidence=settings.accuracy_confidence)
    # Of a device that is there: what is measured of others may be of nothing that serves. Savings are told as shares of
    # the model's time, which differ little between devices; its largest batch is what devices run when it matters.
    # Batches are the plan's as soon as there is one: see `Tuning.serve`.
    device = device_names(problem)[0]
    table = problem.latency[device]
    times = ExitTimes.of(table, problem.ramps, table.batches[-1])
    batching = batching_of(problem, device, table.batches[-1])
    name = settings.tuning
    return lambda shape: make_tuner(
        name, Question(score=shape.score, guarantee=guarantee, times=times, batching=batching)
    )


def batching_of(problem: PlanProblem, device: str, size: int) -> Batching:
    """Batches of a split on a device, of whose seconds nothing is known beyond the largest that was measured."""
    table = problem.latency[device]
    return Batching(seconds=seconds_of(table, problem.ramps), size=min(size, table.batches[-1]))
