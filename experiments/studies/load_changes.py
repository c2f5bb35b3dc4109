"""PAME, figure 16: inputs change, and the exit reacts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from earlyexit.data.rows import read_labelled
from experiments.apparate import images, recording
from experiments.apparate.images import TEST, TRAIN, Images, darker, noisy
from experiments.data import RUNS, require_data
from experiments.served_streams import (
    BUDGET,
    CONFIDENCE,
    Controller,
    Fixed,
    Replayed,
    TunedThresholds,
    table_of,
    tuned_replay,
)
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from optimizer.calibration.thresholds import Guarantee
from optimizer.cost.batching import Batching
from optimizer.live.tuning import TUNERS
from optimizer.live.tuning.base import NewThresholds, TunerSettings, never
from optimizer.live.tuning.pame import ExitPlacement, best_placement, relative_precision
from profiles.records import ExitOutcome, ExitRecords
from profiles.scores import SCORES
from profiles.table import LatencyTable

# CIFAR-10 becomes dark, noisy or clear again: the outputs of a ResNet-32's ramps and end, recorded once.

NEEDS = (TEST, TRAIN, "resnet_cifar10/resnet32.th")
"""Required files of OFFRAMP_DATA."""
FILES: Mapping[Effort, Path] = {
    "full": RUNS / "pame" / "load_changes.npz",
    "quick": RUNS / "pame" / "load_changes_quick.npz",
}
"""The recorded files."""
DARKNESS = 0.6
NOISE = 0.15
"""Noise as a share of the strongest noise of `experiments.apparate.images`."""
KINDS: Mapping[str, Callable[[Images, np.random.Generator], Images]] = {
    "clear": lambda image, _: image,
    "dark": lambda image, _: darker(image, DARKNESS),
    "noisy": lambda image, rng: noisy(image, NOISE, rng),
}
"""Changes of an image. Records hold all images of the first kind, then all of the next; quick ones no noisy images."""
LEARNT: Mapping[Effort, int] = {"full": images.LEARNT, "quick": 1000}
"""Number of images that train ramps."""
EPOCHS: Mapping[Effort, int] = {"full": 100, "quick": 10}
"""1,200 steps, as the ramps of Apparate's streams take (experiments/apparate/recording.py), or 40."""
SHOWN: Mapping[Effort, int] = {"full": 1, "quick": 3}
"""One of this many test images is used."""
SEED = 0


def recorded(effort: Effort) -> ExitRecords:
    """Returns records of all images in all kinds that the effort uses, with true labels; makes them if missing."""
    path = FILES[effort]
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        record(effort).save(path)
    return ExitRecords.load(path)


def record(effort: Effort) -> ExitRecords:
    """Trains ramps and records their outputs; exits the process with a message if the data is missing."""
    from earlyexit.codecs.image import ImageCodec

    codec = ImageCodec(height=images.SIDE, width=images.SIDE)
    rng = np.random.default_rng(SEED)
    test = images.cifar_images(TEST, lambda count: np.arange(0, count, SHOWN[effort]))
    learn = codec.encode(list(images.known_images(rng, LEARNT[effort])))
    labels = read_labelled(require_data(TEST)).labels[:: SHOWN[effort]]
    truth_N = np.unique(np.array(labels), return_inverse=True)[1]  # classes in alphabetical order, as in the network
    kinds = [kind for kind in KINDS if effort == "full" or kind != "noisy"]
    shown = [KINDS[kind](image, rng) for kind in kinds for image in test]
    material = recording.Material(model=recording.cifar_network(), inputs=codec.encode(shown), learn=learn)
    facts = {"kinds": kinds, "darkness": DARKNESS, "noise": NOISE}
    return recording.record(material, "mlp", np.tile(truth_N, len(kinds)), EPOCHS[effort], **facts)


def of_kind(records: ExitRecords, kind: str) -> ExitRecords:
    """Returns the records of all images in one kind."""
    kinds = (records.provenance or {})["kinds"]
    return records.subset(np.split(np.arange(len(records)), len(kinds))[kinds.index(kind)])


# PAME, figure 16: inputs change, and the exit moves later or its threshold rises; compared with guaranteed tuning.

BATCH = 16
"""The smallest of the paper's batches for classification (section 7.1)."""
HISTORY, BEFORE = 2000, 3000
"""Inputs that choose the exit, and inputs that are served before the change; 5,000 are served after it."""
CHANGES = {"darker": ("clear", "dark"), "lighter": ("dark", "clear"), "noisier": ("clear", "noisy")}
"""Kinds of images before and after."""
PAPER = {
    "darker": {"slow, before": 0.3, "slow, changed": 6.5, "slow, after the reaction": 0.8},
    "lighter": {"precision, before": 99.1, "precision, changed": 97.8, "precision, after the reaction": 99.2},
}
"""Case 1 (Imagenette) and case 2 (Imagewoof), in percent."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A stream, and the exit that PAME chooses from its history."""

    name: str
    history: ExitRecords
    served: ExitRecords
    place: ExitPlacement
    table: LatencyTable

    @property
    def batching(self) -> Batching:
        return batching_of(self.table, self.served.ramps)

    @property
    def shut(self) -> dict[int, float]:
        """Thresholds at which no input leaves."""
        return never(self.served.score, self.served.ramps)

    @property
    def chosen(self) -> dict[int, float]:
        """The thresholds of all ramps; inputs leave at one of them."""
        return self.shut | dict(self.place.thresholds)

    @property
    def question(self) -> TunerSettings:
        """The settings of tuners: at most 1 % may be lost."""
        guarantee = Guarantee(budget=BUDGET, confidence=CONFIDENCE)
        return TunerSettings(score=self.served.score, guarantee=guarantee, batching=self.batching)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Served:
    """The outcome of a side on a stream."""

    replayed: Replayed
    changes: list[NewThresholds]

    @property
    def settled(self) -> int:
        """Index of the first input after the last change of thresholds, or 0."""
        return int(self.changes[-1].at_s) + 1 if self.changes else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Figures of a part of a stream, shares in percent."""

    slow: float
    """Batches that are slower than without exits."""
    precision: float
    """Accuracy relative to the model without exits."""
    agreement: float
    saved: float
    """Saved share of the mean answer time without exits."""


def case_of(name: str, records: ExitRecords) -> Case:
    """Returns a case: half of the images make up the history and the first part; all follow the change."""
    rng = np.random.default_rng(SEED)
    before, after = (of_kind(records, kind) for kind in CHANGES[name])
    order, again = rng.permutation(len(before)), rng.permutation(len(after))
    share = len(before) / (HISTORY + BEFORE)
    history = before.subset(order[: round(HISTORY * share)])
    table = table_of("vision")
    table = replace(table, ramp_s_EB=table.ramp_s_EB[list(records.ramps)])
    place = best_placement([history], batching_of(table, records.ramps), 1 - BUDGET, records.ramps)
    assert place is not None, "no exit is bearable"
    served = joined(before.subset(order[round(HISTORY * share) :]), after.subset(again))
    return Case(name=name, history=history, served=served, place=place, table=table)


def batching_of(table: LatencyTable, ramps: tuple[int, ...]) -> Batching:
    """Returns the study's batches."""
    return Batching(table=table, ramps=ramps, size=BATCH)


def joined(one: ExitRecords, other: ExitRecords) -> ExitRecords:
    """Joins two records in order."""
    assert one.true_losses_NE is not None
    assert other.true_losses_NE is not None
    return replace(
        one,
        sample_ids=tuple(map(str, range(len(one) + len(other)))),
        scores_NR=np.concatenate([one.scores_NR, other.scores_NR]),
        losses_NR=np.concatenate([one.losses_NR, other.losses_NR]),
        true_losses_NE=np.concatenate([one.true_losses_NE, other.true_losses_NE]),
        answers_NE=None,
    )


def once(case: Case) -> Served:
    """Serves with PAME's exit from the history, without tuning."""
    return _served(case, Fixed(thresholds=case.chosen), [])


def by_pame(case: Case) -> Served:
    """Serves with PAME's exit from the history, and PAME's tuning."""
    controller = TunedThresholds(TUNERS["pame"](case.question), case.chosen)
    return _served(case, controller, controller.changes)


def tuned(name: str, case: Case) -> Served:
    """Serves with the same ramp and a tuner, which first observes the history without early exits."""
    shut = {case.place.ramp: SCORES[case.served.score].never}
    controller = TunedThresholds(TUNERS[name](case.question), shut)
    whole = tuned_replay(joined(case.history, case.served), controller, batch=BATCH)
    first = len(case.history)
    replayed = Replayed(
        exits_N=whole.exits_N[first:], losses_N=whole.losses_N[first:], settings=whole.settings[first // BATCH :]
    )
    changes = [replace(each, at_s=each.at_s - first) for each in controller.changes if each.at_s >= first]
    return Served(replayed=replayed, changes=changes)


def _served(case: Case, controller: Controller, changes: list[NewThresholds]) -> Served:
    return Served(replayed=tuned_replay(case.served, controller, batch=BATCH), changes=changes)


SIDES: Mapping[str, Callable[[Case], Served]] = {
    "tuned once": once,
    "pame": by_pame,
    "apparate": partial(tuned, "apparate"),
    "guarantee": partial(tuned, "guarantee"),
}


def figures(case: Case, served: Served, first: int, end: int) -> Figures:
    """Returns the figures of a part of the stream."""
    first = -(-first // BATCH) * BATCH  # whole batches, because a batch has one setting
    exits_N = served.replayed.exits_N[first:end].astype(np.int64)
    outcome = _outcome(case.served, served.replayed, first, end)
    times = []
    for index, setting in enumerate(served.replayed.settings[first // BATCH : first // BATCH + len(exits_N) // BATCH]):
        active = [ramp for ramp, at in setting.items() if at != SCORES[case.served.score].never]
        times.append(case.batching.times(exits_N[index * BATCH : (index + 1) * BATCH], active))
    return Figures(
        slow=100 * float(np.mean([each.slower for each in times])),
        precision=100 * relative_precision(outcome),
        agreement=100 * outcome.agreement,
        saved=100 * (1 - float(np.mean([each.mean_s / each.whole_s for each in times]))),
    )


def _outcome(records: ExitRecords, replayed: Replayed, first: int, end: int) -> ExitOutcome:
    truth_NE = records.true_losses_NE
    assert truth_NE is not None
    exits_N = replayed.exits_N[first:end]
    columns_N = np.searchsorted([*records.ramps, records.num_blocks - 1], exits_N)
    return ExitOutcome(
        num_blocks=records.num_blocks,
        exits_N=exits_N,
        losses_N=replayed.losses_N[first:end],
        answers_N=None,
        true_losses_N=truth_NE[np.arange(first, end), columns_N],
        full_true_losses_N=truth_NE[first:end, -1],
    )


def parts(case: Case, found: Mapping[str, Served]) -> dict[str, dict[str, Figures]]:
    """Returns, by side, the figures of everything, before the change, after it, and after the last reaction to it."""
    end = len(case.served)
    changed = end - round(end * 5000 / (BEFORE + 5000))
    results = {}
    for side, served in found.items():
        results[side] = {
            "whole": figures(case, served, 0, end),
            "before": figures(case, served, 0, changed),
            "changed": figures(case, served, changed, end),
        }
        if changed < served.settled <= end - 2 * BATCH:  # at least one whole batch
            results[side]["after the reaction"] = figures(case, served, served.settled, end)
    return results


def run(effort: Effort) -> StudyResult:
    """Runs all three changes; with quick effort the paper's two. Every side runs on every stream."""
    records = recorded(effort)
    cases = {name: case_of(name, records) for name in (CHANGES if effort == "full" else PAPER)}
    found = {name: {side: serve(case) for side, serve in SIDES.items()} for name, case in cases.items()}
    results = {name: parts(case, found[name]) for name, case in cases.items()}
    agreements = {side: tuple(sides[side]["whole"].agreement for sides in results.values()) for side in SIDES}
    return StudyResult(
        comparisons=(
            *_reactions(results),
            *(
                Comparison(f"{name}, {side}: agreement (%)", of["whole"].agreement)
                for name, sides in results.items()
                for side, of in sides.items()
            ),
        ),
        pictures=(Bars("Agreement where inputs change", "stream", "agreement (%)", tuple(results), agreements),),
        tables=(
            Table(
                "By stream, side and part (%)",
                ("stream", "side", "part", "slow batches", "precision", "agreement", "mean time saved"),
                tuple(
                    (name, side, part, each.slow, each.precision, each.agreement, each.saved)
                    for name, sides in results.items()
                    for side, of in sides.items()
                    for part, each in of.items()
                ),
            ),
            Table(
                "What PAME's tuner said",
                ("stream", "at input", "words"),
                tuple((name, each.at_s, each.words) for name, sides in found.items() for each in sides["pame"].changes),
            ),
        ),
    )


def _reactions(results: Mapping[str, Mapping[str, Mapping[str, Figures]]]) -> list[Comparison]:
    """`tuned once` shows the change without a reaction."""
    rows = []
    for name, sides in results.items():
        seen = {
            "before": sides["pame"]["before"],
            "changed": sides["tuned once"]["changed"],
            "after the reaction": sides["pame"].get("after the reaction"),
        }
        for figure in ("slow", "precision"):
            for part, each in seen.items():
                ours = None if each is None else getattr(each, figure)
                paper = PAPER.get(name, {}).get(f"{figure}, {part}")
                rows.append(Comparison(f"{name}, {figure}, {part} (%)", ours, paper))
    return rows


FIG16_STUDY = declare("pame_fig16_load_changes", run, needs=NEEDS)
