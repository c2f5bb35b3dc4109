"""E3, figure 2: what exits save at batch 1, of BERT-base and of a distilled model, and what accuracy they cost.

Computed: an input costs the blocks and ramps that it reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict

import numpy as np

from experiments.data import require_data
from experiments.problems import ENTROPY
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.distilbert_exits import DISTILBERT_IMDB, RAMPS, ImdbRun, read_imdb_runs
from experiments.studies.picture import Bars, Lines, Picture
from experiments.studies.sides import SEED, Savings, savings
from experiments.studies.study import Comparison, Effort, StudyResult, declare, facts
from profiles.catalogue import published_profile
from profiles.outcome import ExitOutcome
from profiles.records import ExitRecords
from profiles.scores import FloatArray
from profiles.table import LatencyTable

LENGTH = 128
"""Tokens."""
ENTROPIES = tuple(round(0.05 * step, 2) for step in range(1, 13))
SAVED, LOST = 42.7, 1.7
"""E3's BERT, in % and points."""
DISTILLED_SAVED, DISTILLED_LOST = 10.5, 0.14
RESAMPLES = {"full": 5000, "quick": 500}
"""Of the recorded inputs, to tell how much of what they show is chance."""


def distilled_savings(runs: Sequence[ImdbRun], table: LatencyTable) -> dict[str, float]:
    """The mean over the runs, with all ramps active; Apparate had about one at a time.

    `compute` and `latency` as in `Savings`; `printed`: of the latency, by Apparate itself; `disagreement`: answers that
    are not the full model's, more accuracy cannot be lost; `spread`: the standard deviation of `compute` between runs.
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
    """1 for an input that only the full model answers right, -1 for one that only the exits do."""
    assert outcome.true_losses_N is not None
    assert outcome.full_true_losses_N is not None
    return outcome.true_losses_N - outcome.full_true_losses_N


def chance_of_loss(outcome: ExitOutcome, rng: np.random.Generator, resamples: int) -> float:
    """Standard deviation of the accuracy lost, had other inputs been drawn (bootstrap)."""
    each_N = lost_N(outcome)
    return float(each_N[rng.integers(len(each_N), size=(resamples, len(each_N)))].mean(1).std())


def compare(
    records: ExitRecords, bert: LatencyTable, runs: Sequence[ImdbRun], distilbert: LatencyTable, resamples: int
) -> StudyResult:
    """BERT by its exit records, the distilled model by Apparate's runs, each with one table of latencies."""
    outcomes = {entropy: records.outcome(dict.fromkeys(records.ramps, entropy)) for entropy in ENTROPIES}
    saved = {entropy: savings(each.survival, bert, records.ramps) for entropy, each in outcomes.items()}
    lost = {entropy: float(lost_N(each).mean()) for entropy, each in outcomes.items()}
    chance = chance_of_loss(outcomes[ENTROPY], np.random.default_rng(SEED), resamples)
    distilled = distilled_savings(runs, distilbert)
    ramp = float(distilbert.ramp_s_EB[:, 0].mean() / distilbert.block_s_NB[:, 0].sum())
    return StudyResult(
        comparisons=_comparisons(saved, lost, distilled),
        pictures=_pictures(saved, lost, distilled),
        figures={
            "entropy": list(ENTROPIES),
            "bert": [asdict(each) for each in saved.values()],
            "accuracy_lost": list(lost.values()),
            "agreement": [each.agreement for each in outcomes.values()],
            "chance_of_loss": chance,
            "distilbert": distilled,
            "runs": [asdict(run) | {"survival": run.survival_N} for run in runs],
        },
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


def run(effort: Effort) -> StudyResult:
    """Apparate's own runs, without those in which the fork's control layer decides too."""
    runs = read_imdb_runs(require_data(DISTILBERT_IMDB))
    return compare(
        bert12_sst2("entropy"),
        published_profile("bert-base", "V100").tables[LENGTH],
        [run for run in runs if run.is_plain],
        published_profile("distilbert-base", "A6000").tables[LENGTH],
        RESAMPLES[effort],
    )


STUDY = declare(__name__, run, needs=(BERT12_SST2, DISTILBERT_IMDB))
