"""Apparate, figure 17: with a longer SLO, batches and queues grow, and exits save a smaller share of the latency.

Simulated: one accelerator whose inputs stay after their answer, with arrivals from Azure Functions and Twitter. Exits
come from an earlier replay: Apparate's tuner on the best ramps for the first inputs of the stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from earlyexit.network.boundary import Split
from experiments.apparate.recording import NEEDS
from experiments.data import require_data
from experiments.ramp_adjustment import best_ramps, greedy_tuner
from experiments.served_streams import BATCH, BUDGET, RAMP_BUDGET, STRATEGIES_PERIOD, Answered, Case, cases, with_ramps
from experiments.studies.picture import Lines
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from offramp.load.arrivals import read_counts
from offramp.load.processes import CountReplay, Poisson, Process
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.catalogue import published_profile
from profiles.table import LatencyTable
from simulator.inputs import ByRamp
from simulator.outcome import Outcome
from simulator.scenario import Scenario
from simulator.simulate import simulate

AZURE = "traces/azure_functions_2019_sample_500_inv.csv.gz"
TWITTER = "traces/twitter_per_second_infadapter.txt.gz"
BURSTY_S = 1_436_400
"""Second of Twitter's trace at which an hour with bursts begins."""
TIMES_SLO = (1, 2, 4)
SHORTEST_SLO = 2.0
"""The shortest SLO, in multiples of the model's time at batch 1 (section 5.1)."""
ROOM = 0.5
"""Time of the largest batch as a share of the SLO. An input that just missed a batch is in time with the next one."""
LOAD = 0.5
"""Load as a share of the rate of full batches."""
NUM_INPUTS: Mapping[Effort, int] = {"full": 16_000, "quick": 2_000}
STREAMS = ("people", "imdb")
"""One stream of each kind. A simulation takes as long as a replay of all eight streams."""
PAPER = {"saved, shortest SLO": 16.3, "saved, 4 x": 6.8}
"""Saved share of the median latency (%), GPT-2."""
SEED = 0

Arrivals = Callable[[float], Process]
"""A function from a mean rate per second to arrivals."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """The figures at one SLO."""

    times: int
    batch: int
    saved: tuple[float, float, float]
    """Saved shares of the 25th, 50th and 99th percentile of the latency without ramps."""
    median_ms: float
    """Median latency without ramps."""
    late: float
    """Share of inputs that miss the SLO without ramps."""

    def cells(self) -> tuple[str | float, ...]:
        """Returns the cells of a table row, shares in percent."""
        return f"{self.times} x", self.batch, self.median_ms, *(100 * each for each in self.saved), 100 * self.late


def with_batches(case: Case) -> LatencyTable:
    """Returns the case with times of batches; those of texts scale as BERT-base's on a V100."""
    if len(case.table.batches) > 1:
        return case.table
    profile = published_profile("bert-base", "V100")
    like = profile.tables[profile.lengths[0]]
    growth_B = like.block_s_NB.sum(0) / like.block_s_NB[:, 0].sum()
    return LatencyTable(
        batches=like.batches,
        block_s_NB=case.table.block_s_NB[:, :1] * growth_B,
        ramp_s_EB=case.table.ramp_s_EB[:, :1] * growth_B,
    )


def largest_batch(table: LatencyTable, slo_s: float) -> int:
    """Returns the largest batch that leaves room in the SLO."""
    whole_s_B = table.block_s_NB.sum(0)
    return max(batch for batch, seconds in zip(table.batches, whole_s_B, strict=True) if seconds <= ROOM * slo_s)


def decisions_of(case: Case, ramps: tuple[int, ...], served: Answered) -> ByRamp:
    """Returns the exits under the thresholds that were in force when each input arrived."""
    records = case.stream.served
    sure_NR = np.zeros(records.scores_NR.shape, dtype=bool)
    for index, thresholds in enumerate(served.settings):
        rows = np.arange(index * BATCH, min((index + 1) * BATCH, len(records)))
        sure_NR[rows] = records.subset(rows).sure_NR(thresholds)
    columns = [records.ramps.index(ramp) for ramp in ramps]
    return ByRamp(ramps=ramps, sure_NR=sure_NR[:, columns])


def scenario(case: Case, table: LatencyTable, decisions: ByRamp, ramps: tuple[int, ...], slo_s: float) -> Scenario:
    """Returns one accelerator without arrivals; with ramps, inputs stay after their answer.

    The SLO determines only the batch. Nothing is dropped, so the percentiles of both sides are of the same inputs.
    """
    num_blocks, name = case.stream.records.num_blocks, "device"
    columns = [case.stream.records.ramps.index(ramp) for ramp in decisions.ramps]
    problem = PlanProblem(
        num_blocks=num_blocks,
        ramps=decisions.ramps,
        survival_N=(1.0,) * num_blocks,
        latency={name: replace(table, ramp_s_EB=table.ramp_s_EB[columns])},
        devices={name: Supply(count=1, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(1.0,) * num_blocks,
        slo=Slo(latency_s=slo_s),
        objective=MaximizeRate(),
    )
    split = Split(
        first=0,
        end=num_blocks,
        batch=largest_batch(table, slo_s),
        ramps=ramps,
        after_answer="stay" if ramps else "stop",
    )
    policy = PolicySpec(name="confidence", thresholds=0.5)
    return Scenario(
        problem=problem,
        plan=Plan(stages=(Stage(device=name, replicas=1, splits=(split,)),), policy=policy, predicted={}),
        decisions=decisions,
        rows_N=np.arange(decisions.num_rows),
        arrivals_s=np.zeros(0),
        duration_s=1.0,
        admission=False,
    )


def points(case: Case, arrivals: Arrivals, effort: Effort) -> list[Point]:
    """Returns the figures with and without ramps by SLO; the rate grows with the batches, and is the same for both."""
    table = with_batches(case)
    first = case.stream.served.subset(np.arange(min(STRATEGIES_PERIOD, len(case.stream.served))))
    ramps = best_ramps(first, case.batching, RAMP_BUDGET, greedy_tuner(case.batching, BUDGET)).ramps
    decisions = decisions_of(case, ramps, with_ramps(case, ramps, "apparate"))
    found = []
    for times in TIMES_SLO:
        slo_s = times * SHORTEST_SLO * case.batching.whole_s
        rate_per_s = offered_per_s(table, largest_batch(table, slo_s))
        duration_s = NUM_INPUTS[effort] / rate_per_s
        arrivals_s = arrivals(rate_per_s).draw(duration_s, np.random.default_rng(SEED))
        idle = [scenario(case, table, decisions, active, slo_s) for active in (ramps, ())]
        offered = [replace(each, arrivals_s=arrivals_s, duration_s=duration_s) for each in idle]
        found.append(point(times, slo_s, largest_batch(table, slo_s), *map(simulate, offered)))
    return found


def offered_per_s(table: LatencyTable, batch: int) -> float:
    """Returns the rate that is sent to an accelerator with batches of this size."""
    return LOAD * batch / float(table.blocks_at(np.array(float(batch))).sum())


def point(times: int, slo_s: float, batch: int, ours: Outcome, stock: Outcome) -> Point:
    """Compares the outcomes of the same arrivals with and without ramps."""
    percentiles = (np.percentile(each.latency_s_N, (25, 50, 99)) for each in (ours, stock))
    (p25, p50, p99), (stock_p25, stock_p50, stock_p99) = percentiles
    return Point(
        times=times,
        batch=batch,
        saved=(1 - p25 / stock_p25, 1 - p50 / stock_p50, 1 - p99 / stock_p99),
        median_ms=1e3 * float(stock_p50),
        late=float((stock.latency_s_N > slo_s).mean()),
    )


Results = Mapping[str, Mapping[str, Sequence[Point]]]
"""Points by arrivals and stream."""


def compare(streams: Sequence[Case], arrivals: Mapping[str, Arrivals], effort: Effort) -> StudyResult:
    """Returns the median savings at the shortest SLO and at four times that SLO."""
    found = {name: {case.name: points(case, each, effort) for case in streams} for name, each in arrivals.items()}
    every = {f"{stream}, {name}": row for name, rows in found.items() for stream, row in rows.items()}
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{label}: median {words} (%)", 100 * row[index].saved[1], paper)
            for label, row in every.items()
            for index, (words, paper) in zip((0, -1), PAPER.items(), strict=True)
        ),
        pictures=(
            Lines(
                "Median latency saved",
                "SLO (times the shortest)",
                "saved (%)",
                tuple(map(float, TIMES_SLO)),
                {label: tuple(100 * each.saved[1] for each in row) for label, row in every.items()},
            ),
        ),
        tables=(
            Table(
                "By SLO",
                ("stream, arrivals", "SLO", "batch", "median (ms)", "p25 saved (%)", "median", "p99", "late (%)"),
                tuple((label, *each.cells()) for label, row in every.items() for each in row),
            ),
        ),
    )


def run(effort: Effort) -> StudyResult:
    """Runs two recorded streams and traces; with quick effort random streams and Poisson arrivals."""
    if effort == "quick":
        return compare(cases(effort)[:1], {"Poisson": lambda rate_per_s: Poisson(rate_per_s=rate_per_s)}, effort)
    azure, twitter = (read_counts(require_data(name)).counts_B for name in (AZURE, TWITTER))
    arrivals: dict[str, Arrivals] = {  # Azure's minutes as seconds, so that a run covers many
        "Azure": lambda rate_per_s: CountReplay(counts_B=azure, bin_s=1.0, rate_per_s=rate_per_s),
        "Twitter": lambda rate: CountReplay(counts_B=twitter, bin_s=1.0, start_s=BURSTY_S, rate_per_s=rate),
    }
    return compare([case for case in cases(effort) if case.name in STREAMS], arrivals, effort)


STUDY = declare(__name__, run, needs=(*NEEDS, AZURE, TWITTER), makes_up_quick=True)
