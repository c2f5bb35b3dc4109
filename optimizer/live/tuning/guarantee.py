"""The tuner `guarantee`: thresholds that passed a test on recent inputs, and an alarm on the loss of answers.

Thresholds are tested by Learn-then-Test. The probability that a test puts thresholds in force whose mean loss, on a
stream like the tested inputs, exceeds the budget is at most 1 - confidence. The promise holds per test, because
tests never end. *One alarm* covers all thresholds until it is raised. If the mean loss stays within the budget,
whichever thresholds are in force, a false alarm ever happens with a probability of at most 1 - confidence.

After an alarm no input leaves early, and the stream counts as a new one: only inputs that arrive later are tested. (The
earlier ones are known to lose too much, so a test on them would select its data by the outcome.) Learn-then-Test tests
thresholds in a fixed sequence, and it is valid for any sequence that does not depend on the tested inputs. So older
inputs determine the sequence, and no new input is spent on it.

The times of tests depend on numbers of inputs alone, not on their losses. The result of a test is put in force even if
it saves less than before: keeping the bolder thresholds would select the luckier ones. The first test takes the least
number of inputs, at which no loss is allowed. Each next test allows twice as many losses plus one, so thresholds become
bolder over time.

The alarm is a sequential test that may be checked after every input. It is an e-process (Waudby-Smith and Ramdas, arXiv
2010.09686; e-detectors: Shin, Ramdas and Rinaldo, arXiv 2203.03532), a bet that losses exceed the budget b. Input i
multiplies a stake by 1 + L (x_i - b), with x_i its loss in [0, 1] and L the size of the bet. While the conditional mean
loss is at most b, no bet gains on average. So a wealth of 1 ever grows to 1 / `false_alarms` with a probability of at
most `false_alarms` (Ville's inequality), and then the alarm is raised.

If all wealth were staked at the first input, little would remain when losses rise after a long good period. So most of
it stays in a **reserve** and is staked bit by bit, some at every input, and the bits staked around the change grow
together. All stakes with the same bet L form one number, W <- (W + stake) * (1 + L (x - b)), so the work per input is
proportional to the number of bets.

No alarm can be arbitrarily quick. To detect a rise from 1 % to 5 % within 100 inputs in half of the cases, a test needs
an error of one in 416 stretches of 100 inputs at exactly 1 %. So an alarm that errs in a tenth of all runs of 100,000
inputs can be that quick at no more than 41 of the 1,000 places of a run. To be equally quick everywhere, it needs 162
inputs or more (both by the Neyman-Pearson lemma; `experiments.tuning.alarm@654e280`). This alarm is quickest after new
thresholds.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from optimizer.calibration.thresholds import Calibration, learn_then_test
from optimizer.live.tuning.base import (
    NewThresholds,
    Tuner,
    TunerSettings,
    TunerState,
    answered_losses_N,
    last_observed,
    never,
    no_input_leaves,
)
from profiles.scores import FloatArray
from profiles.stream import Observations

BETS: Mapping[float, float] = {2.0: 0.2, 5.0: 0.6, 15.0: 0.2}
"""The share of each stake that is bet on a mean loss of this multiple of the budget."""
EARLY = 1000.0
"""Number of inputs after which staking slows down."""
SLOWNESS = 2.0
"""Determines how slowly the reserve shrinks: to a half after EARLY * (e^SLOWNESS - 1) inputs."""
RECENT = 100
"""Number of answers in which the message of an alarm seeks the worst stretch up to now."""


class Alarm:
    """A sequential test that the mean loss is within the budget. It is raised once; then a new one is needed."""

    def __init__(self, budget: float, false_alarms: float) -> None:
        """`false_alarms` is the probability of ever raising the alarm while the mean loss is within the budget."""
        self.budget = budget
        self.limit = 1 / false_alarms
        """The evidence at which the alarm is raised."""
        self._reserve = 1.0
        self._bets = [(bet_size(budget, multiple), part) for multiple, part in BETS.items()]
        self._wealth = [0.0] * len(BETS)
        self._restarts = 0
        self.seen = 0
        """Number of inputs."""
        self._latest: deque[float] = deque(maxlen=RECENT)

    @property
    def evidence(self) -> float:
        """The value of the e-process: reserve and wealth, 1 at the start. The alarm is raised at `limit`."""
        return self._reserve + sum(self._wealth)

    def worst_recent(self) -> tuple[int, float]:
        """Returns the number of last inputs whose total loss exceeds the budget most, and their mean loss."""
        latest_first = np.array(self._latest)[::-1]
        number = int(np.cumsum(latest_first - self.budget).argmax()) + 1
        return number, float(latest_first[:number].mean())

    def restart_bets(self) -> None:
        """Places a large stake, because thresholds that are new from the next input on may be wrong.

        It is half of the reserve the first time, and a third the second time, so the reserve never runs out.
        """
        self._restarts += 1
        self._stake(self._reserve / (1 + self._restarts))

    def update(self, losses_N: FloatArray) -> int | None:
        """Processes the losses of inputs in order. Returns the row that raises the alarm; later rows are ignored."""
        for row, loss in enumerate(losses_N.tolist()):
            self._stake(self._reserve * (1 - reserve_share(self.seen + 1) / reserve_share(self.seen)))
            self._wealth = [
                wealth * (1 + bet * (loss - self.budget))
                for wealth, (bet, _) in zip(self._wealth, self._bets, strict=True)
            ]
            self.seen += 1
            self._latest.append(loss)
            if self.evidence >= self.limit:
                return row
        return None

    def _stake(self, stake: float) -> None:
        """Moves a stake from the reserve to the bets."""
        self._reserve -= stake
        self._wealth = [wealth + stake * part for wealth, (_, part) in zip(self._wealth, self._bets, strict=True)]


def bet_size(budget: float, multiple: float) -> float:
    """Returns L of the bet that grows fastest if the loss is 1 with probability q = `multiple` * budget, else 0.

    It multiplies a stake by the likelihood ratio q/b or (1 - q)/(1 - b). q is limited to half way between b and 1.
    """
    rate = min(multiple * budget, (1 + budget) / 2)
    return (rate - budget) / (budget * (1 - budget))


def reserve_share(seen: int) -> float:
    """Returns the share of the first reserve that remains after this many inputs, if no further stake is placed.

    The stake at the n-th input falls little faster than 1/n, and no horizon is needed.
    """
    return 1 / (1 + math.log1p(seen / EARLY) / SLOWNESS)


def _alarm_of(settings: TunerSettings) -> Alarm:
    return Alarm(settings.guarantee.budget, false_alarms=1 - settings.guarantee.confidence)


ALLOWED_LOSSES = (0, 1, 3, 7, 15, 31)
"""Losses that the successive tests allow. At 1 % and 90 % they take 230 to 4,000 inputs. A larger test would say less
about the present stream."""
DESIGN_ROWS = 100
"""Inputs that determine the sequence of a test. A logistic model of two numbers per ramp needs no more."""
TESTS_WITH_OLD_DESIGN = 2
"""Number of tests whose sequence may use inputs from before the last alarm. Later tests have enough new inputs."""


class GuaranteeTuner(Tuner):
    """The default tuner: tested thresholds, and an alarm."""

    name = "guarantee"

    def __init__(self, settings: TunerSettings) -> None:
        super().__init__(settings)
        self._sizes = [settings.guarantee.inputs_for(losses) for losses in ALLOWED_LOSSES]
        self._alarm = _alarm_of(settings)
        self._changed_s = -np.inf
        """Time of the last alarm. Inputs that arrived later belong to the present stream."""
        self._fresh = 0
        """Number of inputs of the present stream, including those that are no longer kept."""
        self._test_index = 0
        self._next_test: int | None = None

    def follow(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """See `Tuner`. If no input leaves, the alarm ignores all answers.

        Initial thresholds that let inputs leave are assumed to have passed a large test elsewhere. So the first test is
        the largest one, and until then the alarm protects.
        """
        before, is_safe = self._thresholds, no_input_leaves(self.settings.score, thresholds)
        if before == dict(thresholds) and np.isfinite(self._since_s):
            return
        super().follow(thresholds, np.inf if is_safe else min(self._since_s, since_s))
        if not is_safe:
            self._alarm.restart_bets()
        if before is None:
            self._test_index = 0 if is_safe else len(self._sizes) - 1
        elif set(before) != set(thresholds):
            if self._rows is not None:
                self._rows = last_observed(None, self._rows, list(thresholds))
                self._fresh = self._num_fresh(self._rows)
            possible = [index for index in range(len(self._sizes)) if self._rows_needed(index) <= self._fresh]
            self._next_test, self._test_index = None, max(possible, default=0)  # the largest that has enough rows

    def observe(self, seen: Observations) -> NewThresholds | None:
        """See `Tuner`."""
        ramps = list(self._followed)
        alarm = self._watch(last_observed(None, seen, ()))  # their loss is known, whichever ramps they saw
        observed = last_observed(None, seen, ramps)
        self._fresh += self._num_fresh(observed)
        self._rows = last_observed(self._rows, observed, ramps, most=self._sizes[-1] + DESIGN_ROWS)
        tested = self._test()
        if alarm is None or tested is None:
            return tested or alarm
        return replace(tested, why="alarm", words=f"{alarm.words}; {tested.words}")  # as urgent as the alarm alone

    @property
    def state(self) -> TunerState:
        """See `Tuner`."""
        return TunerState(
            evidence=self._alarm.evidence / self._alarm.limit,
            watched=self._alarm.seen,
            rows=self._fresh,
            next_test=self._rows_of_next_test,
        )

    def _watch(self, seen: Observations) -> NewThresholds | None:
        watched = seen.take(seen.times_s_N >= self._since_s)
        row = self._alarm.update(answered_losses_N(watched))
        if row is None:
            return None
        number, mean = self._alarm.worst_recent()
        words = (
            f"alarm: the last {number} answers lost {mean:.1%} on average, "
            f"{self._alarm.budget:.1%} are allowed; no input leaves until new thresholds have passed a test"
        )
        self._alarm, self._since_s, self._changed_s = _alarm_of(self.settings), np.inf, float(watched.times_s_N[row])
        self._fresh, self._test_index, self._next_test = 0, 0, None
        thresholds = never(self.settings.score, list(self._followed))
        return NewThresholds(thresholds=thresholds, why="alarm", words=words, at_s=self._changed_s)

    @property
    def _rows_of_next_test(self) -> int:
        """The number of rows of the present stream at which the next test runs."""
        return self._rows_needed(self._test_index) if self._next_test is None else self._next_test

    def _rows_needed(self, index: int) -> int:
        """Returns the number of rows of the present stream that a test and its design need."""
        num_kept = 0 if self._rows is None else len(self._rows)
        num_old = 0 if index >= TESTS_WITH_OLD_DESIGN else min(max(num_kept - self._fresh, 0), DESIGN_ROWS)
        return self._sizes[index] + DESIGN_ROWS - num_old

    def _num_fresh(self, rows: Observations) -> int:
        """Returns how many of the inputs belong to the present stream."""
        return int((rows.times_s_N > self._changed_s).sum())

    def _test(self) -> NewThresholds | None:
        rows = self._rows
        if rows is None or self._fresh < self._rows_of_next_test:
            return None
        ramps, size = list(self._followed), self._sizes[self._test_index]
        design, tested = rows.take(np.arange(-size - DESIGN_ROWS, -size)), rows.take(np.arange(-size, 0))
        result = learn_then_test(design.records(ramps), tested.records(ramps), self.settings.guarantee)
        if self._test_index == len(self._sizes) - 1:
            self._next_test = self._fresh + self._sizes[-1] // 2
        else:
            self._test_index += 1
        return self._new_thresholds(result, ramps, float(tested.times_s_N[-1]))

    def _new_thresholds(self, result: Calibration, ramps: list[int], at_s: float) -> NewThresholds | None:
        score, number = self.settings.score, len(result.tested.exits_N)
        if not result.thresholds or result.tested.mean_blocks == result.tested.num_blocks:
            if no_input_leaves(score, self._followed):
                return None
            words = f"no thresholds passed the test on the last {number} inputs: no input leaves"
            return NewThresholds(thresholds=never(score, ramps), why="not passed", words=words, at_s=at_s)
        words = (
            f"tested on the last {number} inputs: at worst {result.worst_loss:.2%} was lost, "
            f"{result.tested.mean_blocks:.2f} of {result.tested.num_blocks} blocks were run before the answer"
        )
        return NewThresholds(thresholds=result.thresholds, why="tested", words=words, at_s=at_s)
