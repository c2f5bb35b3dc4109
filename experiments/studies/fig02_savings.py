"""E3, figure 2: what exits save at batch 1, of BERT-base and of a distilled model, and what accuracy they cost.

    OFFRAMP_DATA=... python -m experiments.studies.fig02_savings [--quick]

Computed: an input costs the blocks and ramps that it reaches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from experiments.data import require_data
from experiments.e3_plans import ENTROPY
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.distilbert_exits import DISTILBERT_IMDB, RAMPS, ImdbRun, read_imdb_runs
from experiments.studies.kit import Bars, Comparison, Effort, Lines, Study, StudyResult, command
from experiments.studies.savings import Savings, savings
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
SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Distilled:
    """The distilled model's savings, the mean of Apparate's runs."""

    compute: float
    latency: float
    printed: float
    """Of the latency, by Apparate itself."""
    disagreement: float
    """Share of answers that are not the full model's: no more accuracy can be lost."""
    spread: float
    """Of `compute`: standard deviation between runs."""


def distilled_savings(runs: Sequence[ImdbRun], table: LatencyTable) -> Distilled:
    """The mean over the runs, with all ramps active; Apparate had about one at a time."""
    each = [savings(run.survival_N, table, RAMPS) for run in runs]
    return Distilled(
        compute=float(np.mean([one.compute for one in each])),
        latency=float(np.mean([one.latency for one in each])),
        printed=float(np.mean([run.saving for run in runs])),
        disagreement=float(np.mean([1 - run.agreement for run in runs])),
        spread=float(np.std([one.compute for one in each])),
    )


def accuracy_lost(outcome: ExitOutcome) -> float:
    """The full model's accuracy less that with exits."""
    return float(_lost_N(outcome).mean())


def chance_of_loss(outcome: ExitOutcome, rng: np.random.Generator, resamples: int) -> float:
    """Standard deviation of the accuracy lost, had other inputs been drawn (bootstrap)."""
    lost_N = _lost_N(outcome)
    return float(lost_N[rng.integers(len(lost_N), size=(resamples, len(lost_N)))].mean(1).std())


def _lost_N(outcome: ExitOutcome) -> FloatArray:
    """1 for an input that only the full model answers right, -1 for one that only the exits do."""
    assert outcome.true_losses_N is not None
    assert outcome.full_true_losses_N is not None
    return outcome.true_losses_N - outcome.full_true_losses_N


def compare(
    records: ExitRecords, bert: LatencyTable, runs: Sequence[ImdbRun], distilbert: LatencyTable, resamples: int
) -> StudyResult:
    """BERT by its exit records, the distilled model by Apparate's runs, each with one table of latencies."""
    outcomes = {entropy: records.outcome(dict.fromkeys(records.ramps, entropy)) for entropy in ENTROPIES}
    saved = {entropy: savings(each.survival, bert, records.ramps) for entropy, each in outcomes.items()}
    lost = {entropy: accuracy_lost(each) for entropy, each in outcomes.items()}
    chance = chance_of_loss(outcomes[ENTROPY], np.random.default_rng(SEED), resamples)
    distilled = distilled_savings(runs, distilbert)
    return StudyResult(
        comparisons=(*_of_bert(saved, lost), *_of_distilbert(distilled)),
        pictures=(_bars(saved[ENTROPY], lost[ENTROPY], distilled), _price(saved, lost)),
        figures={
            "entropy": list(ENTROPIES),
            "bert": [asdict(each) for each in saved.values()],
            "accuracy_lost": list(lost.values()),
            "agreement": [each.agreement for each in outcomes.values()],
            "chance_of_loss": chance,
            "distilbert": asdict(distilled),
            "runs": [asdict(run) | {"survival": run.survival_N} for run in runs],
        },
        notes=(
            f"BERT at entropy {ENTROPY:g}: {outcomes[ENTROPY].agreement:.1%} of answers are the full model's; the "
            f"accuracy lost has a standard error of {100 * chance:.2f} points ({len(records)} inputs).",
            _on_ramps(distilled, len(runs), distilbert),
        ),
    )


def _of_bert(saved: Mapping[float, Savings], lost: Mapping[float, float]) -> tuple[Comparison, ...]:
    alike = min(saved, key=lambda entropy: abs(100 * saved[entropy].latency - SAVED))
    return (
        Comparison(name="BERT: latency saved (%)", ours=100 * saved[ENTROPY].latency, paper=SAVED),
        Comparison(name="BERT: compute saved (%)", ours=100 * saved[ENTROPY].compute, paper=SAVED),
        Comparison(name="BERT: accuracy lost (points)", ours=100 * lost[ENTROPY], paper=LOST),
        Comparison(name=f"BERT, entropy {alike:g}: latency saved (%)", ours=100 * saved[alike].latency, paper=SAVED),
        Comparison(name=f"BERT, entropy {alike:g}: accuracy lost (points)", ours=100 * lost[alike], paper=LOST),
    )


def _of_distilbert(found: Distilled) -> tuple[Comparison, ...]:
    saved = {
        "compute saved (%)": found.compute,
        "latency saved, all 5 ramps active (%)": found.latency,
        "latency saved, as Apparate printed it (%)": found.printed,
    }
    most_lost = Comparison(
        name="DistilBERT: accuracy lost, at most (points)", ours=100 * found.disagreement, paper=DISTILLED_LOST
    )
    return (
        *(
            Comparison(name=f"DistilBERT: {name}", ours=100 * each, paper=DISTILLED_SAVED)
            for name, each in saved.items()
        ),
        most_lost,
    )


def _on_ramps(found: Distilled, num_runs: int, table: LatencyTable) -> str:
    ramp = float(table.ramp_s_EB[:, 0].mean() / table.block_s_NB[:, 0].sum())
    less = found.compute - found.printed
    return (
        f"DistilBERT: {num_runs} runs; between them the compute saved has a standard deviation of "
        f"{100 * found.spread:.1f} points. A ramp takes {ramp:.2%} of the model; Apparate printed {100 * less:.2f} "
        f"points less than the compute saved, as if {less / ramp:.1f} ramps had been active on average."
    )


def _bars(bert: Savings, lost: float, distilled: Distilled) -> Bars:
    return Bars(
        title="What exits save and cost at batch 1",
        x_label="model with exits",
        y_label="% of the model, points of accuracy",
        labels=("BERT-base", "DistilBERT"),
        series={
            "compute saved (%)": (100 * bert.compute, 100 * distilled.compute),
            "latency saved (%)": (100 * bert.latency, 100 * distilled.latency),
            "accuracy lost, at most (points)": (100 * lost, 100 * distilled.disagreement),
        },
        paper={
            "compute saved (%)": (SAVED, DISTILLED_SAVED),
            "latency saved (%)": (SAVED, DISTILLED_SAVED),
            "accuracy lost, at most (points)": (LOST, DISTILLED_LOST),
        },
    )


def _price(saved: Mapping[float, Savings], lost: Mapping[float, float]) -> Lines:
    points = {100 * saved[entropy].latency: 100 * lost[entropy] for entropy in saved}
    return Lines(
        title=f"BERT-base: entropy {ENTROPIES[0]:g} to {ENTROPIES[-1]:g}",
        x_label="latency saved (%)",
        y_label="accuracy lost (points)",
        x=tuple(sorted(points)),
        series={"recorded exits": tuple(points[each] for each in sorted(points))},
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


STUDY = Study(
    name="fig02_savings",
    figure="2",
    section="2.2",
    title="What exits save at batch 1",
    claim="Exits save 42.7 % of BERT's compute for 1.7 points of accuracy, 10.5 % of DistilBERT's for 0.14",
    detail="Means over SST-2 and QNLI; BERT with DeeBERT's ramps, DistilBERT with ramps of the same form after each "
    "block. E3 says that compute and latency are saved alike.",
    how="computed",
    exits=f"recorded: BERT-base on SST-2 dev, entropy {ENTROPY:g}; DistilBERT on IMDB in Apparate's three plain runs",
    hardware="V100 (TensorRT's published times) for BERT, A6000 (as Apparate measured) for DistilBERT; cost model",
    minutes=0.1,
    quick_s=1,
    seed=SEED,
    needs=(BERT12_SST2, DISTILBERT_IMDB),
    differs="BERT: SST-2 alone, not its mean with QNLI, and other trained ramps, which are sure earlier: at entropy "
    "0.4 half of the inputs have left after three blocks. At entropy 0.3 they save about what E3's save and lose less "
    "accuracy. The recorded model has no exit after block 12: its deepest one, after block 11, stands for the full "
    "model. DistilBERT: IMDB instead of SST-2 and QNLI. Apparate holds agreement with the full model rather than an "
    "entropy, and keeps about one ramp active, so what it printed is near E3's; were all five active, as in E3's "
    "DistilBERT-EE, they would take back two fifths of what the same exits save. Accuracy on labels is not recorded: "
    "it falls by no more than the answers that changed.",
    run=run,
)

if __name__ == "__main__":
    command(STUDY)
