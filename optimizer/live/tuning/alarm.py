"""An alarm that sounds when answers lose more than the budget; it may be looked at after every input.

An e-process (Waudby-Smith and Ramdas, arXiv 2010.09686; Shin, Ramdas and Rinaldo's e-detectors, arXiv 2203.03532).
Think of a gambler who bets that losses are above the budget b. A stake that is bet on input i becomes 1 + L (x_i - b)
times as much, with x_i the input's loss in [0, 1]. While the mean loss is at most b, whatever was before, no such bet
gains on average, so a gambler who began with 1 ever owns 1 / `false_alarms` with a probability of at most
`false_alarms` (Ville's inequality). That is when the alarm sounds.

A gambler who bets everything from the first input on is poor when, after long good times, losses rise. So most is
kept in **reserve** and staked bit by bit, a new bit on every input: all bits staked around the change grow together.
What is staked with the same bet L is one number, W <- (W + stake) * (1 + L (x - b)), so an input costs as much work
as the table of bets is long.

How quick any alarm can be is bounded. To find a rise from 1 % to 5 % within 100 inputs in half of the cases takes a
test that errs once in 416 stretches of 100 inputs at exactly 1 %. So an alarm that errs in a tenth of all runs of
100,000 inputs can be that quick at 41 of the 1,000 places of a run, no more; and equally quick everywhere it needs
162 inputs or more (both by Neyman and Pearson's lemma; `experiments.tuning.alarm@654e280`). This one is quickest
where thresholds are new.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from earlyexit.errors import DataError
from profiles.scores import FloatArray

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

    @property
    def sounds(self) -> bool:
        """Whether more is lost than the budget allows."""
        return self.evidence >= self.limit

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
