"""PAME, figure 18: the next batch begins while few inputs of the current batch remain."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from cluster.emulated import Pace
from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member, SplitCounts
from earlyexit.network.boundary import Split
from experiments.pame_cases import KINDS, Kind, records_file, v100, with_missing_models
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.events import Events
from simulator.inputs import ByRamp, IntArray, nested
from simulator.scenario import FloatArray
from simulator.work import Ended, Exit, SideBySide, Work, Works

# A simulated device whose queue is never empty: its rate, and the latencies of its inputs.


@dataclass(frozen=True, slots=True)
class Item:
    """One input, by its number."""

    serial: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Saturated:
    """The figures of a run."""

    seconds: float
    latency_s_N: FloatArray
    """Seconds from the begin of an input's first batch to its answer."""
    alone_share: float
    """Share of batches that ran alone."""

    @property
    def per_s(self) -> float:
        """Inputs answered per second."""
        return len(self.latency_s_N) / self.seconds


class Device:
    """One device with all inputs queued at the start."""

    def __init__(self, splits: Sequence[Split], table: LatencyTable, decisions: ByRamp, rows_N: IntArray) -> None:
        self._events = Events()
        self._num_blocks = splits[-1].end
        self._ramps, self._decisions, self._rows_N = decisions.ramps, decisions, rows_N
        self._works = Works(Pace(table, decisions.ramps, 1.0), self._work)
        self._engine: BatchEngine[Any] = BatchEngine(splits, ObservedTimes())
        self._beside = SideBySide(self._events, lambda: True, self._exit, self._end)
        self._began_s_N = np.full(len(rows_N), np.nan)
        self._latency_s_N = np.full(len(rows_N), np.nan)

    def run(self) -> Saturated:
        """Runs until all inputs are answered."""
        members = [Member(sample_id="", payload=Item(number)) for number in range(len(self._rows_N))]
        self._engine.submit(0, members, 0.0)
        self._begin()
        self._events.run_out()
        runs = self._engine.times.runs()
        alone, batches = (sum(run.batches for run in kind) for kind in ([r for r in runs if not r.shared], runs))
        return Saturated(
            seconds=self._events.time_s, latency_s_N=self._latency_s_N, alone_share=alone / batches if batches else 1.0
        )

    def _begin(self) -> None:
        while (batch := self._engine.begin(self._events.time_s).batch) is not None:
            for member in batch.members:
                if np.isnan(self._began_s_N[member.payload.serial]):
                    self._began_s_N[member.payload.serial] = batch.started_s
            self._beside.begin(batch, self._works, self._ramps)

    def _exit(self, batch: Batch[Any], leaving: Exit) -> None:
        self._answer(leaving)
        self._engine.shrink(batch, len(leaving[1]))
        self._begin()

    def _end(self, ended: Ended) -> None:
        batch, _, first_s, total_s, leaving, survivors = ended
        now_s = self._events.time_s
        self._engine.end(batch, first_s=first_s, total_s=total_s, now_s=now_s)
        self._engine.leave(batch, now_s)
        for each in leaving:
            self._answer(each)
        if survivors and not self._engine.go_on(batch.split.end, survivors, now_s):
            self._answer((batch.split.end - 1, survivors))
        self._begin()

    def _answer(self, leaving: Exit) -> None:
        numbers = [member.payload.serial for member in leaving[1]]
        self._latency_s_N[numbers] = self._events.time_s - self._began_s_N[numbers]

    def _work(self, split: Split, pace: Pace) -> Work:
        leaves_N = self._decisions.leaves_N(split.ramps, split.ramps)[self._rows_N]
        return Work(split, array("h", leaves_N.astype(np.int16).tobytes()), pace, SplitCounts(split.budget))


# PAME, figure 18: the next batch begins while fewer than a threshold of the current batch's inputs remain.

THRESHOLDS = (0, 2, 4, 6, 8)
"""tau_b; with 0 two batches never run at once."""
BATCHES = (16, 32)
"""PAME's small and medium batches of classification (section 7.1)."""
LEAST_AGREEMENT = 0.99
MOST_LATE = 0.02
"""Allowed share of inputs that take longer than a batch without exits (section 7.3)."""
NUM_INPUTS: Mapping[Effort, int] = {"full": 40_000, "quick": 4_000}
CIFAR10 = records_file("cifar10")
"""Records of a jointly trained ResNet-32, if they exist."""
PAPER_EXITS, PAPER_OVERLAPPING = 1.289, 1.313
"""Throughput relative to stock, without and with parallel batches."""
PAPER_LATE = {4: 0.02, 6: 0.03, 8: 0.12}
"""Late shares by threshold; at 4 it is an upper bound."""
SEED = 0


class Row(NamedTuple):
    """One exit at one batch size, run in one way."""

    name: str
    times_stock: float
    mean: float
    """Mean latency, relative to the batch without exits."""
    late: float
    alone: float

    def cells(self) -> tuple[str | float, ...]:
        """Returns the cells of a table row, shares in percent."""
        return self.name, self.times_stock, self.mean, 100 * self.late, 100 * self.alone


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Recorded inputs on an accelerator, with one exit."""

    words: str
    table: LatencyTable
    decisions: ByRamp
    rows_N: IntArray

    def row(self, name: str, splits: Sequence[Split], batch: int) -> Row:
        """Runs these splits, and compares with the model without exits at the same batch."""
        stock_s = float(self.table.blocks_at(np.array(float(batch))).sum())
        ran = Device(splits, self.table, self.decisions, self.rows_N).run()
        mean, late_N = float(ran.latency_s_N.mean()) / stock_s, ran.latency_s_N > stock_s * (1 + 1e-9)
        return Row(name, ran.per_s * stock_s / batch, mean, float(late_N.mean()), ran.alone_share)

    def overlapping(self, ramp: int, batch: int, below: int) -> Row:
        """Returns one split with the exit inside."""
        end = len(self.table.block_s_NB)
        name = f"fewer than {below}" if below else "one at a time"
        whole = Split(first=0, end=end, batch=batch, ramps=(ramp,), overlap_below=below or None)
        return self.row(name, (whole,), batch)

    def fused(self, ramp: int, batch: int) -> Row:
        """Returns two splits with the cut after the exit; survivors wait for a full batch."""
        first = Split(first=0, end=ramp + 1, batch=batch, ramps=(ramp,))
        rest = Split(first=ramp + 1, end=len(self.table.block_s_NB), batch=batch)
        return self.row("fused, two splits", (first, rest), batch)

    def best_exit(self, batch: int) -> int:
        """Returns PAME's exit: the least mean latency with few late inputs (section 6.4), else the fewest late."""
        found = {ramp: self.overlapping(ramp, batch, 0) for ramp in self.decisions.ramps}
        few = [ramp for ramp, row in found.items() if row.late <= MOST_LATE]
        return min(few, key=lambda ramp: found[ramp].mean) if few else min(found, key=lambda ramp: found[ramp].late)


def surest(records: ExitRecords) -> ByRamp:
    """Returns each exit's threshold, if it were the only exit, at which the agreement holds (section 6.2)."""
    sure_NR = np.zeros(records.scores_NR.shape, dtype=np.bool_)
    allowed = (1 - LEAST_AGREEMENT) * len(records)
    for column, ramp in enumerate(records.ramps):
        scores_N = records.scores_NR[:, column]
        order_N = np.argsort(-scores_N, kind="stable")
        lost_N = records.losses_NR[order_N, column].cumsum()
        last_of_score_N = np.append(np.diff(scores_N[order_N]) != 0, True)
        fits = np.flatnonzero(last_of_score_N & (lost_N <= allowed + 1e-9))
        if len(fits):
            sure_NR[:, column] = records.sure_NR({ramp: float(scores_N[order_N[fits[-1]]])})[:, column]
    return ByRamp(ramps=records.ramps, sure_NR=sure_NR)


def case_of(words: str, records: ExitRecords, kind: Kind, effort: Effort) -> Case:
    """Returns recorded inputs in random order, repeated."""
    rows_N = np.random.default_rng(SEED).integers(len(records), size=NUM_INPUTS[effort])
    table = v100(kind, records.num_blocks, len(records.ramps))
    return Case(words=words, table=table, decisions=surest(records), rows_N=rows_N)


def cases(effort: Effort) -> list[Case]:
    """Returns images, if their model exists, and sentences; with quick effort random inputs."""
    if effort == "quick":
        rng = np.random.default_rng(SEED)
        ramps, survival_N = (4, 9), (*(1.0,) * 5, *(0.5,) * 5, *(0.3,) * 6)
        decisions = nested(survival_N, ramps, rng, num_rows=2_000)
        rows_N = rng.integers(2_000, size=NUM_INPUTS[effort])
        return [Case(words="made up", table=v100(KINDS["cifar10"], 16, 2), decisions=decisions, rows_N=rows_N)]
    found = []
    if CIFAR10.is_file():
        records = ExitRecords.load(CIFAR10)
        found.append(case_of("CIFAR-10, ResNet-32 at ResNet-50's times", records, KINDS["cifar10"], effort))
    return [*found, case_of("SST-2, BERT-base", bert12_sst2("confidence"), KINDS["sst2"], effort)]


def _comparisons(where: str, by_below: Mapping[int, Row], fused: Row) -> Iterator[Comparison]:
    """Compares with the paper, whose figures are means over three data sets of images."""
    in_bounds = [below for below, row in by_below.items() if row.late <= MOST_LATE] or [0]
    best = max(in_bounds, key=lambda below: by_below[below].times_stock)
    yield Comparison(f"throughput over stock, {where}", by_below[0].times_stock, PAPER_EXITS)
    times = by_below[best].times_stock
    yield Comparison(f"the same, parallel batches (tau_b {best}), {where}", times, PAPER_OVERLAPPING)
    for below, late in PAPER_LATE.items():
        yield Comparison(f"late share at tau_b {below}, {where}", by_below[below].late, late)
    yield Comparison(f"throughput over stock, fused, {where}", fused.times_stock)


def run(effort: Effort) -> StudyResult:
    """Runs by case and batch."""
    comparisons, tables = list[Comparison](), list[Table]()
    times: dict[str, tuple[float, ...]] = {}
    late: dict[str, tuple[float, ...]] = {}
    columns = ("one exit", "times stock's rate", "mean latency / stock's", "late (%)", "batches alone (%)")
    for case, batch in product(cases(effort), BATCHES):
        ramp, where, name = case.best_exit(batch), f"{case.words}, batch {batch}", f"{case.words}, {batch}"
        by_below = {below: case.overlapping(ramp, batch, below) for below in THRESHOLDS}
        fused = case.fused(ramp, batch)
        comparisons += _comparisons(where, by_below, fused)
        rows = tuple(row.cells() for row in (*by_below.values(), fused))
        tables.append(Table(f"{where}: exit after block {ramp}", columns, rows))
        times[name] = tuple(row.times_stock for row in by_below.values())
        late[name] = tuple(100 * row.late for row in by_below.values())
    x, title = tuple(map(float, THRESHOLDS)), "Batches that overlap, one exit"
    x_label = "next batch begins below (inputs inside)"
    result = StudyResult(
        comparisons=tuple(comparisons),
        pictures=(
            Lines(title, x_label, "throughput over stock", x, times),
            Lines(title, x_label, "late inputs (%)", x, late),
        ),
        tables=tuple(tables),
    )
    return with_missing_models(result, ("cifar10",) if effort == "full" else ())


FIG18_STUDY = declare("pame_fig18_parallel_batches", run, needs=(BERT12_SST2,), makes_up_quick=True)
