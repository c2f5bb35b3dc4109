"""Whether thresholds tuned while serving keep the budget: streams drawn from recorded exits, steady and with a jump.

    OFFRAMP_DATA=... python -m experiments.tuning.divisions [--divisions 200]

Records are the population, so the mean loss of any thresholds is known. Each division draws a stream of inputs from
them, with replacement, in which all stay after their answer; it begins with nobody leaving. *Steady*: all of one mix.
*Jump*: halfway the share of hard inputs (wrong at one of the first half of the ramps) jumps from 2 % to 40 %. Ways to
tune: `guarantee`; `apparate`; `once`, Learn-then-Test on the first 1,000 inputs and then no more; `greedy once`, the
paper's search on them.

- kept: divisions in which the answers of the whole stream lost at most the budget, 1 % on average (promised: 90 %);
- kept after: the same of the second half alone;
- broken tests: of all thresholds that were put in force after a test, those whose loss on what was then the population
  is above the budget (promised: at most 10 %);
- saved: share of the model's time that answers came earlier.

Writes runs/tuned_divisions.json. Every second ramp is active. Minutes: 4 on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.recorded_exits import bert12_sst2
from experiments.tuning.guarantee import known_blocks
from experiments.tuning.replay import TunedThresholds, replay
from experiments.tuning.threshold_search import RAMP_SHARE, drawn_records
from offramp.jobs.progress import progress_bars
from optimizer.live.best_ramps import of_ramps
from optimizer.live.exit_times import ExitTimes
from optimizer.live.tuning.base import Question, Tuned
from optimizer.live.tuning.greedy import ThresholdGame, greedy
from optimizer.live.tuning.rows import never, records_of
from optimizer.live.tuning.tuners import TUNERS, make_tuner
from optimizer.risk import Guarantee
from optimizer.thresholds import learn_then_test
from profiles.records import ExitRecords
from profiles.scores import BoolArray, FloatArray
from profiles.stream import Observations

GUARANTEE = Guarantee(budget=0.01, confidence=0.90)
NUM_INPUTS, FIRST = 4000, 1000
HARD = (0.02, 0.4)
BATCH = 64
WAYS = ("guarantee", "apparate", "once", "greedy once")
FEWER = {"apparate": 10}
"""Ways of which every so manieth division is looked at: that one searches dozens of times a stream."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Records, and which of them are drawn before and after the middle of a stream."""

    name: str
    records: ExitRecords
    hard_share: tuple[float, float] | None
    """None: as they are."""

    def weights_N(self, half: int) -> FloatArray:
        """Of each record, in a half of the stream."""
        if self.hard_share is None:
            return np.full(len(self.records), 1 / len(self.records))
        hard_N = hard(self.records)
        share = self.hard_share[half]
        return np.asarray(np.where(hard_N, share / hard_N.sum(), (1 - share) / (~hard_N).sum()))

    def loss(self, thresholds: Mapping[int, float], half: int) -> float:
        """Of these thresholds, on all inputs that may come in a half."""
        return float(self.records.outcome(thresholds).losses_N @ self.weights_N(half))

    def stream(self, rng: np.random.Generator) -> ExitRecords:
        """One division."""
        size = NUM_INPUTS // 2
        halves = [rng.choice(len(self.records), size, p=self.weights_N(half)) for half in (0, 1)]
        return self.records.subset(np.concatenate(halves))

    @property
    def times(self) -> ExitTimes:
        """All blocks alike."""
        ramp_s = dict.fromkeys(self.records.ramps, RAMP_SHARE)
        return ExitTimes(block_s=(1.0,) * self.records.num_blocks, ramp_s=ramp_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """One stream under one way to tune."""

    loss: float
    loss_after: float
    """Of the second half."""
    tests: int
    broken: int
    alarms: int
    first_alarm: float | None
    """Inputs after the middle; below 0 before it."""
    saved: float


def hard(records: ExitRecords) -> BoolArray:
    """Inputs that one of the first half of the ramps answers otherwise than the full model."""
    return np.asarray((records.losses_NR[:, : len(records.ramps) // 2] > 0).any(1))


def division(case: Case, way: str, seed: int) -> Division:
    """Streams of a seed are the same for all ways."""
    stream = case.stream(np.random.default_rng([3, seed]))
    nobody = never(stream.score, stream.ramps)
    controller: TunedThresholds | Once
    if way in TUNERS:
        question = Question(score=stream.score, guarantee=GUARANTEE, times=case.times)
        controller = TunedThresholds(make_tuner(way, question), nobody)
        found = replay(stream, controller, batch=BATCH)
    else:
        controller = Once(way, case.times, nobody)
        found = replay(stream, controller, batch=FIRST)
    half, changes = NUM_INPUTS // 2, controller.changes
    tests = [each for each in changes if each.why == "tested"]
    broken = [each for each in tests if case.loss(each.thresholds, int(each.at_s >= half)) > GUARANTEE.budget]
    alarms = [each.at_s - half for each in changes if each.why == "alarm"]
    return Division(
        loss=1 - found.agreement,
        loss_after=float(found.losses_N[half:].mean()),
        tests=len(tests),
        broken=len(broken),
        alarms=len(alarms),
        first_alarm=alarms[0] if alarms else None,
        saved=1 - case.times.mean_s(found.exits_N, stream.ramps) / case.times.whole_s,
    )


class Once:
    """Nobody leaves of the first batch; the thresholds that it gives are kept."""

    def __init__(self, way: str, times: ExitTimes, nobody: Mapping[int, float]) -> None:
        self.thresholds = nobody
        self.changes: list[Tuned] = []
        self._way = way
        self._times = times
        self._nobody = nobody

    def told(self, seen: Observations) -> None:
        """Tune by the first ones."""
        if seen.times_s_N[0] > 0:
            return
        first = records_of(seen, sorted(self._nobody))
        if self._way == "once":
            design, tested = (first.subset(rows) for rows in np.split(np.arange(len(first)), [len(first) // 4]))
            self.thresholds = learn_then_test(design, tested, GUARANTEE).thresholds or self._nobody
        else:
            self.thresholds = greedy(ThresholdGame(first, self._times, GUARANTEE.budget)).thresholds


def summary(case: Case, way: str, found: list[Division]) -> dict[str, str | float | None]:
    """Of all divisions."""
    tests = sum(each.tests for each in found)
    return {
        "stream": case.name,
        "way": way,
        "kept": fmean(each.loss <= GUARANTEE.budget for each in found),
        "kept_after": fmean(each.loss_after <= GUARANTEE.budget for each in found),
        "loss": fmean(each.loss for each in found),
        "loss_after": fmean(each.loss_after for each in found),
        "broken_tests": sum(each.broken for each in found) / tests if tests else None,
        "tests": tests / len(found),
        "alarms": fmean(each.alarms for each in found),
        "saved": fmean(each.saved for each in found),
    }


def cases() -> Iterator[Case]:
    """Steady and with a jump."""
    kinds = {"BERT, SST-2": known_blocks(bert12_sst2("confidence")), "drawn": drawn_records(1, number=20_000)}
    for name, all_ramps in kinds.items():
        records = of_ramps(all_ramps, all_ramps.ramps[1::2])
        yield Case(name=f"{name}, steady", records=records, hard_share=None)
        yield Case(name=f"{name}, jump", records=records, hard_share=HARD)


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.tuning.divisions", description=__doc__)
    parser.add_argument("--divisions", type=int, default=200)
    parser.add_argument("--only", help="streams whose names begin so", default="")
    options = parser.parse_args()
    divisions: int = options.divisions
    summaries = []
    with progress_bars() as progress:
        for case in (each for each in cases() if each.name.startswith(options.only)):
            for way in WAYS:
                found = []
                for seed in range(0, divisions, FEWER.get(way, 1)):
                    found.append(division(case, way, seed))
                    progress(f"{case.name}, {way}", seed + 1, divisions)
                summaries.append(summary(case, way, found))
    show(
        f"budget {GUARANTEE.budget:.0%}, {NUM_INPUTS} inputs, {divisions} divisions",
        list(summaries[0]),
        [list(each.values()) for each in summaries],
    )
    print(f"written: {keep(summaries, RUNS / f'tuned_divisions{options.only}.json')}")


if __name__ == "__main__":
    main()
