"""Thresholds that passed a test, and an alarm behind them: Learn-then-Test on what the stream showed last.

What is promised, and how often. *Each time* that new thresholds are put in force, their mean loss on a stream like
the inputs they were tested on is above the budget with a probability of at most 1 - confidence; it is a promise per
test, since tests go on for ever. Behind it stands *one alarm* for all thresholds in turn, until it sounds: while
answers lose no more than the budget, whichever thresholds gave them, it ever sounds with a probability of at most 1 -
confidence.

When it sounds, no input leaves from that moment on, and the stream counts as another one: only inputs that arrive
afterwards are tested on. (Inputs before it were seen to lose too much: a test on them would choose its data by their
outcome.) The path that is tested may come from any inputs, because the test is valid for all of them. So older inputs
lay it, and no new input is spent.

The times of tests depend on numbers of inputs alone, never on what they showed. What a test finds is put in force even
if it saves less than before: to keep the bolder thresholds would be to keep the luckier ones. The first test takes as
many inputs as allow for no loss at all, each next one allows for twice as many and one: boldness comes with time.

The alarm may be looked at after every input. It is an e-process (Waudby-Smith and Ramdas, arXiv 2010.09686; Shin,
Ramdas and Rinaldo's e-detectors, arXiv 2203.03532). A bet is placed on losses above the budget b. A stake on input i
becomes 1 + L (x_i - b) times as much, with x_i the input's loss in [0, 1]. While the mean loss is at most b, whatever
came before, no such bet gains on average. So a capital of 1 ever grows to 1 / `false_alarms` with a probability of at
most `false_alarms` (Ville's inequality). That is when the alarm sounds.

If everything were staked from the first input on, little would be left when losses rise after a long good time. So most
of the capital is kept in **reserve** and staked bit by bit, a new bit on every input: all bits staked around the change
grow together. What is staked with the same bet L is one number, W <- (W + stake) * (1 + L (x - b)), so an input costs
as much work as the table of bets is long.

How quick any alarm can be is bounded. To find a rise from 1 % to 5 % within 100 inputs in half of the cases takes a
test that errs once in 416 stretches of 100 inputs at exactly 1 %. So an alarm that errs in a tenth of all runs of
100,000 inputs can be that quick at 41 of the 1,000 places of a run, no more; and equally quick everywhere it needs
162 inputs or more (both by Neyman and Pearson's lemma; `experiments.tuning.alarm@654e280`). This one is quickest
where thresholds are new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from earlyexit.errors import DataError
from optimizer.live.tuning.base import (
    Question,
    Tuned,
    Tuner,
    TunerState,
    answered_losses_N,
    compared_N,
    never,
    no_input_leaves,
    whole_N,
)
from optimizer.thresholds import Calibration, learn_then_test
from profiles.scores import FloatArray
from profiles.stream import Observations

BETS: Mapping[float, float] = {2.0: 0.2, 5.0: 0.6, 15.0: 0.2}
"""Which part of a stake is bet on a mean loss of so many budgets."""
EARLY = 1000.0
"""Inputs after which staking begins to slow down."""
SLOWNESS = 2.0
"""How slowly the reserve is used up: half of it after EARLY * (e^SLOWNESS - 1) inputs."""
AT_ONCE = 200
"""Inputs reckoned with at once: so many factors multiplied neither overflow nor vanish."""


class Alarm:
    """Sounds at most once; another one is made then."""

    def __init__(self, budget: float, false_alarms: float) -> None:
        """`false_alarms`: the probability of ever sounding while the mean loss is at most the budget."""
        if not (0 < budget < 1 and 0 < false_alarms < 1):
            raise DataError(f"budget and false alarms must be between 0 and 1, not {budget} and {false_alarms}")
        self.budget = budget
        self.false_alarms = false_alarms
        self._reserve = 1.0
        self._wealth_J = np.zeros(len(BETS))
        self._parts_J = np.array(list(BETS.values()))
        self._bets_J = np.array([bet(budget, times) for times in BETS])
        self._seen = 0
        self._begun = 0

    @property
    def evidence(self) -> float:
        """What the gambler owns, of 1 at first; the alarm sounds at `limit`."""
        return self._reserve + float(self._wealth_J.sum())

    @property
    def limit(self) -> float:
        """Of `evidence`."""
        return 1 / self.false_alarms

    def begin(self) -> None:
        """Thresholds are new from the next input on: a large stake, now that they may prove wrong.

        Half of the reserve the first time, a third the second: the reserve outlives any number of changes.
        """
        self._begun += 1
        self._stake(1 / (1 + self._begun))

    def see(self, losses_N: FloatArray) -> int | None:
        """Take the losses of answered inputs in order; the row at which it sounds, after which nothing is taken.

        Raises DataError for losses outside [0, 1].
        """
        if not ((losses_N >= 0) & (losses_N <= 1)).all():
            raise DataError("losses must be numbers from 0 to 1")
        for first in range(0, len(losses_N), AT_ONCE):
            row = self._see(losses_N[first : first + AT_ONCE])
            if row is not None:
                return first + row
        return None

    def _stake(self, share: float) -> None:
        self._wealth_J += self._reserve * share * self._parts_J
        self._reserve *= 1 - share

    def _see(self, losses_N: FloatArray) -> int | None:
        reserve_N = self._reserve * kept(self._seen, len(losses_N))
        stakes_N = -np.diff(reserve_N, prepend=self._reserve)
        grown_NJ = np.cumprod(1 + self._bets_J * (losses_N[:, None] - self.budget), axis=0)
        before_NJ = np.vstack([np.ones(len(self._bets_J)), grown_NJ[:-1]])
        staked_NJ = self._wealth_J + np.cumsum(stakes_N[:, None] * self._parts_J / before_NJ, axis=0)
        wealth_NJ = grown_NJ * staked_NJ
        sounding_N = reserve_N + wealth_NJ.sum(1) >= self.limit
        last = int(sounding_N.argmax()) if sounding_N.any() else len(losses_N) - 1
        self._reserve, self._wealth_J = float(reserve_N[last]), wealth_NJ[last]
        self._seen += last + 1
        return last if sounding_N[last] else None


def bet(budget: float, times: float) -> float:
    """L of the bet that grows fastest where the loss is 1 with a probability of `times` the budget, else 0.

    A stake becomes then q/b or (1 - q)/(1 - b) times as much, the ratio of likelihoods; q stays half way below 1.
    """
    rate = min(times * budget, (1 + budget) / 2)
    return (rate - budget) / (budget * (1 - budget))


def kept(seen: int, more: int) -> FloatArray:
    """Parts of the reserve that are left at each of `more` inputs, after `seen` ones.

    Falls like 1 / (1 + log(1 + n / EARLY) / SLOWNESS): what is staked on the n-th input falls little faster than 1/n,
    and no horizon is needed.
    """
    left = 1 / (1 + np.log1p(np.arange(seen, seen + more + 1) / EARLY) / SLOWNESS)
    return np.asarray(left[1:] / left[0])


FORGIVEN = (0, 1, 3, 7, 15, 31)
"""Inputs lost that a test allows for, test by test; at 1 % and 90 % they take 230 to 4,000 inputs. A larger one would
say less about the present."""
DESIGN = 100
"""Inputs that lay the path: a logistic model of two numbers per ramp wants no more."""
LATELY = 100
"""Answers among which an alarm's words seek the worst stretch that ends now: all of them may have lost little."""
OLD_PATHS = 2
"""Tests whose path may come from before the last alarm; later ones have inputs enough of their own."""


class GuaranteeTuner(Tuner):
    """The default of services that are tuned."""

    name = "guarantee"

    def __init__(self, question: Question) -> None:
        super().__init__(question)
        self._sizes = [question.guarantee.inputs_for(lost) for lost in FORGIVEN]
        self._alarm = self._new_alarm()
        self._watched = _Watched()
        self._changed_s = -np.inf
        """When the alarm last sounded; what arrived later is of the present stream."""
        self._rows = _Rows(most=self._sizes[-1] + DESIGN)
        self._test_index = 0
        self._next_test: int | None = None

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """See `Tuner`.

        Thresholds to begin with that let inputs leave passed a test elsewhere, of many inputs as a rule: so the first
        test here is the largest, and until then there is the alarm.
        """
        if self._thresholds == dict(thresholds) and np.isfinite(self._watched.since_s):
            return  # told once more
        first = self._thresholds is None
        other_ramps = not first and set(self._followed) != set(thresholds)
        self._thresholds = dict(thresholds)
        safe = no_input_leaves(self.question.score, thresholds)
        if safe:
            self._watched.since_s = np.inf
        else:
            self._alarm.begin()
            self._watched.since_s = min(self._watched.since_s, since_s)
        if first:
            self._test_index = 0 if safe else len(self._sizes) - 1
        if other_ramps:
            self._rows.keep(list(thresholds), self._changed_s)
            self._next_test, self._test_index = None, self._largest_covered()

    def observe(self, seen: Observations) -> Tuned | None:
        """See `Tuner`."""
        ramps = list(self._followed)
        seen = seen.take(seen.times_s_N.argsort(kind="stable"))
        alarmed = self._watch(seen.take(np.flatnonzero(compared_N(seen))))
        self._rows.add(seen.take(np.flatnonzero(whole_N(seen, ramps))), self._changed_s)
        tested = self._test()
        if alarmed is None or tested is None:
            return tested or alarmed
        return replace(tested, why="alarm", words=f"{alarmed.words}; {tested.words}")  # as urgent as without the test

    @property
    def state(self) -> TunerState:
        """See `Tuner`."""
        return TunerState(
            evidence=self._alarm.evidence,
            limit=self._alarm.limit,
            watched=self._watched.number,
            watched_loss=self._watched.mean,
            rows=self._rows.fresh,
            next_test=self._due,
            safe=no_input_leaves(self.question.score, self._followed),
        )

    def _new_alarm(self) -> Alarm:
        guarantee = self.question.guarantee
        return Alarm(guarantee.budget, false_alarms=1 - guarantee.confidence)

    def _watch(self, whole: Observations) -> Tuned | None:
        watched = whole.take(whole.times_s_N >= self._watched.since_s)
        losses_N = answered_losses_N(watched)
        row = self._alarm.see(losses_N)
        taken = len(losses_N) if row is None else row + 1
        self._watched.add(losses_N[:taken].tolist())
        return None if row is None else self._sound(float(watched.times_s_N[row]))

    def _sound(self, at_s: float) -> Tuned:
        number, mean = self._watched.worst_lately(self.question.guarantee.budget)
        words = (
            f"alarm: the last {number} answers lost {mean:.1%} on average, "
            f"{self.question.guarantee.budget:.1%} are allowed; no input leaves until new thresholds have passed a test"
        )
        self._changed_s = at_s
        self._alarm, self._watched = self._new_alarm(), _Watched()
        self._rows.forget_fresh()
        self._test_index, self._next_test = 0, None
        return Tuned(
            thresholds=never(self.question.score, list(self._followed)),
            why="alarm",
            words=words,
            at_s=at_s,
        )

    @property
    def _due(self) -> int:
        """Rows of the present stream at which the next test is made."""
        if self._next_test is not None:
            return self._next_test
        return self._rows_for(self._test_index)

    def _rows_for(self, index: int) -> int:
        """Of the present stream, for a test and its path."""
        old = 0 if index >= OLD_PATHS else min(self._rows.old, DESIGN)
        return self._sizes[index] + DESIGN - old

    def _largest_covered(self) -> int:
        """The largest test that the rows at hand are enough for; the first where they are for none."""
        covered = [index for index in range(len(self._sizes)) if self._rows_for(index) <= self._rows.fresh]
        return max(covered, default=0)

    def _test(self) -> Tuned | None:
        if self._rows.fresh < self._due:
            return None
        ramps, size = list(self._followed), self._sizes[self._test_index]
        rows = self._rows.joined()
        design, tested = rows.take(np.arange(-size - DESIGN, -size)), rows.take(np.arange(-size, 0))
        found = learn_then_test(design.records(ramps), tested.records(ramps), self.question.guarantee)
        self._schedule()
        return self._put(found, ramps, float(tested.times_s_N[-1]))

    def _schedule(self) -> None:
        if self._test_index == len(self._sizes) - 1:
            self._next_test = self._rows.fresh + self._sizes[-1] // 2
        else:
            self._test_index += 1

    def _put(self, found: Calibration, ramps: list[int], at_s: float) -> Tuned | None:
        score, number = self.question.score, len(found.tested.exits_N)
        if not found.thresholds or found.tested.mean_blocks == found.tested.num_blocks:
            if no_input_leaves(score, self._followed):
                return None
            words = f"no thresholds passed the test on the last {number} inputs: no input leaves"
            return Tuned(thresholds=never(score, ramps), why="not passed", words=words, at_s=at_s)
        words = (
            f"tested on the last {number} inputs: at worst {found.worst_loss:.2%} is lost, "
            f"{found.tested.mean_blocks:.2f} of {found.tested.num_blocks} blocks are run before the answer"
        )
        return Tuned(thresholds=found.thresholds, why="tested", words=words, at_s=at_s)


class _Watched:
    """What the alarm has taken since it was set."""

    def __init__(self) -> None:
        self.since_s = np.inf
        """Answers to what arrived before are not the alarm's affair."""
        self.number = 0
        self.last: deque[float] = deque(maxlen=LATELY)
        self._lost = 0.0

    def add(self, losses: Sequence[float]) -> None:
        self.number += len(losses)
        self._lost += sum(losses)
        self.last.extend(losses)

    @property
    def mean(self) -> float | None:
        return self._lost / self.number if self.number else None

    def worst_lately(self, budget: float) -> tuple[int, float]:
        """How many of the last answers lost most above the budget in sum, and their mean loss."""
        latest_first = np.array(self.last)[::-1]
        number = int(np.cumsum(latest_first - budget).argmax()) + 1
        return number, float(latest_first[:number].mean())


class _Rows:
    """The last whole inputs, in order of arrival, and how many of them are of the present stream."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[Observations] = []
        self._kept = 0
        self.fresh = 0

    @property
    def old(self) -> int:
        """Kept ones that arrived before the stream changed."""
        return max(self._kept - self.fresh, 0)

    def add(self, rows: Observations, changed_s: float) -> None:
        self.fresh += int((rows.times_s_N > changed_s).sum())
        self._parts.append(rows)
        self._kept += len(rows)
        while self._kept - len(self._parts[0]) >= self._most:
            self._kept -= len(self._parts.pop(0))

    def forget_fresh(self) -> None:
        self.fresh = 0

    def keep(self, ramps: list[int], changed_s: float) -> None:
        """Only those of which these ramps were seen."""
        if not self._parts:
            return
        rows = self.joined()
        parts, self._parts, self._kept, self.fresh = rows.take(np.flatnonzero(whole_N(rows, ramps))), [], 0, 0
        self.add(parts, changed_s)

    def joined(self) -> Observations:
        rows = Observations.join(self._parts[0].shape, self._parts)
        return rows.take(rows.times_s_N.argsort(kind="stable"))
