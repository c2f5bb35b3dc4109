"""E3, figures 2 and 9: savings of exits, and a distilled BERT."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
from pydantic import BaseModel, ValidationError

from earlyexit.errors import DataError
from experiments.data import require_data
from experiments.problems import ENTROPY
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.e3_case import LARGEST_BATCH, with_flat_times
from experiments.studies.picture import Bars, Lines, Picture
from experiments.studies.sides import (
    BATCHES,
    NUM_ROWS,
    SEED,
    Savings,
    Workload,
    allowed,
    allowed_table,
    batch_bars,
    by_batch,
    equal_cluster,
    ratios_of,
    savings,
    workload,
)
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, declare, facts
from optimizer.problems.problem import PlanProblem
from profiles.catalogue import published_profile
from profiles.records import ExitOutcome, ExitRecords
from profiles.scores import FloatArray
from profiles.table import LatencyTable
from simulator.inputs import ByRamp, nested, recorded

# Exits of DistilBERT in Apparate's runs on IMDB, from the printed shares.

DISTILBERT_IMDB = "exit_traces/apparate_distilbert_imdb_a6000.json"
NUM_BLOCKS = 6
RAMPS = tuple(range(NUM_BLOCKS - 1))
COUNTS: tuple[tuple[int, Mapping[int, int]], ...] = (
    (61390, {1: 5337, 2: 71, 3: 6663, 4: 4319}),
    (69989, {1: 6570, 2: 828, 3: 4595, 4: 940}),
    (69999, {1: 5077, 2: 117, 3: 3861, 4: 1565}),
    (69989, {0: 106, 1: 13945, 2: 221, 3: 4083, 4: 775}),
    (69999, {0: 378, 1: 12501, 2: 619, 3: 1215}),
    (68282, {1: 14898, 2: 40, 3: 3939, 4: 617}),
)
"""For each run of the file, its inputs and the number that left at each ramp.

The file has only shares, but to the last digit: of inputs that left, and per ramp of answers that agree. These shares
are ratios of integers. The counts are the smallest that give exactly these shares, and the only ones for this number of
inputs. There is no ramp after the last block, because an input there has run everything.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImdbRun:
    """One run of Apparate's simulator, as recorded by a public fork."""

    is_plain: bool
    """Whether Apparate's own controller decides alone; otherwise the fork's control layer decides too."""
    num_inputs: int
    exits: Mapping[int, int]
    """Number of inputs that left at each ramp."""
    agreement: float
    """Share of answers that equal the full model's."""
    saving: float
    """Share of the latency at batch 1 that exits saved, as printed by Apparate."""

    @property
    def survival_N(self) -> tuple[float, ...]:
        """The share of inputs that reach each block."""
        left = accumulate((self.exits.get(ramp, 0) for ramp in RAMPS), initial=0)
        return tuple(1 - count / self.num_inputs for count in left)


class _RunDocument(BaseModel):
    config: str
    overall_accuracy_pct: float
    latency_improvement_pct: float
    exit_rate: float


class _RunsDocument(BaseModel):
    runs: list[_RunDocument]


def imdb_runs() -> tuple[ImdbRun, ...]:
    """Returns the runs of the transcribed file; raises DataError for another file."""
    path = require_data(DISTILBERT_IMDB)
    try:
        runs = _RunsDocument.model_validate_json(path.read_bytes()).runs
    except ValidationError as error:
        raise DataError(f"{path} holds no runs of Apparate: {error.errors()[0]['msg']}") from error
    if [round(each.exit_rate, 9) for each in runs] != [round(sum(each.values()) / of, 9) for of, each in COUNTS]:
        raise DataError(f"{path} holds other runs of Apparate than the transcribed ones")
    return tuple(
        ImdbRun(
            is_plain=each.config.startswith("baseline"),
            num_inputs=num_inputs,
            exits=exits,
            agreement=each.overall_accuracy_pct / 100,
            saving=each.latency_improvement_pct / 100,
        )
        for each, (num_inputs, exits) in zip(runs, COUNTS, strict=True)
    )


# A distilled BERT of 6 blocks: E3's 16 V100 for it, and two workloads of exits.


def distilled_cluster() -> PlanProblem:
    """Returns the 16 V100 of BERT-base with the first 6 blocks, the distilled model: half the times.

    Published V100 figures of a BERT with 6 such layers exist for 384 tokens only (NVIDIA/DeepLearningExamples,
    PyTorch/LanguageModeling/BERT/triton/dist6l: 1.6, 7.0 and 13.1 ms at batch 1, 8 and 16, from an older TensorRT).
    """
    return cut(equal_cluster(), NUM_BLOCKS)


def cut(problem: PlanProblem, num_blocks: int) -> PlanProblem:
    """Returns the problem with the model's first blocks."""
    ramps = tuple(ramp for ramp in problem.ramps if ramp < num_blocks - 1)
    latency = {
        device: LatencyTable(
            batches=table.batches,
            block_s_NB=table.block_s_NB[:num_blocks],
            ramp_s_EB=table.ramp_s_EB[: len(ramps)],
        )
        for device, table in problem.latency.items()
    }
    return replace(
        problem,
        num_blocks=num_blocks,
        ramps=ramps,
        survival_N=problem.survival_N[:num_blocks],
        latency=latency,
        bytes_per_sample_N=problem.bytes_per_sample_N[:num_blocks],
    )


def imdb(run: ImdbRun) -> Workload:
    """Returns inputs with the exits of Apparate's run; an input stays sure after its first sure ramp."""
    rng = np.random.default_rng(SEED)
    decisions = nested(run.survival_N, RAMPS, rng, num_rows=NUM_ROWS)
    words = f"DistilBERT on IMDB as Apparate recorded it: {1 - run.survival_N[-1]:.0%} leave early"
    return workload(words, decisions, rng.permutation(NUM_ROWS), distilled_cluster())


def every_second_ramp(entropy: float) -> Workload:
    """Returns a substitute for DistilBERT on SST-2: BERT-base's ramp after block 2k becomes ramp k."""
    records = bert12_sst2("entropy")
    rng = np.random.default_rng(SEED)
    rows_N = rng.integers(len(records), size=NUM_ROWS)
    words = f"every second ramp of BERT-base recorded on SST-2 dev, entropy {entropy:g}"
    return workload(words, half_of(records, entropy), rows_N, distilled_cluster())


def half_of(records: ExitRecords, entropy: float) -> ByRamp:
    """Returns decisions of the ramps after every second block, as those of a model with half the blocks."""
    odd = records.ramps[1::2]
    whole = recorded(records, dict.fromkeys(records.ramps, entropy))
    columns = [records.ramps.index(ramp) for ramp in odd]
    return ByRamp(ramps=tuple(ramp // 2 for ramp in odd), sure_NR=whole.sure_NR[:, columns])


# E3, figure 2: savings of exits at batch 1, for BERT-base and a distilled model, and their cost in accuracy.

LENGTH = 128
"""Tokens per input."""
ENTROPIES = tuple(round(0.05 * step, 2) for step in range(1, 13))
SAVED, LOST = 42.7, 1.7
"""E3's BERT: saved time in %, lost accuracy in points."""
DISTILLED_SAVED, DISTILLED_LOST = 10.5, 0.14
RESAMPLES = {"full": 5000, "quick": 500}
"""Resamples of the recorded inputs, to estimate the standard deviation."""


def distilled_savings(runs: Sequence[ImdbRun], table: LatencyTable) -> dict[str, float]:
    """Returns the mean over the runs, with all ramps active; Apparate had about one at a time.

    `compute` and `latency` as in `Savings`; `printed`: latency saved, as printed by Apparate; `disagreement`: share of
    answers that differ from the full model's, at least the lost accuracy; `spread`: standard deviation of `compute`.
    """
    each = [savings(run.survival_N, table, RAMPS) for run in runs]
    return {
        "compute": float(np.mean([one.compute for one in each])),
        "latency": float(np.mean([one.latency for one in each])),
        "printed": float(np.mean([run.saving for run in runs])),
        "disagreement": float(np.mean([1 - run.agreement for run in runs])),
        "spread": float(np.std([one.compute for one in each])),
    }


def lost_N(outcome: ExitOutcome) -> FloatArray:
    """Returns 1 for an input that only the full model answers right, -1 for one that only the exits do, else 0."""
    assert outcome.true_losses_N is not None
    assert outcome.full_true_losses_N is not None
    return outcome.true_losses_N - outcome.full_true_losses_N


def fig02_run(effort: Effort) -> StudyResult:
    """Computes BERT from its exit records, and the distilled model from Apparate's runs without the control layer."""
    records, runs = bert12_sst2("entropy"), [each for each in imdb_runs() if each.is_plain]
    bert = published_profile("bert-base", "V100").tables[LENGTH]
    distilbert = published_profile("distilbert-base", "A6000").tables[LENGTH]
    outcomes = {entropy: records.outcome(dict.fromkeys(records.ramps, entropy)) for entropy in ENTROPIES}
    saved = {entropy: savings(each.survival, bert, records.ramps) for entropy, each in outcomes.items()}
    lost = {entropy: float(lost_N(each).mean()) for entropy, each in outcomes.items()}
    each_N = lost_N(outcomes[ENTROPY])
    draws = np.random.default_rng(SEED).integers(len(each_N), size=(RESAMPLES[effort], len(each_N)))
    chance = float(each_N[draws].mean(1).std())  # by bootstrap
    distilled = distilled_savings(runs, distilbert)
    ramp = float(distilbert.ramp_s_EB[:, 0].mean() / distilbert.block_s_NB[:, 0].sum())
    return StudyResult(
        comparisons=_comparisons(saved, lost, distilled),
        pictures=_pictures(saved, lost, distilled),
        tables=(
            facts(
                {
                    "BERT: answers that are the full model's (%)": 100 * outcomes[ENTROPY].agreement,
                    f"BERT: standard error of the accuracy lost (points, {len(records)} inputs)": 100 * chance,
                    f"DistilBERT: standard deviation between {len(runs)} runs (points)": 100 * distilled["spread"],
                    "DistilBERT: what one ramp takes (% of the model)": 100 * ramp,
                    "DistilBERT: ramps active, by what Apparate printed": (distilled["compute"] - distilled["printed"])
                    / ramp,
                }
            ),
        ),
    )


def _comparisons(
    saved: Mapping[float, Savings], lost: Mapping[float, float], distilled: Mapping[str, float]
) -> tuple[Comparison, ...]:
    alike = min(saved, key=lambda entropy: abs(100 * saved[entropy].latency - SAVED))
    rows = [
        ("BERT: latency saved (%)", saved[ENTROPY].latency, SAVED),
        ("BERT: compute saved (%)", saved[ENTROPY].compute, SAVED),
        ("BERT: accuracy lost (points)", lost[ENTROPY], LOST),
        (f"BERT, entropy {alike:g}: latency saved (%)", saved[alike].latency, SAVED),
        (f"BERT, entropy {alike:g}: accuracy lost (points)", lost[alike], LOST),
        ("DistilBERT: compute saved (%)", distilled["compute"], DISTILLED_SAVED),
        ("DistilBERT: latency saved, all 5 ramps active (%)", distilled["latency"], DISTILLED_SAVED),
        ("DistilBERT: latency saved, as Apparate printed it (%)", distilled["printed"], DISTILLED_SAVED),
        ("DistilBERT: accuracy lost, at most (points)", distilled["disagreement"], DISTILLED_LOST),
    ]
    return tuple(Comparison(name, 100 * share, paper) for name, share, paper in rows)


def _pictures(
    saved: Mapping[float, Savings], lost: Mapping[float, float], distilled: Mapping[str, float]
) -> tuple[Picture, ...]:
    bert = saved[ENTROPY]
    ours = {
        "compute saved (%)": (100 * bert.compute, 100 * distilled["compute"]),
        "latency saved (%)": (100 * bert.latency, 100 * distilled["latency"]),
        "accuracy lost, at most (points)": (100 * lost[ENTROPY], 100 * distilled["disagreement"]),
    }
    paper = ((SAVED, DISTILLED_SAVED), (SAVED, DISTILLED_SAVED), (LOST, DISTILLED_LOST))
    points = {100 * saved[entropy].latency: 100 * lost[entropy] for entropy in saved}
    x = tuple(sorted(points))
    return (
        Bars(
            "What exits save and cost at batch 1",
            "model with exits",
            "% of the model, points of accuracy",
            ("BERT-base", "DistilBERT"),
            ours,
            dict(zip(ours, paper, strict=True)),
        ),
        Lines(
            f"BERT-base: entropy {ENTROPIES[0]:g} to {ENTROPIES[-1]:g}",
            "latency saved (%)",
            "accuracy lost (points)",
            x,
            {"recorded exits": tuple(points[each] for each in x)},
        ),
    )


FIG02_STUDY = declare("fig02_savings", fig02_run, needs=(BERT12_SST2, DISTILBERT_IMDB))


# E3, figure 9: goodput of a distilled BERT with exits on 16 V100.

DEVICE = "V100"
PAPER = 1.67


def fig09_run(effort: Effort) -> StudyResult:
    """Runs the distilled model's exits on IMDB at all batch sizes; full effort adds the substitute on SST-2.

    Of Apparate's plain runs it uses the one in which most inputs leave, because its savings are close to E3's figure 2.
    """
    most = min((run for run in imdb_runs() if run.is_plain), key=lambda run: run.survival_N[-1])
    problem, inputs, stand_in = distilled_cluster(), imdb(most), every_second_ramp(ENTROPY)
    found = by_batch(problem, inputs, BATCHES[effort], effort)
    other = by_batch(problem, stand_in, (LARGEST_BATCH,), effort) if effort == "full" else {}
    e3, best, their_e3, their_best = (ratios_of(rows, side) for rows in (found, other) for side in ("e3", "best"))
    bars = [batch_bars("DistilBERT with its own recorded exits (IMDB)", found)]
    of_stand_in: list[Comparison] = []
    if other:
        bars.append(batch_bars("DistilBERT with every second of BERT's recorded exits", other))
        of_stand_in = [
            Comparison("stand-in, batch 8: e3 / stock", their_e3.over_stock, PAPER),
            Comparison("stand-in, batch 8: best / stock", their_best.over_stock, PAPER),
            Comparison("stand-in, batch 8: e3 / early-exit", their_e3.over_early_exit),
        ]
    return StudyResult(
        comparisons=(
            Comparison("e3 / stock, largest", e3.over_stock, PAPER),
            Comparison("best / stock, largest", best.over_stock, PAPER),
            Comparison("e3 / early-exit, largest", e3.over_early_exit),
            Comparison("full batches throughout / stock, batch 8", allowed(problem, inputs, LARGEST_BATCH).most_times),
            *with_flat_times(problem, inputs, LARGEST_BATCH, effort),
            *of_stand_in,
        ),
        pictures=tuple(bars),
        e3=e3,
        best=best,
        tables=(allowed_table({each.words: (problem, each) for each in (inputs, stand_in)}, LARGEST_BATCH),),
    )


FIG09_STUDY = declare(
    "fig09_distilbert", fig09_run, paper=Ratios(over_stock=PAPER), needs=(DISTILBERT_IMDB, BERT12_SST2)
)
