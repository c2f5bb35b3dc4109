"""Tabi: cascades of networks with published latencies."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.network.boundary import Split
from earlyexit.network.chain import ModelChain
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from experiments.tabi import ProfiledModel, candidates, select
from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.problems.networks import Subproblem, network_sets, subproblem_of
from optimizer.problems.problem import Link, MaximizeRate, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned, Strategy
from optimizer.search.planner import solve
from profiles.catalogue import published_profile
from profiles.networks import survival_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.inputs import recorded
from simulator.outcome import Outcome
from simulator.scenario import Scenario, poisson_arrivals
from simulator.simulate import simulate

# Model selection of other systems: one model by a rule (INFaaS, ATC'21), or votes of several (Cocktail, NSDI'22).

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answering:
    """A model and its answers to N profiled inputs."""

    name: str
    latency_s: float
    answers_N: IntArray

    def accuracy(self, truth_N: IntArray) -> float:
        return float((self.answers_N == truth_N).mean())


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A set of models that all answer every input."""

    models: tuple[str, ...]
    accuracy: float
    latency_s: float
    """Latency of the slowest model; the models run in parallel."""
    work_s: float
    """Seconds of all models together for one input."""


def infaas(models: Sequence[Answering], truth_N: IntArray, accuracy: float) -> Choice | None:
    """Returns the fastest single model that is accurate enough, or None."""
    enough = [each for each in models if each.accuracy(truth_N) >= accuracy]
    if not enough:
        return None
    best = min(enough, key=lambda each: each.latency_s)
    return Choice(models=(best.name,), accuracy=best.accuracy(truth_N), latency_s=best.latency_s, work_s=best.latency_s)


def cocktail(models: Sequence[Answering], truth_N: IntArray, accuracy: float) -> Choice | None:
    """Returns the models with an accurate enough weighted vote and the least latency, then work; or None.

    In a tie the most accurate model decides. A single model is not a vote.
    """
    found = [
        choice
        for size in range(2, len(models) + 1)
        for some in combinations(models, size)
        if (choice := _vote(some, truth_N)).accuracy >= accuracy
    ]
    return min(found, key=lambda choice: (choice.latency_s, choice.work_s), default=None)


def _vote(models: Sequence[Answering], truth_N: IntArray) -> Choice:
    ordered = sorted(models, key=lambda each: each.accuracy(truth_N), reverse=True)
    answers_NL = np.column_stack([each.answers_N for each in ordered])
    weights_L = np.array([each.accuracy(truth_N) for each in ordered])
    classes_C = np.unique(answers_NL)
    votes_NC = np.stack([(answers_NL == each) @ weights_L for each in classes_C], axis=1)
    first_N = votes_NC[np.arange(len(truth_N)), np.searchsorted(classes_C, answers_NL[:, 0])]
    voted_N = np.where(first_N >= votes_NC.max(1), answers_NL[:, 0], classes_C[votes_NC.argmax(1)])
    return Choice(
        models=tuple(each.name for each in models),
        accuracy=float((voted_N == truth_N).mean()),
        latency_s=max(each.latency_s for each in models),
        work_s=sum(each.latency_s for each in models),
    )


# Plan problems of cascades with published latencies. A plan may leave out any network but the last.

DEVICE, LENGTH = "V100", 128
CROSSING_BYTES = 2.0 * LENGTH
"""Bytes of a crossing: the importance of each token in half precision. Sample ids are small in comparison."""
TEN_GBIT = 1.25e9


def layers_of(model: str, num_layers: int) -> LatencyTable:
    """Returns the first layers of a published model on a V100, each with its share of the whole, without ramps."""
    table = published_profile(model, DEVICE).at(LENGTH)
    return LatencyTable(
        batches=table.batches,
        block_s_NB=table.block_s_NB[:num_layers],
        ramp_s_EB=np.zeros((0, len(table.batches))),
        length=LENGTH,
    )


def chain_problem(
    tables: Sequence[LatencyTable],
    survival_of: Mapping[tuple[int, ...], tuple[float, ...]],
    *,
    most: int,
    crossing_tokens: tuple[float, ...] = (),
) -> PlanProblem:
    """Returns the problem of a V100 with these networks, batches up to `most`, and ramps only at their ends.

    The blocks' times include the ends, because the published time of a whole model includes its head.
    """
    ends = tuple(accumulate(len(table.block_s_NB) for table in tables))
    ramps = tuple(end - 1 for end in ends[:-1])
    batches = tables[0].batches
    assert all(table.batches == batches for table in tables), "a chain's tables have the same batch sizes"
    bytes_N = [0.0] * ends[-1]
    for ramp in ramps:
        bytes_N[ramp] = CROSSING_BYTES
    problem = PlanProblem(
        num_blocks=ends[-1],
        ramps=ramps,
        survival_N=survival_of[tuple(range(len(tables)))],
        latency={
            DEVICE: LatencyTable(
                batches=batches,
                block_s_NB=np.concatenate([table.block_s_NB for table in tables]),
                ramp_s_EB=np.zeros((len(ramps), len(batches))),
                length=LENGTH,
            )
        },
        devices={DEVICE: Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=TEN_GBIT, delay_s=1e-4),
        bytes_per_sample_N=tuple(bytes_N),
        slo=Slo(latency_s=1.0),
        objective=MaximizeRate(),
        networks=ends if len(ends) > 1 else (),
        survival_of=survival_of,
        crossing_s=1e-3,
        crossing_tokens=crossing_tokens,
    )
    return with_batch_limit(problem, most)


# A choice among four networks: every set that ends with the last is planned and simulated, and the planner's choice.

LAYERS = (3, 6, 9, 12)
SURE = 0.95
"""Confidence above which an input leaves at an end: Tabi's first c."""
CANDIDATES_BATCH, OVERLOAD, SEED = 16, 1.3, 0
SECONDS: Mapping[Effort, float] = {"full": 6.0, "quick": 1.0}
ACCURACY = 0.99
"""Required accuracy relative to the last network's, for the choices of other systems."""
SLOWEST_S, WORST = 1.0, 0.03
"""The project's requirement: solved in a second, within 3 % of the best set."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Networks:
    """Four networks, recorded on the same inputs."""

    records: ExitRecords
    """Records in the chain's block numbers, with a ramp at the end of every network but the last."""
    chain: ModelChain
    problem: PlanProblem


def networks() -> Networks:
    """Returns 3, 6 and 9 layers before all 12 of a BERT-base, on one V100."""
    exits = bert12_sst2("confidence")
    chain = ModelChain(
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
    problem = chain_problem([layers_of("bert-base", layers) for layers in LAYERS], shares, most=CANDIDATES_BATCH)
    return Networks(records=records, chain=chain, problem=problem)


def played_per_s(of: Networks, planned: Planned, seconds: float) -> float:
    """Returns the answers per second of a plan under overload."""
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
    """Returns the answers per second by the time of the answer, while requests arrive."""
    given_s = outcome.arrived_s_R + outcome.latency_s_N
    return float(((given_s >= since_s) & (given_s < outcome.duration_s)).sum() / (outcome.duration_s - since_s))


def planned_on(problem: PlanProblem, used: tuple[int, ...]) -> Planned:
    """Returns the best plan of exactly these networks, in the chain's block numbers."""
    part = Subproblem(whole=problem, used=used)
    found = solve(replace(part.problem, networks=()))  # as one network, so that the planner cannot leave out a part
    assert isinstance(found, Planned), "an SLO of a second has plans"
    return replace(found, stages=part.in_cascade(found.stages))


def others(of: Networks) -> dict[str, Any]:
    """Returns the choices of Tabi's search, INFaaS and Cocktail, at batch 1 and nearly the full accuracy."""
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
    tabis = select(list(candidates(profiled)), wanted)
    # Two classes: an answer is the truth (0) or the other class (1).
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


def candidates_run(effort: Effort) -> StudyResult:
    """Simulates every set; then times the planner's choice after one run that does not count."""
    of = networks()
    sets = {used: planned_on(of.problem, used) for used in network_sets(of.problem)}
    played = {used: played_per_s(of, planned, SECONDS[effort]) for used, planned in sets.items()}
    solve(of.problem)
    began_s = time.process_time()
    chosen = solve(of.problem)
    took_s = time.process_time() - began_s
    assert isinstance(chosen, Planned)
    used = subproblem_of(of.problem, chosen.stages).used
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


CANDIDATES_STUDY = declare("tabi_candidates", candidates_run, needs=(BERT12_SST2,))


# Tabi, table 2: mean latencies of cascades, from the paper's latencies of single models, shares and pruning.

LATENCY_S: Mapping[str, float] = {
    "DistilBERT": 0.007,
    "DeBERTa-base": 0.020,
    "RoBERTa-large": 0.026,
    "DeBERTa-large": 0.029,
}
"""Table 1, of MNLI; "for other tasks the relative performance is similar"."""
NO_WAIT_PER_S = 1e12
"""A rate at which no input waits for its batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """A cascade of the paper."""

    models: tuple[str, ...]
    """Models (section 7.3.1)."""
    answered: tuple[float, ...]
    """Share of all inputs that each model answers (section 7.3.2; for three levels table 5)."""
    pruned_s: float
    """Share of a later model's latency that pruning saves (table 3)."""
    paper_s: float


CASCADES: Mapping[str, Cascade] = {
    "SST-2": Cascade(models=("DistilBERT", "RoBERTa-large"), answered=(0.698, 0.302), pruned_s=0.17, paper_s=0.0132),
    "MNLI": Cascade(models=("DistilBERT", "DeBERTa-large"), answered=(0.494, 0.506), pruned_s=0.154, paper_s=0.0203),
    "MNLI, three levels (table 5; nothing pruned)": Cascade(
        models=("DistilBERT", "DeBERTa-base", "DeBERTa-large"),
        answered=(0.456, 0.368, 0.176),
        pruned_s=0.0,
        paper_s=0.0220,
    ),
}
SST2_ALONE_S = 0.022
"""Table 2: INFaaS, which selects RoBERTa-large, on SST-2. Table 1 has 26 ms for the same model on MNLI."""


def mean_latency_s(latencies_s: Sequence[float], answered: Sequence[float]) -> float:
    """Returns the mean latency at batch 1 of a chain of networks with one block each."""
    survival = [1.0 - before for before in accumulate((0.0, *answered[:-1]))]
    ends = tuple(range(1, len(latencies_s) + 1))
    problem = PlanProblem(
        num_blocks=len(latencies_s),
        ramps=ends[:-1] and tuple(end - 1 for end in ends[:-1]),
        survival_N=tuple(survival),
        latency={
            "V100": LatencyTable(
                batches=(1,),
                block_s_NB=np.array(latencies_s)[:, None],
                ramp_s_EB=np.zeros((len(latencies_s) - 1, 1)),
            )
        },
        devices={"V100": Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=1e12),
        bytes_per_sample_N=(0.0,) * len(latencies_s),
        slo=Slo(latency_s=1.0),
        objective=MinimizeLatency(queues=False, rate_per_s=NO_WAIT_PER_S),
        networks=ends if len(ends) > 1 else (),
    )
    splits = tuple(
        Split(first=block, end=block + 1, batch=1, ramps=(block,) if block in problem.ramps else ())
        for block in range(problem.num_blocks)
    )
    return evaluate(problem, [Stage(device="V100", replicas=1, splits=splits)]).mean_latency_s


def ours_s(cascade: Cascade, latency_s: Mapping[str, float] = LATENCY_S) -> float:
    """Returns the first model's latency, and the latency of each later model after pruning."""
    small, *later = (latency_s[model] for model in cascade.models)
    return mean_latency_s([small, *(each * (1 - cascade.pruned_s) for each in later)], cascade.answered)


def table2_run(effort: Effort) -> StudyResult:
    """Computes all cascades."""
    del effort  # takes no time
    found = {name: ours_s(each) for name, each in CASCADES.items()}
    slower = SST2_ALONE_S / LATENCY_S["RoBERTa-large"]
    own_s = ours_s(CASCADES["SST-2"], {model: seconds * slower for model, seconds in LATENCY_S.items()})
    mixed_s = ours_s(CASCADES["SST-2"], {**LATENCY_S, "RoBERTa-large": SST2_ALONE_S})
    rows = (
        ("SST-2, table 1 as it stands", found["SST-2"] * 1000, found["SST-2"] / 0.0132 - 1),
        ("SST-2, RoBERTa-large 22.0 ms as in table 2", mixed_s * 1000, mixed_s / 0.0132 - 1),
        ("SST-2, both models at 22/26 of table 1", own_s * 1000, own_s / 0.0132 - 1),
        ("MNLI, table 1", found["MNLI"] * 1000, found["MNLI"] / 0.0203 - 1),
    )
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{name}: mean latency (ms)", found[name] * 1000, each.paper_s * 1000)
            for name, each in CASCADES.items()
        ),
        tables=(Table("By what is taken for the latencies", ("", "ms", "beside table 2"), rows),),
    )


TABLE2_STUDY = declare("tabi_table2", table2_run)


# Tabi's shares and pruning in the planner, on published V100 latencies: 6 layers of 768 before a BERT-large.

RETURNED = {"SST-2": 0.698, "MNLI": 0.494}
"""Share that the small model answers (section 7.3.2)."""
PRUNED = {"SST-2": 0.142, "MNLI": 0.136}
"""Share of words that are pruned before the large model (table 3)."""
V100_BATCH, SMALL, LARGE = 16, 6, 24


def problem(task: str, *, pruned: bool = True) -> PlanProblem:
    """Returns the problem of one V100; a plan of the large network alone is allowed."""
    left = 1 - RETURNED[task]
    both = (1.0,) * SMALL + (left,) * LARGE
    return chain_problem(
        [layers_of("bert-base", SMALL), layers_of("bert-large", LARGE)],
        {(0, 1): both, (1,): (1.0,) * (SMALL + LARGE)},
        most=V100_BATCH,
        crossing_tokens=(1.0, 1 - PRUNED[task]) if pruned else (),
    )


def v100_run(effort: Effort) -> StudyResult:
    """Plans both tasks, with and without pruning, and the large network alone."""
    del effort  # takes no time
    comparisons, rows = [], []
    for task in RETURNED:
        plans = {
            "BERT-large alone": _planned(problem(task), "stock"),
            "cascade": _planned(problem(task, pruned=False), "best"),
            "cascade, words pruned": _planned(problem(task), "best"),
        }
        alone_per_s = plans["BERT-large alone"].figures.rate_per_s
        for name, each in plans.items():
            figures, used = each.figures, subproblem_of(problem(task), each.stages).used
            times = figures.rate_per_s / alone_per_s
            rows.append((task, name, figures.rate_per_s, times, figures.latency_s * 1000, str(list(used))))
        comparisons.append(Comparison(f"{task}: cascade / BERT-large alone, batch {V100_BATCH}", times))
    columns = ("task", "plan", "inputs/s", "times alone", "worst case (ms)", "networks")
    return StudyResult(comparisons=tuple(comparisons), tables=(Table("One V100", columns, tuple(rows)),))


def _planned(asked: PlanProblem, strategy: Strategy) -> Planned:
    decision = solve(asked, strategy)
    assert isinstance(decision, Planned), "an SLO of a second has plans"
    return decision


V100_STUDY = declare("tabi_v100", v100_run)
