"""Which of four networks to use: every set that ends with the last is planned and played, beside the planner's choice.

The small networks answer as a BERT-base's exits after as many layers; rates are those of the simulator, which runs
the ingress's and the replicas' own code. Beside it, what Tabi's search, INFaaS and Cocktail would choose.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np

from earlyexit.chain import Chain
from experiments.cascades.model_choice import Answering, cocktail, infaas
from experiments.cascades.problems import chain_problem, layers_of
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from optimizer.decision import Planned
from optimizer.exact.solve import solve_exactly
from optimizer.networks import Part, choices, part_of
from optimizer.plan import Plan, PolicySpec
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.space import SPACES
from optimizer.tabi import ProfiledModel, TabiCandidate, candidates, select
from profiles.networks import survival_of
from profiles.records import ExitRecords
from simulator.decisions import recorded
from simulator.outcome import Outcome
from simulator.scenario import Scenario
from simulator.simulate import simulate
from simulator.sustained import poisson_arrivals

LAYERS = (3, 6, 9, 12)
SURE = 0.95
"""Confidence above which an end lets an input out: Tabi's first c."""
BATCH, OVERLOAD, SEED = 16, 1.3, 0
SECONDS: Mapping[Effort, float] = {"full": 6.0, "quick": 1.0}
ACCURACY = 0.99
"""Of the last network's, what the others' choices must keep."""
SLOWEST_S, WORST = 1.0, 0.03
"""What is asked of us: solved in a second, within 3 % of the best set."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Networks:
    """Four of them, recorded on the same inputs."""

    records: ExitRecords
    """In the chain's numbers: a ramp at the end of every network but the last."""
    chain: Chain
    problem: PlanProblem


def networks() -> Networks:
    """3, 6 and 9 layers before all 12 of a BERT-base, one V100."""
    exits = bert12_sst2("confidence")
    chain = Chain(
        names=tuple(f"{layers} layers" for layers in LAYERS),
        lengths=LAYERS,
        ramps=tuple(end - 1 for end in accumulate(LAYERS))[:-1],
    )
    columns = [exits.ramps.index(layers - 1) for layers in LAYERS[:-1]]
    truth_NE = exits.true_losses_NE
    assert truth_NE is not None
    records = replace(
        exits,
        num_blocks=chain.num_blocks,
        ramps=chain.ramps,
        scores_NR=exits.scores_NR[:, columns],
        losses_NR=exits.losses_NR[:, columns],
        true_losses_NE=truth_NE[:, [*columns, -1]],
        answers_NE=None,
    )
    shares = survival_of(records, dict.fromkeys(chain.ramps, SURE), chain)
    problem = chain_problem([layers_of("bert-base", layers) for layers in LAYERS], shares, most=BATCH)
    return Networks(records=records, chain=chain, problem=problem)


def played_per_s(of: Networks, planned: Planned, seconds: float) -> float:
    """What a plan answers when more arrives than it can do."""
    ramps = tuple(ramp for stage in planned.stages for split in stage.splits for ramp in split.ramps)
    policy = PolicySpec(name="confidence", thresholds=dict.fromkeys(ramps, SURE)) if ramps else None
    outcome = simulate(
        Scenario(
            problem=of.problem,
            plan=Plan(
                stages=planned.stages,
                policy=policy,
                networks=of.problem.networks,
                predicted={"rate_per_s": planned.figures.rate_per_s},
            ),
            decisions=recorded(of.records, dict.fromkeys(of.chain.ramps, SURE)),
            rows_N=np.random.default_rng(SEED).permutation(len(of.records)),
            arrivals_s=poisson_arrivals(OVERLOAD * planned.figures.rate_per_s, seconds, SEED),
            duration_s=seconds,
            warm_up_s=seconds / 4,
            admission=False,
        )
    )
    return answered_per_s(outcome, seconds / 4)


def answered_per_s(outcome: Outcome, since_s: float) -> float:
    """By when answers were given, while requests arrived."""
    given_s = outcome.arrived_s_R + outcome.latency_s_N
    return float(((given_s >= since_s) & (given_s < outcome.duration_s)).sum() / (outcome.duration_s - since_s))


def planned_on(problem: PlanProblem, used: tuple[int, ...]) -> Planned:
    """The best plan of exactly these networks, in the chain's numbers."""
    part = Part(whole=problem, used=used)
    found = solve_exactly(part.problem, SPACES["best"])  # asked so, it leaves none of them out
    assert isinstance(found, Planned), "an SLO of a second has plans"
    return replace(found, stages=part.in_chain(found.stages))


def others(of: Networks) -> dict[str, Any]:
    """What Tabi's search, INFaaS and Cocktail choose, one input at a time, at nearly the last network's accuracy."""
    truth_NE = of.records.true_losses_NE
    assert truth_NE is not None
    table = of.problem.latency["V100"]
    starts = (0, *of.chain.bounds)
    alone_s = [float(table.block_s_NB[first:end, 0].sum()) for first, end in zip(starts, of.chain.bounds, strict=False)]
    sure_NL = np.column_stack([of.records.scores_NR, np.ones(len(of.records))]).astype(np.float64)
    profiled = [
        ProfiledModel(name=name, latency_s=seconds, confidence_N=sure_NL[:, column], right_N=1 - truth_NE[:, column])
        for column, (name, seconds) in enumerate(zip(of.chain.names, alone_s, strict=True))
    ]
    wanted = ACCURACY * profiled[-1].accuracy
    tabis: TabiCandidate | None = select(candidates(profiled), wanted)
    # Two classes: an answer is the truth (0) or the other (1).
    answering = [
        Answering(name=each.name, latency_s=each.latency_s, answers_N=(each.right_N == 0).astype(np.int64))
        for each in profiled
    ]
    truth_N = np.zeros(len(of.records), dtype=np.int64)
    one, vote = infaas(answering, truth_N, wanted), cocktail(answering, truth_N, wanted)
    return {
        "Tabi": tabis and (" + ".join(tabis.models), tabis.accuracy, tabis.mean_latency_s * 1000),
        "INFaaS": one and (" + ".join(one.models), one.accuracy, one.latency_s * 1000),
        "Cocktail": vote and (" + ".join(vote.models), vote.accuracy, vote.latency_s * 1000),
    }


def run(effort: Effort) -> StudyResult:
    """Every set, played; then the planner's own choice, timed, of which the first is not counted."""
    of = networks()
    sets = {used: planned_on(of.problem, used) for used in choices(of.problem)}
    played = {used: played_per_s(of, planned, SECONDS[effort]) for used, planned in sets.items()}
    solve(of.problem)
    began_s = time.process_time()
    chosen = solve(of.problem)
    took_s = time.process_time() - began_s
    assert isinstance(chosen, Planned)
    used = part_of(of.problem, chosen.stages).used
    best = max(played.values())
    rows = [
        (", ".join(of.chain.names[each] for each in key), planned.figures.rate_per_s, played[key], played[key] / best)
        for key, planned in sets.items()
    ]
    return StudyResult(
        comparisons=(
            Comparison("the chosen set's rate, in that of the best", played[used] / best),
            Comparison("seconds to choose (processor time)", took_s),
        ),
        figures={"chosen": list(used), "played_per_s": {str(list(key)): rate for key, rate in played.items()}},
        tables=(
            Table(
                "All sets of networks, one V100", ("networks", "planned /s", "played /s", "of the best"), tuple(rows)
            ),
            Table(
                f"One input at a time, {ACCURACY:.0%} of the last network's accuracy",
                ("rule", "models", "accuracy", "mean latency (ms)"),
                tuple((name, *(found or ("none", None, None))) for name, found in others(of).items()),
            ),
        ),
    )


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
