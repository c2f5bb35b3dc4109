"""What an ensemble of a small and a large model gains on the inputs that are rerouted (Tabi, sections 4.3 and 7.3.4).

    OFFRAMP_DATA=... python -m experiments.cascades.ensemble_gain [clinc150 ag_news sst2 phrases] [--dtype bfloat16]

MiniLM-L6 before all-mpnet-base-v2, as `experiments.cascades.models` makes them. Weights are fitted on the rows that
calibrate the models, those of them that are rerouted, and tried on rows that neither model has seen: all of CLINC150's
test part, 2,500 texts of AG News', SST-2's dev part, and 4,000 more of its phrases.

Rerouted: *1 % promised*: whom the small model's end does not answer where agreement of 99 % with the large model is
promised with confidence 90 %. *Tabi*: by its rule (equation 4, a coin for every input), with the least c of its search
that costs at most a point of accuracy where models are calibrated. *all*: every input, as if nobody left.

Weights: in proportion to accuracy (the paper's), the likeliest, the most accurate on the rows they are fitted on. The
interval is exact (McNemar: of the inputs whose answer became right or wrong, the share that became right, 95 %). `on`:
whether `offramp calibrate --ensemble` would mix, by the calibration rows alone, each answered by weights fitted without
it. What heads look at is kept in runs/ensemble. Writes runs/ensemble_gain.json. Minutes of processor time: about 8.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from earlyexit.boundary import FloatName
from earlyexit.codecs import find_codec
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.reroute import SLOPE, reroutes
from earlyexit.store import load_model
from experiments.cascades.models import make_large, make_small
from experiments.data import RUNS, require_data
from experiments.kit import keep, show
from experiments.trained import ag_news, sst2
from experiments.trained.features import features_of, outputs_of
from experiments.trained.mpnet import CLINC150, GUARANTEE, DataName, labelled, parts_of
from offramp.jobs.calibration import CalibrateJob
from optimizer.ensemble import RULES, Gain, IntArray, fitted, gain, held_out_gain, together
from optimizer.tabi import cutoffs
from optimizer.thresholds import design_rows, divide, learn_then_test
from profiles.records import ExitRecords
from profiles.scores import BoolArray, FloatArray

CaseName = Literal["clinc150", "ag_news", "sst2", "phrases"]
FOLDER = RUNS / "ensemble"
UNSEEN_NEWS, UNSEEN_PHRASES = slice(0, 2500), slice(40_000, 44_000)
SMALLS_END = 5
MOST_LOST = 0.01
"""Accuracy that Tabi's c may cost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What the two models say of some rows, and what is right."""

    probabilities: tuple[FloatArray, FloatArray]
    """Calibrated, each (N, C); the large model's last."""
    truth_N: IntArray

    @property
    def confidence_NL(self) -> FloatArray:
        """How sure each is."""
        return np.stack([each_NC.max(1) for each_NC in self.probabilities], axis=1)

    @property
    def right_NL(self) -> FloatArray:
        """1 where its answer is right."""
        return np.stack([each_NC.argmax(1) == self.truth_N for each_NC in self.probabilities], axis=1).astype(float)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One way to reroute and to weigh."""

    data: str
    rerouted: str
    told: str
    """By which number."""
    share: float
    """Of the unseen rows, those that are rerouted."""
    rule: str
    weight: float
    """The small model's."""
    gain: Gain
    on: bool


def rows_of(case: CaseName) -> tuple[LabelledRows, LabelledRows]:
    """What weights are fitted on, and what they are tried on."""
    if case == "clinc150":
        return parts_of(case)["validate"], read_labelled(require_data(CLINC150), part="test")
    if case == "ag_news":
        return parts_of(case)["validate"], labelled(ag_news.unseen_pairs()[UNSEEN_NEWS])
    parts = parts_of("sst2")
    return parts["validate"], parts["unseen"] if case == "sst2" else labelled(sst2.phrases()[UNSEEN_PHRASES])


def said_of(case: CaseName, rows: LabelledRows, part: str, dtype: FloatName) -> Said:
    """Both models' ends; each is run once, and what its heads look at is kept."""
    data: DataName = "sst2" if case == "phrases" else case
    found, truth_N = [], np.zeros(0, dtype=np.int64)
    for size, folder in (("small", make_small(data)), ("large", make_large(data))):
        beside = size == "large" and part == "known"  # `experiments.trained.mpnet` has run these
        kept = folder / "features-validate.pt" if beside else FOLDER / data / f"{size}-{part}.pt"
        probabilities_NC, truth_N = _ends(folder, rows, kept, dtype)
        found.append(probabilities_NC)
    small, large = found
    return Said(probabilities=(small, large), truth_N=truth_N)


def _ends(folder: Path, rows: LabelledRows, kept: Path, dtype: FloatName) -> tuple[FloatArray, IntArray]:
    model = load_model(folder)
    codec = find_codec(model.info.codec, folder)
    _, outputs = outputs_of(model, features_of(model, rows, codec, kept, dtype))
    probabilities_NC = outputs[model.num_blocks - 1].double().softmax(1).numpy()
    return probabilities_NC, rows.targets(model.task, codec)


def ways(known: Said) -> Iterator[tuple[str, str, float, float]]:
    """How inputs are rerouted: name, the number in words, c, k; a k that is infinite is a threshold at c."""
    threshold = _promised(known)
    yield "1 % promised", f"{threshold:.3f}", threshold, np.inf
    large = float(known.right_NL[:, 1].mean())
    enough = [found for found in cutoffs(known.confidence_NL, known.right_NL) if found.accuracy >= large - MOST_LOST]
    if enough:
        yield "Tabi", f"c {enough[-1].c:.2f}", enough[-1].c, SLOPE
    yield "all", "-", 1.0, np.inf


def _promised(known: Said) -> float:
    """The small model's threshold, as `offramp calibrate` finds it."""
    answers_NE = np.stack([each_NC.argmax(1) for each_NC in known.probabilities], axis=1)
    records = ExitRecords.of_answers(
        answers_NE,
        score="confidence",
        num_blocks=2,
        ramps=(0,),
        sample_ids=tuple(map(str, range(len(answers_NE)))),
        scores_NR=known.confidence_NL[:, :1].astype(np.float32),
        truth_N=known.truth_N,
    )
    num_design = design_rows(len(records), GUARANTEE, CalibrateJob().design_share)
    design, tested = (records.subset(rows) for rows in divide(len(records), num_design, 0))
    return learn_then_test(design, tested, GUARANTEE).thresholds.get(0, 1.0)


def goes_on(said: Said, c: float, k: float) -> BoolArray:
    """Who is rerouted, (N, 1)."""
    confidence_N = said.confidence_NL[:, 0]
    if np.isinf(k):
        return np.asarray((confidence_N < c) | (c >= 1))[:, None]
    ids = [str(row) for row in range(len(confidence_N))]
    return reroutes(confidence_N, ids, SMALLS_END, c, k)[:, None]


def measure(case: CaseName, known: Said, unseen: Said) -> Iterator[Line]:
    """Every way to reroute, every way to weigh."""
    ends = (SMALLS_END,)
    for rerouted, told, c, k in ways(known):
        fits, tries = goes_on(known, c, k), goes_on(unseen, c, k)
        rows = np.flatnonzero(tries[:, 0])
        if not len(rows) or not fits.any():
            continue
        truth_N = unseen.truth_N[rows]
        some = [each_NC[rows] for each_NC in unseen.probabilities]
        for name, rule in RULES.items():
            weights = fitted(known.probabilities, known.truth_N, fits, ends, rule)
            mixed_NC = together(some, weights, ends)
            held_out = held_out_gain(known.probabilities, known.truth_N, fits, ends, rule)
            yield Line(
                data=case,
                rerouted=rerouted,
                told=told,
                share=len(rows) / len(unseen.truth_N),
                rule=name,
                weight=weights[SMALLS_END],
                gain=gain(some[-1].argmax(1) == truth_N, mixed_NC.argmax(1) == truth_N),
                on=held_out is not None and held_out.is_sure,
            )


def print_lines(lines: Sequence[Line]) -> None:
    """One row for each."""
    columns = (
        "data",
        "rerouted",
        "at",
        "inputs",
        "share",
        "weights by",
        "small",
        "alone",
        "mixed",
        "points",
        "95 %",
        "on",
    )
    rows = [
        (
            line.data,
            line.rerouted,
            line.told,
            line.gain.num_inputs,
            f"{line.share:.3f}",
            line.rule,
            f"{line.weight:.3f}",
            f"{line.gain.before:.4f}",
            f"{line.gain.after:.4f}",
            f"{line.gain.points:+.2f}",
            f"{100 * line.gain.low:+.2f} to {100 * line.gain.high:+.2f}",
            "yes" if line.on else "no",
        )
        for line in lines
    ]
    show("What mixing the small model's probabilities into the large one's gains", columns, rows)


def accuracies(said: Mapping[CaseName, Said]) -> None:
    """Of the models alone, on unseen rows."""
    rows = [(name, len(each.truth_N), *each.right_NL.mean(0).round(4).tolist()) for name, each in said.items()]
    show("Accuracy on unseen rows", ("data", "rows", "small", "large"), rows)


def main() -> None:
    """Run both models on what is asked for, and print."""
    parser = ArgumentParser(prog="python -m experiments.cascades.ensemble_gain", description=__doc__)
    parser.add_argument("data", nargs="*", choices=get_args(CaseName), default=get_args(CaseName))
    parser.add_argument("--dtype", choices=get_args(FloatName), default="bfloat16")
    options = parser.parse_args()
    lines, unseen = list[Line](), dict[CaseName, Said]()
    for case in options.data:
        known_rows, unseen_rows = rows_of(case)
        known = said_of(case, known_rows, "known", options.dtype)
        unseen[case] = said_of(case, unseen_rows, f"unseen-{case}", options.dtype)
        lines += measure(case, known, unseen[case])
    accuracies(unseen)
    print_lines(lines)
    print(f"figures in {keep(lines, RUNS / 'ensemble_gain.json')}")


if __name__ == "__main__":
    main()
