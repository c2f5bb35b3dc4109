"""PAME's way (section 7.6): an exit goes later where batches become slow, a threshold goes up where precision is low.

Every WINDOW batches of whole inputs are judged once.

- More than TAIL of them slower than the model without exits: the (first) exit moves to the later place with the least
  mean answer time whose tail was bearable on the same batches, at the boldest threshold that kept the precision on
  them. Where no later place is bearable no input leaves.
- Else, precision below 1 - budget: the threshold of the exit that lost most goes up one step of its grid.

What the paper leaves open, and what was taken: the window, in which one slow batch is still bearable; precision is
agreement with the full model where truth is not known; of several places the one that its own search would take. When
exits go back: after CALM windows without reaction, or after one in which no input left, the search for one exit is made
again, and what it finds must have been right in each of these windows. Nothing is promised.

Batches are of whole inputs in order of arrival. Where only probes are whole these are a sample, in which bursts are
thinned out.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import PlanError
from optimizer.live.tuning.base import (
    Question,
    Tuned,
    Tuner,
    TunerState,
    Why,
    never,
    no_input_leaves,
    outcome_of,
    whole_N,
)
from optimizer.pame.batches import Batching
from optimizer.pame.checks import GRIDS, next_step, normalised
from optimizer.pame.search import SearchOptions
from profiles.records import ExitOutcome, ExitRecords
from profiles.scores import SCORES
from profiles.stream import Observations

TAIL = SearchOptions().slower
"""The share of batches that may be slower than the model without exits, as the search has it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An exit that could be, and what it would have done."""

    ramp: int
    thresholds: Mapping[int, float]
    """Its own, and those of later exits that stay."""
    violated: float
    """Share of the batches slower than without exits; of several windows, in the worst."""
    precision: float
    """Of the model without exits: 1 where nothing is lost; of several windows, in the worst."""
    mean_s: float
    """Mean answer time."""


# Where one exit should be, by how many inputs of each batch would move on: how PAME chooses a first exit (6.2 to 6.4).
# Online the same is asked of the last inputs (section 7.6).


def best_place(
    windows: Sequence[ExitRecords],
    batching: Batching,
    precision: float,
    ramps: Sequence[int],
    *,
    behind: Mapping[int, float] | None = None,
    tail: float = TAIL,
) -> Place | None:
    """The ramp with the least mean answer time of those whose tail is bearable in all windows; None where none is.

    Windows are of one length, at least a batch, in order of arrival.

    `behind`: exits that stay where they are behind it, with their thresholds.
    """
    found = (place_at(windows, batching, precision, ramp, behind or {}) for ramp in ramps)
    bearable = [place for place in found if place is not None and place.violated <= tail]
    return min(bearable, key=lambda place: (place.mean_s, place.ramp), default=None)


def place_at(
    windows: Sequence[ExitRecords], batching: Batching, precision: float, ramp: int, behind: Mapping[int, float]
) -> Place | None:
    """With the boldest threshold that keeps the precision in all windows (6.2); None without one."""
    for threshold in GRIDS[windows[0].score]:
        thresholds = {ramp: threshold, **{later: value for later, value in behind.items() if later > ramp}}
        outcomes = [window.outcome(thresholds) for window in windows]
        worst = min(map(normalised, outcomes))
        if worst >= precision:
            times = [batching.times(outcome.exits_N, thresholds) for outcome in outcomes]
            return Place(
                ramp=ramp,
                thresholds=thresholds,
                violated=max(each.slower for each in times),
                precision=worst,
                mean_s=sum(each.mean_s for each in times) / len(times),
            )
    return None


WINDOW = 50
"""Batches that are judged at once: one slow one of them is TAIL."""
CALM = 4
"""Windows without reaction after which an earlier exit, or a bolder threshold, is looked for."""
LEAST_GAIN = 0.02
"""Share of the mean answer time that it must gain."""


class PameTuner(Tuner):
    """One exit, or a first one before others, is moved; by the thresholds of other ramps no input leaves."""

    name = "pame"

    def __init__(self, question: Question) -> None:
        """Raises PlanError for a question without the seconds of batches."""
        super().__init__(question)
        if question.batching is None:
            raise PlanError("tuner 'pame' looks at batches: it needs their seconds by the number of inputs")
        self._batching = question.batching
        self._precision = 1 - question.guarantee.budget
        self._since_s = np.inf
        self._rows: list[Observations] = []
        self._calm: list[ExitRecords] = []

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """See `Tuner`: a new window begins."""
        if self._thresholds == dict(thresholds):
            return  # told once more
        self._thresholds = dict(thresholds)
        self._since_s = since_s
        self._rows, self._calm = [], []

    def serve(self, batching: Batching) -> None:
        """See `Tuner`: what waits to be judged is judged in such batches."""
        self._batching = batching
        self._calm = []  # windows of another length

    def observe(self, seen: Observations) -> Tuned | None:
        """See `Tuner`."""
        ramps = sorted(self._followed)
        self._rows.append(seen.take(whole_N(seen, ramps) & (seen.times_s_N >= self._since_s)))
        if self._waiting < self._size:
            return None
        rows = Observations.join(seen.shape, self._rows)
        rows = rows.take(rows.times_s_N.argsort(kind="stable"))
        while len(rows) >= self._size:
            said = self._judge(rows.take(np.arange(self._size)), ramps)
            if said is not None:
                self._rows, self._calm = [], []
                return said
            rows = rows.take(np.arange(self._size, len(rows)))
        self._rows = [rows]
        return None

    @property
    def state(self) -> TunerState:
        """See `Tuner`: its evidence is the larger of slow batches and of losses, each over what is bearable."""
        slow, mean = 0.0, None
        if self._waiting:
            rows = Observations.join(self._rows[0].shape, self._rows)
            outcome = outcome_of(rows)
            slow, mean = self._slow(outcome, self._exits_of(rows)), float(outcome.losses_N.mean())
        return TunerState(
            evidence=max(slow / TAIL, (mean or 0.0) / self.question.guarantee.budget),
            limit=1.0,
            watched=self._waiting,
            watched_loss=mean,
            rows=self._waiting,
            next_test=self._size,
            safe=no_input_leaves(self.question.score, self._followed),
        )

    @property
    def _size(self) -> int:
        """Inputs of a window."""
        return WINDOW * self._batching.size

    @property
    def _waiting(self) -> int:
        return sum(map(len, self._rows))

    def _exits_of(self, seen: Observations) -> dict[int, float]:
        """Returns the thresholds of ramps that inputs may leave at, of those that the plan has on, ascending."""
        shut = SCORES[self.question.score].never
        on = {ramp for column, ramp in enumerate(seen.shape.ramps) if seen.active_NR[:, column].any()}
        return {ramp: at for ramp, at in sorted(self._followed.items()) if at != shut and ramp in on}

    def _slow(self, outcome: ExitOutcome, exits: Collection[int]) -> float:
        if len(outcome.exits_N) < self._batching.size:
            return 0.0
        return self._batching.times(outcome.exits_N, exits).slower

    def _judge(self, window: Observations, ramps: list[int]) -> Tuned | None:
        outcome, records, exits = outcome_of(window), window.records(ramps), self._exits_of(window)
        at_s = float(window.times_s_N[-1])
        if not exits:
            return self._search([records], exits, at_s, "no input left")
        slow = self._slow(outcome, exits)
        if slow > TAIL:
            return self._move(records, exits, slow, at_s)
        precision = normalised(outcome)
        if precision < self._precision:
            return self._raise(outcome, exits, precision, at_s)
        self._calm.append(records)
        if len(self._calm) < CALM:
            return None
        calm, self._calm = self._calm, []
        return self._search(calm, exits, at_s, f"nothing was wrong in {len(calm)} windows")

    def _move(self, records: ExitRecords, exits: Mapping[int, float], slow: float, at_s: float) -> Tuned:
        first = min(exits)
        later = [ramp for ramp in records.ramps if ramp > first]
        place = best_place([records], self._batching, self._precision, later, behind=exits)
        words = f"{slow:.1%} of the batches were slower than without exits, {TAIL:.1%} are bearable: "
        if place is None:
            return self._put({}, "tuned", f"{words}no input leaves, no later exit is bearable", at_s)
        return self._put(place.thresholds, "tuned", f"{words}the exit moves from ramp {first} to {_told(place)}", at_s)

    def _raise(self, outcome: ExitOutcome, exits: Mapping[int, float], precision: float, at_s: float) -> Tuned:
        lost = {ramp: float(outcome.losses_N[outcome.exits_N == ramp].sum()) for ramp in exits}
        ramp = max(lost, key=lambda ramp: lost[ramp])
        step = next_step(self.question.score, exits[ramp])
        words = f"precision was {precision:.1%}, {self._precision:.1%} is to be kept: "
        if step is None:
            others = {each: at for each, at in exits.items() if each != ramp}
            return self._put(others, "alarm", f"{words}no input leaves at ramp {ramp} any more", at_s)
        return self._put(
            {**exits, ramp: step}, "alarm", f"{words}ramp {ramp} from {exits[ramp]:.4g} to {step:.4g}", at_s
        )

    def _search(
        self, windows: list[ExitRecords], exits: Mapping[int, float], at_s: float, occasion: str
    ) -> Tuned | None:
        place = best_place(windows, self._batching, self._precision, windows[0].ramps)
        # What is in force may name a ramp that the plan has off: to say it again would change nothing.
        if place is None or self._all(place.thresholds) == self._thresholds:
            return None
        means_s = [self._batching.times(each.outcome(exits).exits_N, exits).mean_s for each in windows]
        if place.mean_s > (1 - LEAST_GAIN) * sum(means_s) / len(windows):
            return None
        return self._put(place.thresholds, "tuned", f"{occasion}: {_told(place)}", at_s)

    def _put(self, exits: Mapping[int, float], why: Why, words: str, at_s: float) -> Tuned:
        return Tuned(thresholds=self._all(exits), why=why, words=words, at_s=at_s)

    def _all(self, exits: Mapping[int, float]) -> dict[int, float]:
        return {**never(self.question.score, list(self._followed)), **exits}


def _told(place: Place) -> str:
    return (
        f"ramp {place.ramp} at {place.thresholds[place.ramp]:.4g}, where {place.violated:.1%} would have been slow "
        f"and precision {place.precision:.1%}"
    )
