"""Serves a recorded stream with some ramps and thresholds, and computes when answers are sent."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from experiments.apparate.recording import KINDS, Kind, Stream, streams
from experiments.ramp_adjustment import PERIOD as MOVES_EVERY
from experiments.ramp_adjustment import adjust_ramps, best_ramps, evenly_spaced, greedy_tuner, of_ramps
from experiments.studies.study import Effort
from optimizer.calibration.thresholds import Guarantee
from optimizer.cost.batching import Batching
from optimizer.live.tuning import TUNERS
from optimizer.live.tuning.base import NewThresholds, Tuner, TunerSettings, never
from profiles.catalogue import published_profile
from profiles.records import ExitRecords
from profiles.scores import SCORES, BoolArray, FloatArray
from profiles.stream import Observations, shape_of
from profiles.table import LatencyTable

# Latencies and losses of a served stream.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answered:
    """The outcome of every input (N), in order."""

    answer_s_N: FloatArray
    losses_N: FloatArray
    """Losses against the full model's answers."""
    whole_s: float
    """Seconds of the model without ramps."""
    settings: Sequence[Mapping[int, float]] = ()
    """The thresholds of every batch, if a controller set them."""

    @property
    def agreement(self) -> float:
        """Share of answers that equal the full model's."""
        return 1 - float(self.losses_N.mean())

    @property
    def worst_agreement(self) -> float:
        """The lowest agreement among the tenths of the stream."""
        return min(1 - float(part.mean()) for part in np.array_split(self.losses_N, 10))

    def saved(self, percentile: float) -> float:
        """Share of the whole model's seconds that this percentile of the latencies saves; it may be negative."""
        return 1 - float(np.percentile(self.answer_s_N, percentile)) / self.whole_s

    @property
    def mean_saved(self) -> float:
        """Share of the whole model's seconds that the mean latency saves."""
        return 1 - float(self.answer_s_N.mean()) / self.whole_s

    def since(self, first: int) -> Answered:
        """Returns the outcomes without the first inputs."""
        return Answered(answer_s_N=self.answer_s_N[first:], losses_N=self.losses_N[first:], whole_s=self.whole_s)


# Thresholds that are set once, as in early-exit models without Apparate (its sections 2.3 and 5.3).

GRID = 200
"""Number of candidate thresholds if all ramps have the same one."""


def answered(
    records: ExitRecords,
    thresholds: Mapping[int, float],
    batching: Batching,
    *,
    evaluated: Collection[int] | None = None,
) -> Answered:
    """Returns the outcome under these thresholds; `evaluated` ramps take time (by default these ramps)."""
    outcome = records.outcome(thresholds)
    released_s_K = batching.released_s_N(thresholds if evaluated is None else evaluated)
    return Answered(answer_s_N=released_s_K[outcome.exits_N], losses_N=outcome.losses_N, whole_s=batching.whole_s)


def optimal(records: ExitRecords, batching: Batching) -> Answered:
    """Returns the optimum: inputs leave at the first ramp that is right; ramps take no time (Apparate, 2.2)."""
    right_NE = np.column_stack([records.losses_NR == 0, np.ones(len(records), dtype=bool)])
    exits_N = np.array([*records.ramps, records.num_blocks - 1])[right_NE.argmax(1)]
    return Answered(
        answer_s_N=batching.released_s_N(())[exits_N], losses_N=np.zeros(len(records)), whole_s=batching.whole_s
    )


def same_threshold(records: ExitRecords, budget: float, batching: Batching, ramps: tuple[int, ...]) -> dict[int, float]:
    """Returns the one threshold for all of these ramps that saves most within the budget on these inputs.

    The candidates are 200 quantiles of the scores. If none keeps the budget, no input leaves.
    """
    columns = [records.ramps.index(ramp) for ramp in ramps]
    grid = np.quantile(records.scores_NR[:, columns], np.linspace(0, 1, GRID + 1))
    replayed = dict.fromkeys(ramps, SCORES[records.score].never)
    most = answered(records, replayed, batching).mean_saved
    for threshold in np.unique(grid).tolist():
        tried = dict.fromkeys(ramps, threshold)
        outcome = answered(records, tried, batching)
        if outcome.losses_N.mean() <= budget and outcome.mean_saved > most:
            replayed, most = tried, outcome.mean_saved
    return replayed


def sampled(records: ExitRecords, share: float, rng: np.random.Generator) -> ExitRecords:
    """Returns inputs drawn evenly over a stream, in order."""
    rows = rng.choice(len(records), size=round(len(records) * share), replace=False)
    return records.subset(np.sort(rows).astype(np.int64))


def greedy_thresholds(
    records: ExitRecords, budget: float, batching: Batching, ramps: tuple[int, ...]
) -> dict[int, float]:
    """Returns one threshold per ramp, by Apparate's greedy search on these inputs."""
    return dict(greedy_tuner(batching, budget)(of_ramps(records, ramps)))


# Random streams for quick runs and tests. Ramps are more confident if they are right, until inputs drift.

NUM_INPUTS = 1800
NUM_BLOCKS = 6
RAMPS = tuple(range(NUM_BLOCKS - 1))
MADE_UP_PERIOD = 450
"""Number of inputs until the difficulty changes."""


def stream(name: str, seed: int = 0, num_inputs: int = NUM_INPUTS, *, hardest: float = 0.6) -> Stream:
    """Returns inputs with difficulty from 0 to 1: below 0.3 in one period, and up to `hardest` in the next.

    A ramp is right more often the deeper it sits and the easier the input is. It is confident if it is right. On inputs
    that are harder than any at the beginning it is also confident of wrong answers.
    """
    rng = np.random.default_rng(seed)
    reach_N = np.where(np.arange(num_inputs) // MADE_UP_PERIOD % 2 == 0, 0.3, hardest)
    difficulty_N = rng.uniform(0, 1, num_inputs) * reach_N
    depth_R = (np.array(RAMPS) + 1) / NUM_BLOCKS
    right_NR = rng.uniform(0, 1, (num_inputs, len(RAMPS))) < 1 - difficulty_N[:, None] * (1 - 0.8 * depth_R)
    blind_NR = (difficulty_N[:, None] > 0.3) & (rng.uniform(0, 1, right_NR.shape) < 0.5)
    sure_NR = np.where(right_NR | blind_NR, rng.beta(8, 1, right_NR.shape), rng.beta(3, 3, right_NR.shape))
    records = ExitRecords(
        score="confidence",
        num_blocks=NUM_BLOCKS,
        ramps=RAMPS,
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=sure_NR.astype(np.float32),
        losses_NR=(~right_NR).astype(np.float64),
    )
    return Stream(name=name, kind=KINDS[name], records=records)


def table() -> LatencyTable:
    """Returns equal blocks, and ramps that take a hundredth of the model."""
    batches = (1, 2, 4, 8)
    block_s = [[0.002 + 0.0005 * batch for batch in batches]] * NUM_BLOCKS
    ramp_s = [[0.00015] * len(batches)] * len(RAMPS)
    return LatencyTable.of_rows(batches, block_s, ramp_s)


# A recorded stream, with the times of its model.

BUDGET = 0.01
"""Allowed share of answers that differ from the full model's (Apparate section 5.1)."""
RAMP_BUDGET = 0.02
"""Allowed share of time that ramps add to the worst case (Apparate section 5.1)."""
TEXT_DEVICE, VISION_DEVICE = "A6000", "V100"
"""Devices with published times: Apparate's A6000 for DistilBERT, with as many blocks as MiniLM, and a V100 for
ResNet-50 at many batch sizes."""
VISION_RAMP = 0.11 / 16
"""A ramp's share of the model: in a ResNet-50, BranchyNet's 16 ramps take 11 % (table 2)."""
VISION_BLOCKS = 15


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A stream with its times, on which strategies are compared."""

    stream: Stream
    table: LatencyTable

    @property
    def name(self) -> str:
        return self.stream.name

    @property
    def kind(self) -> Kind:
        return self.stream.kind

    @property
    def batching(self) -> Batching:
        """The times of batches of 1."""
        return Batching(table=self.table, ramps=self.stream.records.ramps, size=1)


def cases(effort: Effort) -> list[Case]:
    """Returns the eight streams; with quick effort two random ones of images and texts, which need no data."""
    if effort == "quick":
        return [Case(stream=stream(name, seed), table=table()) for seed, name in enumerate(("weather", "gradual"))]
    return [Case(stream=stream, table=table_of(stream.kind)) for stream in streams()]


@cache
def table_of(kind: Kind) -> LatencyTable:
    """Returns the times of a published model with about as many blocks as the recorded one (MiniLM 6, ResNet-32 15)."""
    if kind == "text":
        (table,) = published_profile("distilbert-base", TEXT_DEVICE).tables.values()
        return table
    (table,) = published_profile("resnet50", VISION_DEVICE).tables.values()
    block_s_B = table.block_s_NB.sum(0) / VISION_BLOCKS
    ramp_s_B = VISION_RAMP * table.block_s_NB.sum(0)
    return LatencyTable(
        batches=table.batches,
        block_s_NB=np.tile(block_s_B, (VISION_BLOCKS, 1)),
        ramp_s_EB=np.tile(ramp_s_B, (VISION_BLOCKS - 1, 1)),
    )


# A recorded stream, served batch by batch under a controller that sets ramps and thresholds.

BATCH = 16
"""Inputs per batch: Apparate's window (section 3.2)."""


class Controller(Protocol):
    """Observes answered inputs, and sets ramps and thresholds."""

    @property
    def thresholds(self) -> Mapping[int, float]:
        """Thresholds of the active ramps; other ramps are inactive."""
        ...

    def observe(self, seen: Observations) -> None:
        """Observes inputs that were answered under `thresholds`, in order; their times are positions in the stream."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fixed:
    """Constant thresholds."""

    thresholds: Mapping[int, float]

    def observe(self, seen: Observations) -> None: ...


class TunedThresholds:
    """Constant ramps, whose thresholds a tuner sets."""

    def __init__(self, tuner: Tuner, thresholds: Mapping[int, float]) -> None:
        """Starts the tuner with the thresholds of the active ramps."""
        self.thresholds = thresholds
        self.changes: list[NewThresholds] = []
        """The tuner's changes; times are positions in the stream."""
        self._tuner = tuner
        tuner.follow(thresholds, 0.0)

    def observe(self, seen: Observations) -> None:
        """Passes the inputs to the tuner; its thresholds hold from the next batch on."""
        replayed = self._tuner.observe(seen)
        if replayed is not None:
            self.changes.append(replayed)
            self.set(replayed.thresholds, after(seen))

    def set(self, thresholds: Mapping[int, float], since_s: float) -> None:
        """Sets thresholds from a time on."""
        self.thresholds = thresholds
        self._tuner.follow(thresholds, since_s)


def after(seen: Observations) -> float:
    """Returns a time between these inputs and the next."""
    return float(seen.times_s_N[-1]) + 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The outcome of the stream's inputs (N)."""

    exits_N: npt.NDArray[np.int64]
    losses_N: FloatArray
    """Losses of the answers against the full model's."""
    settings: Sequence[Mapping[int, float]]
    """The thresholds of every batch."""


def tuned_replay(
    records: ExitRecords,
    controller: Controller,
    *,
    batch: int = BATCH,
    probe_N: BoolArray | None = None,
) -> Replayed:
    """Serves records in order of arrival; the ramps of the controller's thresholds are active.

    All inputs run to the end of the model, so every active ramp observes them. The inactive ramps observe only probes
    (`probe_N`).
    """
    if probe_N is None:
        probe_N = np.zeros(len(records), dtype=bool)
    parts: list[tuple[npt.NDArray[np.int64], FloatArray]] = []
    settings = []
    for first in range(0, len(records), batch):
        rows_N = np.arange(first, min(first + batch, len(records)))
        part, thresholds = records.subset(rows_N), dict(controller.thresholds)
        outcome = part.outcome(thresholds)
        parts.append((outcome.exits_N, outcome.losses_N))
        settings.append(thresholds)
        controller.observe(observed(part, thresholds, probe_N[rows_N], first=first))
    exits, losses = zip(*parts, strict=True)
    return Replayed(exits_N=np.concatenate(exits), losses_N=np.concatenate(losses), settings=tuple(settings))


def observed(
    records: ExitRecords, thresholds: Mapping[int, float], probe_N: BoolArray, *, first: int = 0
) -> Observations:
    """Returns the observations of inputs that stay, under these thresholds; times are positions, from `first` on."""
    active_NR = np.tile([ramp in thresholds for ramp in records.ramps], (len(records), 1))
    seen_NR = active_NR | probe_N[:, None]
    truth_NE = records.true_losses_NE
    return Observations(
        shape=shape_of(records),
        times_s_N=first + np.arange(len(records), dtype=np.float64),
        probe_N=probe_N,
        stayed_N=np.ones(len(records), dtype=bool),
        active_NR=active_NR,
        exits_N=records.outcome(thresholds).exits_N.astype(np.int16),
        scores_NR=np.where(seen_NR, records.scores_NR, np.nan).astype(np.float32),
        losses_NR=np.where(seen_NR, records.losses_NR, np.nan).astype(np.float32),
        true_losses_NE=None
        if truth_NE is None
        else np.where(np.column_stack([seen_NR, np.ones(len(records), dtype=bool)]), truth_NE, np.nan).astype(
            np.float32
        ),
    )


def timed_replay(case: Case, controller: Controller, *, probe_share: float = 0.0) -> Answered:
    """Serves a stream. All inputs run to the end of the model, and the same batches are probes in every run."""
    records, batching = case.stream.served, case.batching
    num_batches = -(-len(records) // BATCH)
    probes_K = np.random.default_rng(SEED).random(num_batches) < probe_share
    replayed = tuned_replay(records, controller, probe_N=np.repeat(probes_K, BATCH)[: len(records)])
    answer_s = []
    for index, (setting, is_probe) in enumerate(zip(replayed.settings, probes_K.tolist(), strict=True)):
        exits_N = replayed.exits_N[index * BATCH : (index + 1) * BATCH]
        answer_s.append(batching.released_s_N(records.ramps if is_probe else setting)[exits_N])
    return Answered(
        answer_s_N=np.concatenate(answer_s),
        losses_N=replayed.losses_N,
        whole_s=batching.whole_s,
        settings=replayed.settings,
    )


# Strategies: the ramps, the tuner of their thresholds, and the changes while a stream is served.

TunerName = Literal["guarantee", "apparate"]
PROBE_SHARE = 0.05
"""Share of batches that run all ramps, if ramps are planned."""
STRATEGIES_PERIOD = 1000
"""Number of inputs between two plans."""
WINDOW = 600
"""Number of the latest probes on which a plan is based."""
CONFIDENCE = 0.9
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Budgets:
    """The allowed loss, and the time that ramps may add to the worst case."""

    loss: float = BUDGET
    ramps: float = RAMP_BUDGET

    @property
    def guarantee(self) -> Guarantee:
        """Returns the allowed loss as a guarantee with confidence."""
        return Guarantee(budget=self.loss, confidence=CONFIDENCE)


class PlannedRamps(TunedThresholds):
    """Plans the ramps every period from the latest probes; at new ramps no input leaves at first."""

    def __init__(self, tuner: Tuner, thresholds: Mapping[int, float], known: Observations, budgets: Budgets) -> None:
        """Starts with `known`: earlier inputs that ran all ramps."""
        super().__init__(tuner, thresholds)
        self._known = known
        self._budgets = budgets
        self._next_s = float(STRATEGIES_PERIOD)

    def observe(self, seen: Observations) -> None:
        """Makes a plan at the end of a period."""
        super().observe(seen)
        probes = seen.take(seen.probe_N)
        if len(probes):
            joined = Observations.join(seen.shape, [self._known, probes])
            self._known = joined.take(np.arange(max(0, len(joined) - WINDOW), len(joined)))
        if after(seen) >= self._next_s:
            self._next_s += STRATEGIES_PERIOD
            self._plan(after(seen))

    def _plan(self, since_s: float) -> None:
        settings = self._tuner.settings
        records = self._known.records(self._known.shape.ramps)
        replayed = best_ramps(
            records, settings.batching, self._budgets.ramps, greedy_tuner(settings.batching, self._budgets.loss)
        ).ramps
        if set(replayed) != set(self.thresholds):
            kept = {ramp: value for ramp, value in self.thresholds.items() if ramp in replayed}
            self.set(never(settings.score, replayed) | kept, since_s)


class MovedRamps(TunedThresholds):
    """Apparate's mover: a round every 128 inputs, based on the active ramps' observations since the last round."""

    def __init__(self, tuner: Tuner, thresholds: Mapping[int, float], budgets: Budgets) -> None:
        super().__init__(tuner, thresholds)
        self._budgets = budgets
        self._window: list[Observations] = []

    def observe(self, seen: Observations) -> None:
        """Moves a ramp at the end of a round."""
        ramps = set(self.thresholds)
        super().observe(seen)
        self._window.append(seen)
        if sum(map(len, self._window)) < MOVES_EVERY:
            return
        window = Observations.join(seen.shape, self._window).records(ramps)
        settings = self._tuner.settings
        tune = greedy_tuner(settings.batching, self._budgets.loss)
        moved = adjust_ramps(window, self.thresholds, settings.batching, tune, self._budgets.ramps)
        self._window = []
        if moved.thresholds != self.thresholds:
            self.set(moved.thresholds, after(seen))


def tuner_of(name: TunerName, case: Case, budgets: Budgets) -> Tuner:
    """Returns a new tuner for a stream."""
    score = case.stream.records.score
    return TUNERS[name](TunerSettings(score=score, guarantee=budgets.guarantee, batching=case.batching))


def with_even_ramps(case: Case, name: TunerName, budgets: Budgets = Budgets()) -> Answered:
    """Serves with the ramps with which Apparate begins; a tuner sets their thresholds."""
    return with_ramps(case, evenly_spaced(case.batching, budgets.ramps), name, budgets)


def with_ramps(case: Case, ramps: tuple[int, ...], name: TunerName, budgets: Budgets = Budgets()) -> Answered:
    """Serves with these ramps; a tuner sets their thresholds."""
    controller = TunedThresholds(tuner_of(name, case, budgets), never(case.stream.records.score, ramps))
    return timed_replay(case, controller)


def with_planned_ramps(case: Case, name: TunerName, budgets: Budgets = Budgets()) -> Answered:
    """Serves with ramps that are planned on the beginning, and again every period from probes."""
    initial = case.stream.initial
    ramps = best_ramps(initial, case.batching, budgets.ramps, greedy_tuner(case.batching, budgets.loss)).ramps
    known = observed(initial, {}, np.ones(len(initial), dtype=bool), first=-len(initial))
    thresholds = never(case.stream.records.score, ramps)
    controller = PlannedRamps(tuner_of(name, case, budgets), thresholds, known, budgets)
    return timed_replay(case, controller, probe_share=PROBE_SHARE)


def with_moved_ramps(case: Case, name: TunerName, budgets: Budgets = Budgets()) -> Answered:
    """Serves with evenly spaced ramps that are moved every 128 inputs."""
    ramps = evenly_spaced(case.batching, budgets.ramps)
    thresholds = never(case.stream.records.score, ramps)
    controller = MovedRamps(tuner_of(name, case, budgets), thresholds, budgets)
    return timed_replay(case, controller)
