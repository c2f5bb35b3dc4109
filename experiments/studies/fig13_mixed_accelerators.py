"""E3, figure 13: goodput on 6 V100, 8 P100 and 15 K80, which cost as much as 16 V100.

Simulated: accelerators at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms. The runs are short, which raises
the rates of all contenders by 1 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, like_e3
from experiments.studies.picture import Bars
from experiments.studies.sides import BATCHES, SHORT, Workload, equal_cluster, facing, mixed_cluster, simulated, sst2
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, facts, largest, ratio
from optimizer.problems.problem import PlanProblem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned, Strategy
from optimizer.search.planner import solve

PIPELINES: dict[Effort, tuple[Strategy, ...]] = {"full": ("e3", "best"), "quick": ("e3",)}
PAPER = Ratios(over_stock=1.32, over_early_exit=1.70)
"""`over_stock` is that of section 5 for all language models, because figure 13 has no number."""
PAPER_OF: dict[Strategy, float | None] = {"early-exit": PAPER.over_early_exit, "stock": PAPER.over_stock}
BASELINES: tuple[Strategy, ...] = ("stock", "early-exit")
ALL_TYPES, EQUAL, ONE_TYPE = "all types", "16 V100", "one type"
"""Accelerators of a baseline: all types side by side, each as a service with the whole model and the load that it
can carry; the 16 V100 of the same price; or the best single type of the mixed cluster."""
READINGS = (ONE_TYPE, ALL_TYPES, EQUAL)

Case = tuple[PlanProblem, PlanProblem, Workload]
"""A mixed cluster, an equal one of its price, and the workload."""
Rates = Mapping[str, float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBatch:
    """Goodputs with batches up to one size, in inputs per second; None without a plan."""

    mixed: Rates
    """Pipelines over all types."""
    by_type: Mapping[str, Mapping[str, float]]
    """By accelerator type and strategy: a service on this type alone; 0 without a plan."""
    equal: Rates
    """On the 16 V100."""

    def baseline(self, strategy: str, reading: str) -> float | None:
        """Returns the strategy's goodput under a reading of the baseline."""
        alone = [rates[strategy] for rates in self.by_type.values()]
        return {ONE_TYPE: max(alone), ALL_TYPES: sum(alone), EQUAL: self.equal.get(strategy)}[reading]

    def times(self, pipeline: str, strategy: str, reading: str) -> float | None:
        """Returns the pipeline's goodput on the mixed cluster relative to the baseline's."""
        return ratio(self.mixed[pipeline], self.baseline(strategy, reading))


Found = Mapping[int, AtBatch]
"""Results by batch limit."""


def on_type(problem: PlanProblem, name: str) -> PlanProblem:
    """Returns the problem with one of the cluster's accelerator types."""
    return replace(problem, devices={name: problem.devices[name]}, latency={name: problem.latency[name]})


def as_fast_as_dear(problem: PlanProblem, equal: PlanProblem) -> PlanProblem:
    """Returns the problem with all types equally fast for their price, to isolate the gain from mixing."""
    ((name, base),) = equal.devices.items()
    table = equal.latency[name]
    latency = {}
    for each, supply in problem.devices.items():
        latency[each] = table.times(base.usd_per_hour / supply.usd_per_hour)
    return replace(problem, latency=latency)


def at_batches(
    case: Case, batches: tuple[int, ...], pipelines: tuple[Strategy, ...], effort: Effort
) -> dict[int, AtBatch]:
    """Measures every batch limit.

    A service on one type keeps the choice of smaller batches, because a K80 may prefer them.
    """
    mixed, equal, inputs = case
    found: dict[int, AtBatch] = {}
    alone: dict[str, Mapping[str, float]] = {name: dict.fromkeys(BASELINES, 0.0) for name in mixed.devices}

    def rates(problem: PlanProblem, names: tuple[Strategy, ...]) -> Rates:
        row = simulated(problem, {name: solve(problem, name) for name in names}, inputs, SHORT[effort])
        return {name: point.rate_per_s for name, point in row.items()}

    for batch in batches:
        limited, limited_equal = (with_batch_limit(facing(each, inputs), batch) for each in (mixed, equal))
        pipelined = rates(limited, pipelines)
        for name in (each for each in mixed.devices if each in limited.latency):
            now = rates(on_type(limited, name), BASELINES)
            alone[name] = {side: max(before, now[side] or 0.0) for side, before in alone[name].items()}
        on_equal = rates(limited_equal, (*BASELINES, "e3"))
        found[batch] = AtBatch(mixed=pipelined, by_type=dict(alone), equal=on_equal)
    return found


def cases(mixed: PlanProblem, equal: PlanProblem, inputs: Workload) -> dict[str, Case]:
    """Returns further cases: types as fast for their price; E3's exits, unfilled accelerators and ramps; both."""
    fast, exits = as_fast_as_dear(mixed, equal), even_exits(mixed)
    theirs, theirs_fast, theirs_equal = (like_e3(each) for each in (mixed, fast, equal))
    return {
        "as fast for their price": (fast, equal, inputs),
        "E3's circumstances": (theirs, theirs_equal, exits),
        "both": (theirs_fast, theirs_equal, exits),
    }


def run(effort: Effort) -> StudyResult:
    """Runs recorded exits on E3's clusters, by every reading; full effort adds the other cases at the largest batch."""
    case, pipelines = (mixed_cluster(), equal_cluster(), sst2()), PIPELINES[effort]
    found = at_batches(case, BATCHES[effort], pipelines, effort)
    others = cases(*case) if effort == "full" else {}
    in_cases = {
        name: at_batches(other, (LARGEST_BATCH // 2, LARGEST_BATCH), ("e3",), effort)[LARGEST_BATCH]
        for name, other in others.items()
    }
    return StudyResult(
        comparisons=(*_comparisons(found, pipelines), *_of_cases(in_cases)),
        pictures=(_goodputs(found, pipelines), _readings(found)),
        e3=_ratios(found, "e3"),
        best=_ratios(found, "best") if "best" in pipelines else Ratios(),
        tables=(_of_clusters(*case[:2]), *([_of_chains(case[0], case[2], found)] if effort == "full" else [])),
    )


def _ratios(found: Found, pipeline: str) -> Ratios:
    over_stock, over_early_exit = (_largest(found, pipeline, strategy, ALL_TYPES) for strategy in BASELINES)
    return Ratios(over_stock=over_stock, over_early_exit=over_early_exit)


def _largest(found: Found, pipeline: str, strategy: str, reading: str) -> float | None:
    return largest(each.times(pipeline, strategy, reading) for each in found.values())


def _comparisons(found: Found, pipelines: tuple[Strategy, ...]) -> Iterator[Comparison]:
    for pipeline in pipelines:
        for strategy, paper in PAPER_OF.items():
            for reading in (ALL_TYPES, EQUAL, ONE_TYPE):
                times = _largest(found, pipeline, strategy, reading)
                name = f"{pipeline} / {strategy} on {reading}, largest"
                yield Comparison(name, times, paper if pipeline == "e3" else None)
    for batch, each in found.items():
        times = ratio(each.mixed["e3"], each.equal["e3"])
        yield Comparison(f"e3 on all types / e3 on 16 V100, batch {batch}", times)


def _of_cases(in_cases: Mapping[str, AtBatch]) -> Iterator[Comparison]:
    for case, at in in_cases.items():
        for strategy, paper in PAPER_OF.items():
            for reading in (ALL_TYPES, EQUAL):
                name = f"{case}: e3 / {strategy} on {reading}, batch {LARGEST_BATCH}"
                yield Comparison(name, at.times("e3", strategy, reading), paper)
    for case, at in in_cases.items():
        yield Comparison(f"{case}: e3 on all types / e3 on 16 V100", ratio(at.mixed["e3"], at.equal["e3"]))


def _goodputs(found: Found, pipelines: tuple[Strategy, ...]) -> Bars:
    points = list(found.values())
    series = {
        f"{strategy}, {reading}": tuple(each.baseline(strategy, reading) for each in points)
        for strategy in BASELINES
        for reading in (ALL_TYPES, EQUAL)
    }
    series |= {name: tuple(each.mixed[name] for each in points) for name in pipelines}
    series["e3, 16 V100"] = tuple(each.equal["e3"] for each in points)
    title = "6 V100, 8 P100, 15 K80 against 16 V100 at the same price"
    return Bars(title, "largest batch", "goodput (inputs/s)", tuple(map(str, found)), series)


def _readings(found: Found) -> Bars:
    return Bars(
        "What e3 on the mixed cluster gains, by what the baselines may use",
        "accelerators of the baseline",
        "times the goodput, at most",
        READINGS,
        {f"e3 / {other}": tuple(_largest(found, "e3", other, each) for each in READINGS) for other in PAPER_OF},
        {f"e3 / {other}": (value,) * len(READINGS) for other, value in PAPER_OF.items()},
    )


def _of_clusters(mixed: PlanProblem, equal: PlanProblem) -> Table:
    """Returns the relative speed and price of the other types."""
    ((base, supply),) = equal.devices.items()
    one_s = {name: float(table.block_s_NB[:, 0].sum()) for name, table in mixed.latency.items()}
    rows: dict[str, float] = {}
    for name, each in mixed.devices.items():
        rows[f"{name}: time over a {base}'s, at every batch"] = one_s[name] / one_s[base]
        rows[f"{name}: price over a {base}'s"] = each.usd_per_hour / supply.usd_per_hour
    for name, problem in (("the mixed cluster", mixed), (f"16 {base}", equal)):
        rows[f"{name}: USD/h"] = sum(each.count * each.usd_per_hour for each in problem.devices.values())
    worth = sum(each.count / one_s[name] for name, each in mixed.devices.items()) * one_s[base] / supply.count
    return facts({**rows, f"the mixed cluster: computes so much of 16 {base} (%)": 100 * worth})


def _of_chains(mixed: PlanProblem, inputs: Workload, found: Found) -> Table:
    """Compares services side by side with the planner's one chain, by the cost model."""
    rows: dict[str, float] = {}
    for batch in found:
        limited = with_batch_limit(facing(mixed, inputs), batch)
        chain, *alone = (solve(each) for each in (limited, *(on_type(limited, name) for name in limited.devices)))
        assert isinstance(chain, Planned), "one type has a plan, so all together have"
        total = sum(each.figures.rate_per_s for each in alone if isinstance(each, Planned))
        over = total / chain.figures.rate_per_s
        rows[f"the best plans of every type alone, over the best chain, batch {batch}"] = over
    return facts(rows)


STUDY = declare(__name__, run, paper=PAPER, needs=(BERT12_SST2,))
