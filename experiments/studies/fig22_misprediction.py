"""E3, figure 22: goodput lost where it is mispredicted how many inputs leave.

Plans for wrong survivals, simulated on the true exits: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within
100 ms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from experiments.misprediction import DIRECTIONS, mistaken
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, exits_at_once
from experiments.studies.picture import Lines
from experiments.studies.sides import Workload, equal_cluster, facing, goodput, sst2
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, ratio
from optimizer.decision import Planned, Strategy
from optimizer.evaluate import evaluate, nested_reach
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit

OTHER_BATCHES = (4, 2)
"""With the one error of which E3 tells the loss."""
ERRORS: dict[Effort, tuple[float, ...]] = {"full": (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0), "quick": (0.0, 0.2)}
AN_ERROR = 0.2
LEAST_LOST, MOST_LOST = 4.0, 8.0
"""% of goodput, there."""
STRATEGIES: dict[Effort, tuple[Strategy, ...]] = {"full": ("e3", "best"), "quick": ("e3",)}
AT_ONCE = "half leave at once"
"""A case whose exits are made up."""

Simulate = Callable[[Planned], float]
"""From a plan to its goodput."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """One strategy's plans, wrong in one direction."""

    case: str
    strategy: Strategy
    direction: str
    errors: tuple[float, ...]
    """From 0 on."""
    goodput_per_s: tuple[float, ...]
    """Per error."""
    stock_per_s: float

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.direction}"

    @property
    def lost(self) -> float | None:
        """% of the goodput of the plan that knows the truth, at an error of `AN_ERROR`."""
        kept = ratio(self.at(AN_ERROR), self.goodput_per_s[0])
        return None if kept is None else 100 * (1 - kept)

    def at(self, error: float) -> float | None:
        """Goodput there."""
        return dict(zip(self.errors, self.goodput_per_s, strict=True)).get(error)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """What is true, and what is tried."""

    name: str
    truth: PlanProblem
    inputs: Workload
    errors: tuple[float, ...]
    strategies: tuple[Strategy, ...] = ("e3",)


def cases(cluster: PlanProblem, inputs: Workload, effort: Effort) -> list[Case]:
    """All errors at the largest batch; then other batches, and exits like those of the paper's model."""

    def case(
        name: str, batch: int, inputs: Workload, *errors: float, strategies: tuple[Strategy, ...] = ("e3",)
    ) -> Case:
        truth = facing(with_batch_limit(cluster, batch), inputs)
        return Case(name=name, truth=truth, inputs=inputs, errors=errors, strategies=strategies)

    first = case(f"batch {LARGEST_BATCH}", LARGEST_BATCH, inputs, *ERRORS[effort], strategies=STRATEGIES[effort])
    if effort == "quick":
        return [first]
    return [
        first,
        *(case(f"batch {batch}", batch, inputs, 0.0, AN_ERROR) for batch in OTHER_BATCHES),
        case(AT_ONCE, LARGEST_BATCH, exits_at_once(cluster), 0.0, AN_ERROR, 0.5, 1.0),
    ]


def mistakes(case: Case, simulate: Simulate) -> list[Mistakes]:
    """Every strategy in either direction."""
    stock = solve(case.truth, "stock")
    assert isinstance(stock, Planned), "the problems of this study have plans"
    stock_per_s = simulate(stock)
    return [
        Mistakes(
            case=case.name,
            strategy=strategy,
            direction=direction,
            errors=case.errors,
            goodput_per_s=tuple(simulate(mistaken(case.truth, strategy, predict, error)) for error in case.errors),
            stock_per_s=stock_per_s,
        )
        for strategy in case.strategies
        for direction, predict in DIRECTIONS.items()
    ]


def simulator(truth: PlanProblem, inputs: Workload, effort: Effort) -> Simulate:
    """Goodput on the true exits; many errors have the same plan."""
    known: dict[tuple[Stage, ...], float] = {}

    def simulate(planned: Planned) -> float:
        if planned.stages not in known:
            figures = evaluate(truth, planned.stages, nested_reach(truth))
            known[planned.stages] = goodput(truth, replace(planned, figures=figures), inputs, effort).rate_per_s
        return known[planned.stages]

    return simulate


def compare(rows: Sequence[Sequence[Mistakes]]) -> StudyResult:
    """The mistakes of every case; the first has the picture. What an error costs e3 at most and at least, then all."""
    found, first = [each for row in rows for each in row], rows[0]
    of_e3 = [each.lost for each in found if each.strategy == "e3" and each.case != AT_ONCE]
    lost = [each for each in of_e3 if each is not None]
    words = f"e3: lost at an error of {AN_ERROR:.0%}"
    series = {each.name: each.goodput_per_s for each in first}
    return StudyResult(
        comparisons=(
            Comparison(f"{words}, most (%)", max(lost, default=None), MOST_LOST),
            Comparison(f"{words}, least (%)", min(lost, default=None), LEAST_LOST),
            *(Comparison(f"lost, {each.name}, {each.case} (%)", each.lost) for each in found),
        ),
        pictures=(
            Lines(
                f"Goodput of plans for a wrong survival, {first[0].case}",
                "error of the forecast (%)",
                "goodput (inputs/s)",
                tuple(100 * error for error in first[0].errors),
                series | {"stock": (first[0].stock_per_s,) * len(first[0].errors)},
            ),
        ),
        figures={"mistakes": [asdict(each) for each in found]},
        tables=(
            Table(
                "Goodput by error",
                ("case", "", "stock", *(f"{error:.0%}" for error in first[0].errors)),
                tuple((each.case, each.name, each.stock_per_s, *map(each.at, first[0].errors)) for each in found),
            ),
        ),
    )


def run(effort: Effort) -> StudyResult:
    """BERT-base's recorded exits on E3's 16 V100."""
    tried = cases(equal_cluster(), sst2(), effort)
    return compare([mistakes(each, simulator(each.truth, each.inputs, effort)) for each in tried])


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
