"""E3, figure 13: goodput on 6 V100, 8 P100 and 15 K80, which cost what 16 V100 cost.

Simulated: accelerators at E3's speed, Poisson arrivals, 99 % of inputs within 100 ms; in short runs, which tell rates
1 % higher than long ones, those of all contenders alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, like_e3
from experiments.studies.picture import Bars
from experiments.studies.side_by_side import Row, simulated
from experiments.studies.sides import BATCHES, Workload, decide, equal_cluster, facing, mixed_cluster, sst2
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, facts, largest, ratio
from optimizer.decision import Planned, Strategy
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit

PIPELINES: dict[Effort, tuple[Strategy, ...]] = {"full": ("e3", "best"), "quick": ("e3",)}
PAPER = Ratios(over_stock=1.32, over_early_exit=1.70)
"""Over stock: what section 5 says of all language models, without a figure's number."""
PAPER_OF: dict[Strategy, float | None] = {"early-exit": PAPER.over_early_exit, "stock": PAPER.over_stock}
BASELINES: tuple[Strategy, ...] = ("stock", "early-exit")
READINGS = ("one type", "all types", "16 V100")
"""What a baseline may use: the type of the mixed cluster that suits it best; all of them side by side, each a service
of its own that holds the whole model and gets the load that it bears; or the 16 V100 of the same price."""
FAIR = "all types"

Case = tuple[PlanProblem, PlanProblem, Workload]
"""A mixed cluster, an equal one of its price, and what they serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AtBatch:
    """Goodputs with batches up to one size, in inputs per second; None without a plan."""

    mixed: Mapping[str, float | None]
    """Pipelines over all types."""
    by_type: Mapping[str, Mapping[str, float]]
    """By accelerator type and strategy: a service on that type alone; 0 without a plan."""
    equal: Mapping[str, float | None]
    """On the 16 V100."""

    @property
    def on_equal(self) -> float | None:
        """How many times e3's goodput there its goodput on the mixed cluster is."""
        return ratio(self.mixed["e3"], self.equal["e3"])

    def baseline(self, strategy: str, reading: str) -> float | None:
        """What the strategy does by that reading."""
        alone = [rates[strategy] for rates in self.by_type.values()]
        return {"one type": max(alone), "all types": sum(alone), "16 V100": self.equal.get(strategy)}[reading]

    def times(self, pipeline: str, strategy: str, reading: str) -> float | None:
        """How many times the baseline's goodput the pipeline's on the mixed cluster is."""
        return ratio(self.mixed[pipeline], self.baseline(strategy, reading))


Found = Mapping[int, AtBatch]
"""By batch limit."""


def on_type(problem: PlanProblem, name: str) -> PlanProblem:
    """A cluster's accelerators of one type."""
    return replace(problem, devices={name: problem.devices[name]}, latency={name: problem.latency[name]})


def as_fast_as_dear(problem: PlanProblem, equal: PlanProblem) -> PlanProblem:
    """Were every type as fast for its price as the equal cluster's: what is left is what mixing itself gives."""
    ((name, base),) = equal.devices.items()
    table = equal.latency[name]
    latency = {}
    for each, supply in problem.devices.items():
        slower = base.usd_per_hour / supply.usd_per_hour
        latency[each] = replace(table, block_s_NB=table.block_s_NB * slower, ramp_s_EB=table.ramp_s_EB * slower)
    return replace(problem, latency=latency)


def at_batches(case: Case, batches: tuple[int, ...], pipelines: tuple[Strategy, ...]) -> dict[int, AtBatch]:
    """Every batch limit.

    A service on one type keeps the smaller batches that it had: what suits a K80 is its own to choose.
    """
    mixed, equal, inputs = case
    found: dict[int, AtBatch] = {}
    alone: dict[str, Mapping[str, float]] = {name: dict.fromkeys(BASELINES, 0.0) for name in mixed.devices}

    def row(problem: PlanProblem, names: tuple[Strategy, ...]) -> Row:
        return simulated(problem, decide(problem, names), inputs, "quick")

    for batch in batches:
        limited, limited_equal = (with_batch_limit(facing(each, inputs), batch) for each in (mixed, equal))
        rows = {"mixed": row(limited, pipelines)}
        for name in (each for each in mixed.devices if each in limited.latency):
            rows[name] = row(on_type(limited, name), BASELINES)
            alone[name] = better_of(alone[name], rows[name])
        rows["equal"] = row(limited_equal, (*BASELINES, "e3"))
        found[batch] = AtBatch(mixed=_rates(rows["mixed"]), by_type=dict(alone), equal=_rates(rows["equal"]))
    return found


def better_of(before: Mapping[str, float], row: Row) -> dict[str, float]:
    """Goodput by strategy of a service that may stay as it was before."""
    return {name: max(rate_per_s, row[name].rate_per_s or 0.0) for name, rate_per_s in before.items()}


def _rates(row: Row) -> dict[str, float | None]:
    return {name: point.rate_per_s for name, point in row.items()}


def cases(mixed: PlanProblem, equal: PlanProblem, inputs: Workload) -> dict[str, Case]:
    """Other types as fast for their price; E3's exits, unfilled accelerators and ramps; both."""
    fast, exits = as_fast_as_dear(mixed, equal), even_exits(mixed)
    theirs, theirs_fast, theirs_equal = (like_e3(each) for each in (mixed, fast, equal))
    return {
        "as fast for their price": (fast, equal, inputs),
        "E3's circumstances": (theirs, theirs_equal, exits),
        "both": (theirs_fast, theirs_equal, exits),
    }


def compare(case: Case, others: Mapping[str, Case], effort: Effort) -> StudyResult:
    """The figure, by every reading of it; at the largest batch, what it would be in every other case."""
    mixed, equal, inputs = case
    found = at_batches(case, BATCHES[effort], PIPELINES[effort])
    in_cases = {
        name: at_batches(other, (LARGEST_BATCH // 2, LARGEST_BATCH), ("e3",))[LARGEST_BATCH]
        for name, other in others.items()
    }
    return StudyResult(
        comparisons=(*_comparisons(found, PIPELINES[effort]), *_of_cases(in_cases)),
        pictures=(_goodputs(found, PIPELINES[effort]), _readings(found)),
        e3=_ratios(found, "e3"),
        best=_ratios(found, "best") if "best" in PIPELINES[effort] else Ratios(),
        tables=(_of_clusters(mixed, equal), _of_chains(mixed, inputs, found)),
    )


def _largest(found: Found, pipeline: str, strategy: str, reading: str) -> float | None:
    return largest(each.times(pipeline, strategy, reading) for each in found.values())


def _ratios(found: Found, pipeline: str) -> Ratios:
    over_stock, over_early_exit = (_largest(found, pipeline, strategy, FAIR) for strategy in BASELINES)
    return Ratios(over_stock=over_stock, over_early_exit=over_early_exit)


def _comparisons(found: Found, pipelines: tuple[Strategy, ...]) -> Iterator[Comparison]:
    for pipeline in pipelines:
        for strategy, paper in PAPER_OF.items():
            for reading in ("all types", "16 V100", "one type"):
                yield Comparison(
                    f"{pipeline} / {strategy} on {reading}, largest",
                    _largest(found, pipeline, strategy, reading),
                    paper if pipeline == "e3" else None,
                )
    for batch, each in found.items():
        yield Comparison(f"e3 on all types / e3 on 16 V100, batch {batch}", each.on_equal)


def _of_cases(in_cases: Mapping[str, AtBatch]) -> Iterator[Comparison]:
    for case, at in in_cases.items():
        for strategy, paper in PAPER_OF.items():
            for reading in ("all types", "16 V100"):
                name = f"{case}: e3 / {strategy} on {reading}, batch {LARGEST_BATCH}"
                yield Comparison(name, at.times("e3", strategy, reading), paper)
    for case, at in in_cases.items():
        yield Comparison(f"{case}: e3 on all types / e3 on 16 V100", at.on_equal)


def _goodputs(found: Found, pipelines: tuple[Strategy, ...]) -> Bars:
    points = list(found.values())
    series = {
        f"{strategy}, {reading}": tuple(each.baseline(strategy, reading) for each in points)
        for strategy in BASELINES
        for reading in ("all types", "16 V100")
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
    """How much slower and how much cheaper the other types are."""
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
    """By the cost model, whether services side by side would beat the one chain that the planner looks for."""
    rows: dict[str, float] = {}
    for batch in found:
        limited = with_batch_limit(facing(mixed, inputs), batch)
        alone = [solve(on_type(limited, name)) for name in limited.devices]
        total = sum(each.figures.rate_per_s for each in alone if isinstance(each, Planned))
        chain = solve(limited)
        assert isinstance(chain, Planned), "one type has a plan, so all together have"
        rows[f"the best plans of every type alone, over the best chain, batch {batch}"] = (
            total / chain.figures.rate_per_s
        )
    return facts(rows)


def run(effort: Effort) -> StudyResult:
    """Recorded exits on E3's two clusters of the same price."""
    case = mixed_cluster(), equal_cluster(), sst2()
    return compare(case, cases(*case) if effort == "full" else {}, effort)


STUDY = declare(__name__, run, paper=PAPER, needs=(BERT12_SST2,))
