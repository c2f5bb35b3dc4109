"""Ramps that learned from labels and from the model's own answers: the same model, blocks, rows and seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from earlyexit.codecs import find_codec
from earlyexit.store import load_model
from earlyexit.train import TrainOptions, exit_features, exit_outputs, train_ramps

if TYPE_CHECKING:
    from earlyexit.dataset import LabelledRows
    from earlyexit.model import EarlyExitModel
    from earlyexit.signature import Encoded


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """How often one ramp answers as the full model does, on rows that nothing learned from."""

    block: int
    labels: float
    answers: float

    @property
    def points(self) -> float:
        """By how many of a hundred inputs more it does so where it learned from the model's own answers."""
        return 100 * (self.answers - self.labels)


def compared(folder: Path, learned: LabelledRows, tested: LabelledRows, *, seed: int = 0) -> list[Compared]:
    """Train an injected model's ramps from labels, then anew from answers; what is in its folder stays.

    As two runs of `offramp inject` do it, but for the blocks: sites are timed, so that two runs may cut differently.
    """
    model = load_model(folder)
    codec = find_codec(model.info.codec, folder)
    encoded, held = learned.encode(codec), tested.encode(codec)
    features, targets = exit_features(model, encoded), model.task.targets(learned.labels)
    found = []
    for imitate in (False, True):
        train_ramps(model, encoded, targets, TrainOptions(imitate=imitate, seed=seed), features=features)
        found.append(dict(_agreements(model, held)))
    labels, answers = found
    return [Compared(block=block, labels=labels[block], answers=answers[block]) for block in labels]


def _agreements(model: EarlyExitModel, held: list[Encoded]) -> Iterator[tuple[int, float]]:
    """Of every ramp with the full model."""
    answers = {block: outputs_NC.argmax(1) for block, outputs_NC in exit_outputs(model, held).items()}
    full_N = answers.pop(model.num_blocks - 1)
    for block, answer_N in sorted(answers.items()):
        yield block, float((answer_N == full_N).double().mean())
