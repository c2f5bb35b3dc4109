"""E3, figure 22: the goodput lost if the forecast of survival is wrong.

Plans for wrong survivals are simulated on the true exits: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs
within 100 ms. The paper's own workload, prompts of Llama 3.1 8B, runs on as many accelerators within two seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from experiments.recorded_exits import BERT12_SST2
from experiments.studies.decoding import LLAMA_2, LLAMA_EXITS, llama_of
from experiments.studies.e3_case import LARGEST_BATCH, exits_at_once, made_up
from experiments.studies.picture import Lines
from experiments.studies.sides import Workload, equal_cluster, facing, goodput, sst2
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, ratio
from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned, Strategy
from optimizer.search.planner import solve

OTHER_BATCHES = (4, 2)
"""With the one error for which E3 states the loss."""
ERRORS: dict[Effort, tuple[float, ...]] = {"full": (0.0, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0), "quick": (0.0, 0.2)}
AN_ERROR = 0.2
LEAST_LOST, MOST_LOST = 4.0, 8.0
"""Lost goodput at that error, in %."""
STRATEGIES: dict[Effort, tuple[Strategy, ...]] = {"full": ("e3", "best"), "quick": ("e3",)}
AT_ONCE = "half leave at once"
"""A case with invented exits."""

LLAMA_BATCH = 16
LLAMA = f"Llama, batch {LLAMA_BATCH}"
LLAMA_GPUS, LLAMA_SLO_S = 16, 2.0
"""E3 states neither. With its 4 accelerators (section 5.1.3) no division into whole accelerators beats stock."""

Case = tuple[str, PlanProblem, int, Workload, tuple[float, ...], tuple[Strategy, ...]]
"""Name, cluster, largest batch, inputs, errors and strategies."""
Simulate = Callable[[Planned], float]
"""A function from a plan to its goodput on the true exits, in inputs per second."""


DIRECTIONS: Mapping[str, Callable[[float, float], float]] = {
    "sees too few leave": lambda share, error: share + error * (1 - share),
    "sees too many leave": lambda share, error: share * (1 - error) if share < 1 else share,
}
"""The predicted survival of a block by its true survival and the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """The goodput of one strategy's plans, with forecasts that are wrong in one direction."""

    case: str
    strategy: Strategy
    direction: str
    errors: tuple[float, ...]
    """Ascending, from 0."""
    goodput_per_s: tuple[float, ...]
    """Goodput per error."""
    stock_per_s: float

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.direction}"

    def at(self, error: float) -> float | None:
        """Returns the goodput at an error."""
        return dict(zip(self.errors, self.goodput_per_s, strict=True)).get(error)


def mispredicted(
    case: str, truth: PlanProblem, strategy: Strategy, errors: tuple[float, ...], simulate: Simulate
) -> list[Mistakes]:
    """Runs all errors of one strategy on one problem, in both directions."""
    stock = solve(truth, "stock")
    assert isinstance(stock, Planned), "the problems of this experiment have plans"
    stock_per_s, found = simulate(stock), []
    for direction, predict in DIRECTIONS.items():
        rates = []
        for error in errors:
            seen = replace(truth, survival_N=tuple(predict(share, error) for share in truth.survival_N))
            planned = solve(seen, strategy)
            assert isinstance(planned, Planned), "other survival asks for no less latency than the truth"
            rates.append(simulate(planned))
        found.append(
            Mistakes(
                case=case,
                strategy=strategy,
                direction=direction,
                errors=errors,
                goodput_per_s=tuple(rates),
                stock_per_s=stock_per_s,
            )
        )
    return found


def cases(cluster: PlanProblem, inputs: Workload, effort: Effort) -> list[Case]:
    """Returns all errors at the largest batch; then other batches, and exits like those of the paper's model."""
    first: Case = (f"batch {LARGEST_BATCH}", cluster, LARGEST_BATCH, inputs, ERRORS[effort], STRATEGIES[effort])
    if effort == "quick":
        return [first]
    llama_cluster = llama_of(LLAMA_GPUS, LLAMA_SLO_S)
    words = "made up: half of the prompts leave after layer 25, none elsewhere"
    llama_inputs = made_up(words, LLAMA_EXITS, llama_cluster)
    return [
        first,
        *((f"batch {batch}", cluster, batch, inputs, (0.0, AN_ERROR), ("e3",)) for batch in OTHER_BATCHES),
        (AT_ONCE, cluster, LARGEST_BATCH, exits_at_once(cluster), (0.0, AN_ERROR, 0.5, 1.0), ("e3",)),
        (LLAMA, llama_cluster, LLAMA_BATCH, llama_inputs, ERRORS[effort], STRATEGIES[effort]),
    ]


def lost(found: Mistakes) -> float | None:
    """Returns the loss at an error of `AN_ERROR`, in % of the goodput with the true survival."""
    kept = ratio(found.at(AN_ERROR), found.goodput_per_s[0])
    return None if kept is None else 100 * (1 - kept)


def simulator(truth: PlanProblem, inputs: Workload, effort: Effort) -> Simulate:
    """Returns a function for the goodput on the true exits; it caches plans, because many errors give the same plan."""
    known: dict[tuple[Stage, ...], float] = {}

    def simulate(planned: Planned) -> float:
        if planned.stages not in known:
            figures = evaluate(truth, planned.stages)
            known[planned.stages] = goodput(truth, replace(planned, figures=figures), inputs, effort).rate_per_s
        return known[planned.stages]

    return simulate


def run(effort: Effort) -> StudyResult:
    """Runs BERT-base's recorded exits on E3's 16 V100, and further cases; the first case has the picture.

    The result has the largest and the smallest loss of e3, then all losses.
    """
    cluster, found = equal_cluster(), list[Mistakes]()
    for name, problem, batch, inputs, errors, strategies in cases(cluster, sst2(), effort):
        truth = facing(with_batch_limit(problem, batch), inputs)
        simulate = simulator(truth, inputs, effort)
        for strategy in strategies:
            found += mispredicted(name, truth, strategy, errors, simulate)
    first = [each for each in found if each.case == found[0].case]
    of_e3 = [lost(each) for each in found if each.strategy == "e3" and each.case not in (AT_ONCE, LLAMA)]
    known = [each for each in of_e3 if each is not None]
    words = f"e3: lost at an error of {AN_ERROR:.0%}"
    series = {each.name: each.goodput_per_s for each in first}
    return StudyResult(
        comparisons=(
            Comparison(f"{words}, most (%)", max(known, default=None), MOST_LOST),
            Comparison(f"{words}, least (%)", min(known, default=None), LEAST_LOST),
            *(Comparison(f"lost, {each.name}, {each.case} (%)", lost(each)) for each in found),
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
        tables=(
            Table(
                "Goodput by error",
                ("case", "", "stock", *(f"{error:.0%}" for error in first[0].errors)),
                tuple((each.case, each.name, each.stock_per_s, *map(each.at, first[0].errors)) for each in found),
            ),
        ),
    )


STUDY = declare(__name__, run, needs=(BERT12_SST2, LLAMA_2))
