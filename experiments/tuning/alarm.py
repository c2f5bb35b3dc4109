"""How soon the alarm on losses sounds, and how often it should not have; beside what any alarm could do.

    python -m experiments.tuning.alarm [--runs 1000]

Losses are 0 or 1, each input for itself. *False alarms*: runs of 100,000 inputs at exactly the budget, 1 %, in which
the alarm sounds. *Delay*: inputs from a jump until it sounds, after so many good inputs at 1 % or less; new thresholds
are told at the first input. Beside it: the bet that knows the jump's size and its place; the bounds by Neyman and
Pearson's lemma, of which `optimizer/live/tuning/alarm.py` tells; and Apparate's trigger, 16 answers of which none may
be wrong at 1 %. Losses between 0 and 1, a beta distribution of the same mean, in the last table. Writes
runs/alarm.json. Minutes: 2 on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np

from experiments.data import RUNS
from experiments.kit import keep, show
from optimizer.live.tuning.alarm import Alarm
from optimizer.live.tuning.apparate import WINDOW
from profiles.scores import FloatArray

BUDGET, FALSE_ALARMS, HORIZON = 0.01, 0.1, 100_000
JUMP = 0.05
GOOD = (0, 100, 1000, 10_000, 50_000)
BEFORE = (0.01, 0.005, 0.002)
JUMPS = (0.02, 0.03, 0.05, 0.1, 0.2)
MOST_DELAY = 30_000
"""Inputs after which a run is given up."""
SPREAD = 4.0
"""Of losses in between: a + b of their beta distribution."""

Draw = Callable[[np.random.Generator, float, int], FloatArray]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delay:
    """Of the runs in which the alarm had not sounded before the jump."""

    before: float
    """Mean loss before the jump."""
    good: int
    after: float
    median: float
    ninth_decile: float
    false_share: float
    """Runs in which it had."""


def yes_or_no(rng: np.random.Generator, mean: float, number: int) -> FloatArray:
    """Losses of labels."""
    return (rng.random(number) < mean).astype(np.float64)


def in_between(rng: np.random.Generator, mean: float, number: int) -> FloatArray:
    """Losses of other tasks: many small ones."""
    return np.asarray(rng.beta(SPREAD * mean, SPREAD * (1 - mean), number))


def new_alarm() -> Alarm:
    """As of thresholds that were put in force just now."""
    alarm = Alarm(BUDGET, FALSE_ALARMS)
    alarm.begin()
    return alarm


def false_share(runs: int, draw: Draw = yes_or_no) -> float:
    """Share of runs at exactly the budget in which it sounds."""
    return (
        sum(new_alarm().see(draw(np.random.default_rng([0, run]), BUDGET, HORIZON)) is not None for run in range(runs))
        / runs
    )


def delay(before: float, good: int, after: float, runs: int, draw: Draw = yes_or_no) -> Delay:
    """After a jump."""
    found, early = [], 0
    for run in range(runs):
        rng, alarm = np.random.default_rng([1, run]), new_alarm()
        if alarm.see(draw(rng, before, good)) is not None:
            early += 1
            continue
        row = alarm.see(draw(rng, after, MOST_DELAY))
        found.append(MOST_DELAY if row is None else row + 1)
    return Delay(
        before=before,
        good=good,
        after=after,
        median=median(found),
        ninth_decile=float(np.quantile(found, 0.9)),
        false_share=early / runs,
    )


def oracle_delay(runs: int, after: float = JUMP) -> float:
    """Median of the one bet that knows the size of the jump and its place."""
    rng = np.random.default_rng(2)
    losses_RN = rng.random((runs, 2000)) < after
    growth_RN = np.cumsum(np.where(losses_RN, np.log(after / BUDGET), np.log((1 - after) / (1 - BUDGET))), axis=1)
    sounds_RN = growth_RN >= -np.log(FALSE_ALARMS)
    return float(np.median(np.where(sounds_RN.any(1), sounds_RN.argmax(1) + 1, sounds_RN.shape[1])))


def power(size: float, number: int) -> float:
    """Of the best test of so many inputs that errs with a probability of `size` at the budget: it finds the jump."""
    from scipy.stats import binom

    most = int(binom.isf(size, number, BUDGET))
    drawn = (size - binom.sf(most, number, BUDGET)) / binom.pmf(most, number, BUDGET)
    return float(binom.sf(most, number, JUMP) + drawn * binom.pmf(most, number, JUMP))


def least_delay() -> int:
    """No alarm that errs in FALSE_ALARMS of the runs finds jumps at all places of a run sooner, in half of the cases.

    Cut the run into pieces of d inputs. In a piece an alarm is a test; the sizes of all tests add up to FALSE_ALARMS,
    so the mean size is that times d / HORIZON, and the best test's power is concave in its size.
    """
    return next(d for d in range(1, HORIZON) if power(FALSE_ALARMS * d / HORIZON, d) >= 0.5)


def places_within(number: int) -> int:
    """Places of a run, of HORIZON / number, at which half of the jumps can be found within so many inputs."""
    low, high = 0.0, FALSE_ALARMS
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle, number) >= 0.5 else (middle, high)
    return int(FALSE_ALARMS / high)


def triggered_share(mean: float) -> float:
    """Share of windows of the paper's trigger with a wrong answer in them."""
    return 1 - (1 - mean) ** WINDOW


def trigger_delay(after: float) -> float:
    """Median inputs until the first wrong answer: that is what triggers, of windows that slide."""
    return float(np.ceil(np.log(0.5) / np.log(1 - after)))


def main() -> None:
    """Print the tables and write them."""
    parser = ArgumentParser(prog="python -m experiments.tuning.alarm", description=__doc__)
    parser.add_argument("--runs", type=int, default=1000)
    runs: int = parser.parse_args().runs
    of_runs = partial(delay, runs=runs // 2)
    late = [of_runs(before, good, JUMP) for before in BEFORE for good in GOOD]
    sizes = [of_runs(BUDGET, 1000, after) for after in JUMPS]
    between = [of_runs(BUDGET, good, JUMP, draw=in_between) for good in GOOD[:3]]
    figures = {
        "false_share": false_share(runs),
        "false_share_in_between": false_share(runs // 5, in_between),
        "oracle_delay": oracle_delay(runs),
        "least_delay": least_delay(),
        "places_within_100": places_within(100),
        "trigger_share_of_windows": triggered_share(BUDGET),
        "trigger_median_inputs_to_a_false_one": trigger_delay(BUDGET),
    }
    show("the alarm at 1 %", ("figure", "value"), figures.items())
    columns = ("before", "good", "after", "median", "9th decile", "false before")
    for title, rows in (("a jump to 5 %", late), ("after 1,000 inputs", sizes), ("losses in between", between)):
        show(title, columns, [list(vars_of(each)) for each in rows])
    document = {"runs": runs, **figures, "late": late, "sizes": sizes, "in_between": between}
    print(f"written: {keep(document, RUNS / 'alarm.json')}")


def vars_of(found: Delay) -> tuple[float, ...]:
    """As a row."""
    return (found.before, found.good, found.after, found.median, found.ninth_decile, found.false_share)


if __name__ == "__main__":
    main()
