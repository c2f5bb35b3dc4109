"""E3, figure 19: an open loop with bursts, from the Twitter trace, and from Azure Functions.

Simulated with admission. The cluster has as many V100 as keep stock's average load below half of its capacity, as in
E3's experiment; and half as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from experiments.data import require_data
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, like_e3
from experiments.studies.picture import Bars
from experiments.studies.sides import SEED, SIDES, Workload, decide, equal_cluster, facing, scenario, serve, sst2
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, largest_ratios
from offramp.load.arrivals import CountReplay, read_trace
from optimizer.problems.problem import PlanProblem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned
from optimizer.search.planner import solve
from simulator.outcome import Figures
from simulator.scenario import FloatArray

TWITTER = "traces/twitter_per_second_infadapter.txt.gz"
AZURE = "traces/azure_functions_2019_sample_500_inv.csv.gz"
RATE_PER_S = 1000.0
"""E3's mean rate."""
UTILISATION = 0.5
"""Stock's average utilisation, below which E3 stayed."""
BURSTY_HOUR_S = 1_436_400
"""Start of an hour in the Twitter trace in which four minutes have 4.4 times the rate of the rest."""
HOUR_S = 3600
EVERY = {"full": 12, "quick": 360}
"""Speed-up of an hour. Bursts keep their heights and shares, but not their lengths."""
PAPER = Ratios(over_stock=1.16, over_early_exit=1.29)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Every side under one traffic, on one cluster."""

    name: str
    arrivals_s: FloatArray
    duration_s: float
    sides: Mapping[str, Figures | None]
    """None without a plan."""
    stock_per_s: float | None
    """The rate of stock's plan; None without one."""

    @property
    def goodputs(self) -> dict[str, float | None]:
        return {side: None if each is None else each.goodput_per_s for side, each in self.sides.items()}

    def ratios(self, side: str) -> Ratios:
        """Returns the ratios of the side's goodput to the others'."""
        return largest_ratios({name: (rate_per_s,) for name, rate_per_s in self.goodputs.items()}, side)


def twitter(every: int) -> CountReplay:
    """Returns the bursty hour, as one of every `every` seconds."""
    trace = read_trace(require_data(TWITTER), "counts")
    assert isinstance(trace, CountReplay)
    counts_B = trace.counts_B[BURSTY_HOUR_S : BURSTY_HOUR_S + HOUR_S : every]
    return CountReplay(counts_B=counts_B, bin_s=1.0, rate_per_s=RATE_PER_S)


def azure(every: int) -> CountReplay:
    """Returns the first hour, with shortened minutes; the trace has no seconds."""
    trace = read_trace(require_data(AZURE), "counts")
    assert isinstance(trace, CountReplay)
    return CountReplay(counts_B=trace.counts_B, bin_s=trace.bin_s / every, rate_per_s=RATE_PER_S)


def devices_for(cluster: PlanProblem, mean_per_s: float) -> int:
    """Returns the fewest accelerators on which stock's average load is below half of its planned rate."""
    (supply,) = cluster.devices.values()
    for count in range(1, supply.count + 1):
        planned = solve(with_count(cluster, count), "stock")
        if isinstance(planned, Planned) and mean_per_s < UTILISATION * planned.figures.rate_per_s:
            return count
    return supply.count


def with_count(cluster: PlanProblem, count: int) -> PlanProblem:
    """Returns the cluster with this number of accelerators of its one type."""
    ((device, supply),) = cluster.devices.items()
    return replace(cluster, devices={device: replace(supply, count=count)})


def case(words: str, cluster: PlanProblem, inputs: Workload, process: CountReplay, duration_s: float) -> Case:
    """Simulates every side, with admission."""
    problem = facing(cluster, inputs)
    arrivals_s = process.draw(duration_s, np.random.default_rng(SEED))
    planned = {side: each for side, each in decide(problem).items() if isinstance(each, Planned)}
    served = {
        side: serve(scenario(problem, each, inputs, arrivals_s, duration_s, admission=True)).figures()
        for side, each in planned.items()
    }
    ((device, supply),) = cluster.devices.items()
    return Case(
        name=f"{words}, {supply.count} {device}",
        arrivals_s=arrivals_s,
        duration_s=duration_s,
        sides={side: served.get(side) for side in SIDES},
        stock_per_s=planned["stock"].figures.rate_per_s if "stock" in planned else None,
    )


def cases(effort: Effort) -> list[Case]:
    """Returns cases on the accelerators of the rule, and on half; full effort adds a second traffic, and E3's case."""
    cluster, inputs, every = equal_cluster(), sst2(), EVERY[effort]
    limited, main = with_batch_limit(cluster, LARGEST_BATCH), twitter(every)
    seconds, count = float(len(main.counts_B)), devices_for(limited, RATE_PER_S)
    whole, half = (with_count(limited, number) for number in (count, max(1, count // 2)))
    found = [case("Twitter", each, inputs, main, seconds) for each in (whole, half)]
    if effort == "full":
        of_e3 = with_count(like_e3(cluster), count)
        found.append(case("Twitter, E3's case", of_e3, even_exits(cluster), main, seconds))
        found.append(case("Azure", whole, inputs, azure(every), HOUR_S / every))
    return found


def run(effort: Effort) -> StudyResult:
    """Runs BERT-base's recorded exits. The first case is the paper's figure. Quick effort has less of the hour."""
    found = cases(effort)
    bars = Bars(
        f"Bursts, a mean of {RATE_PER_S:,.0f} requests/s",
        "trace and cluster",
        "goodput (inputs/s)",
        tuple(each.name.replace(", ", "\n") for each in found),
        {side: tuple(each.goodputs[side] for each in found) for side in SIDES},
    )
    return StudyResult(
        comparisons=tuple(each for one in found for each in _comparisons(one)),
        pictures=(bars,),
        e3=found[0].ratios("e3"),
        best=found[0].ratios("best"),
        tables=tuple(map(_table, found)),
    )


def _comparisons(found: Case) -> tuple[Comparison, ...]:
    paper, e3 = PAPER if found.name.startswith("Twitter") else Ratios(), found.ratios("e3")
    return (
        Comparison(f"e3 / stock, {found.name}", e3.over_stock, paper.over_stock),
        Comparison(f"e3 / early-exit, {found.name}", e3.over_early_exit, paper.over_early_exit),
    )


def _table(found: Case) -> Table:
    mean_per_s = len(found.arrivals_s) / found.duration_s
    peak_per_s = float(np.bincount(found.arrivals_s.astype(np.int64)).max())
    share = "" if found.stock_per_s is None else f", {mean_per_s / found.stock_per_s:.0%} of what stock can do"
    rows = tuple(
        (side, each.goodput_per_s, 100 * (1 - each.in_slo_share), 1e3 * each.p99_s, 100 * each.utilisation)
        if each is not None and each.p99_s is not None
        else (side, "no plan")
        for side, each in found.sides.items()
    )
    return Table(
        f"{found.name}: mean {mean_per_s:,.0f}/s{share}, worst second {peak_per_s:,.0f}",
        ("side", "goodput", "late or refused (%)", "p99 (ms)", "busy (%)"),
        rows,
    )


STUDY = declare(__name__, run, paper=PAPER, needs=(BERT12_SST2, TWITTER, AZURE))
