"""Two models and a data set to prune words of: what `experiments.cascades.word_pruning` measures on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from earlyexit.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained
from earlyexit.codecs import find_codec
from earlyexit.codecs.text import TextCodec
from earlyexit.dataset import LabelledRows
from earlyexit.importance import importance_of
from earlyexit.model import EarlyExitModel
from earlyexit.reordered import reorder_linears
from earlyexit.tasks.label import LabelTask
from earlyexit.train import TrainOptions, train_ramps
from experiments.data import RUNS
from experiments.trained import ag_news, imdb, mpnet
from experiments.trained.features import features_of
from experiments.trained.mpnet import labelled
from offramp.jobs.packaged import resolve_backbone
from offramp.jobs.progress import progress_bars

DataName = Literal["imdb", "ag_news", "clinc150"]
FOLDER = RUNS / "word_pruning"
NEWS = 4000
"""Rows: half to learn from, half to test."""
LONGEST = 512
"""Tokens that both models take."""
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Half:
    """Rows that heads learn from, and rows that test them."""

    learn: IntArray
    test: IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Right:
    """Which of the large model's answers to rerouted rows are right."""

    whole: npt.NDArray[np.bool_]
    pruned: npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A data set and the models: heads are made as they are asked for, on what the frozen backbones make of a text."""

    name: str
    rows: LabelledRows
    small: EarlyExitModel
    codec: TextCodec
    large: EarlyExitModel
    large_codec: TextCodec
    importance: list[npt.NDArray[np.float32]]
    """Of every row, by the small model."""
    halves: tuple[Half, ...]

    @property
    def texts(self) -> tuple[str, ...]:
        """Of every row."""
        return self.rows.texts


def case_of(name: DataName, num_rows: int | None = None) -> Case:
    """Read or make everything that is kept, of so many rows at most; raises SystemExit without the data."""
    rows, halves = DATA[name](num_rows)
    (small, codec), (large, large_codec) = (_model(each, rows, FOLDER / each) for each in ("minilm", "mpnet"))
    return Case(
        name=name,
        rows=rows,
        small=small,
        codec=codec,
        large=large,
        large_codec=large_codec,
        importance=_importance(small, codec, rows, FOLDER / f"{_hash(rows.texts)}-importance.npz"),
        halves=halves,
    )


def rerouted_of(case: Case, half: Half, share: float) -> tuple[IntArray, float]:
    """The share of the rows that test of which the small model is least sure, and how often it is right of all."""
    targets = _targets(case)
    seen = _features(case.small, case.codec, case.rows)
    _train(case.small, seen[half.learn], targets[half.learn])
    said = _outputs(case.small, seen[half.test]).softmax(1)
    unsure = torch.argsort(said.amax(1))[: round(share * len(half.test))].numpy()
    return half.test[np.sort(unsure)], float((said.argmax(1).numpy() == targets[half.test]).mean())


def right_of(case: Case, half: Half, rows: IntArray, texts: Sequence[str]) -> Right:
    """Answers to rows, whole and as `texts` have them, by a head that learnt of the half's others."""
    targets = _targets(case)
    whole = _features(case.large, case.large_codec, case.rows)
    cut = LabelledRows.of_texts(texts=texts, labels=[case.rows.labels[row] for row in rows])
    pruned = _features(case.large, case.large_codec, cut)
    _train(case.large, whole[half.learn], targets[half.learn])
    answers = [_outputs(case.large, each).argmax(1).numpy() for each in (whole[rows], pruned)]
    return Right(whole=answers[0] == targets[rows], pruned=answers[1] == targets[rows])


def _targets(case: Case) -> IntArray:
    return np.array([case.rows.label_names.index(label) for label in case.rows.labels])


def _imdb(num_rows: int | None) -> tuple[LabelledRows, tuple[Half, ...]]:
    reviews = imdb.pairs()
    drawn = np.random.default_rng(0).permutation(len(reviews))[:num_rows].tolist()
    order, middle = np.arange(len(drawn)), len(drawn) // 2
    return labelled([reviews[row] for row in drawn]), (
        Half(learn=order[:middle], test=order[middle:]),
        Half(learn=order[middle:], test=order[:middle]),
    )


def _ag_news(num_rows: int | None) -> tuple[LabelledRows, tuple[Half, ...]]:
    size = (num_rows or NEWS) // 2
    return _one_half(labelled(ag_news.learn_pairs()[:size]), labelled(ag_news.unseen_pairs()[:size]))


def _clinc150(num_rows: int | None) -> tuple[LabelledRows, tuple[Half, ...]]:
    parts = mpnet.parts_of("clinc150")
    return _one_half(parts["learn"], parts["unseen"].select(range(len(parts["unseen"]))[:num_rows]))


DATA = {"imdb": _imdb, "ag_news": _ag_news, "clinc150": _clinc150}


def _one_half(learn: LabelledRows, test: LabelledRows) -> tuple[LabelledRows, tuple[Half, ...]]:
    rows = LabelledRows.of_texts(texts=learn.texts + test.texts, labels=learn.labels + test.labels)
    return rows, (Half(learn=np.arange(len(learn)), test=np.arange(len(learn), len(rows))),)


def _model(backbone: str, rows: LabelledRows, folder: Path) -> tuple[EarlyExitModel, TextCodec]:
    """A packaged backbone and a head of random weights."""
    place = resolve_backbone(backbone)
    pretrained, family = load_pretrained(place)
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(place, folder)
    spec = {"name": "text", "max_length": LONGEST}
    task, ramps = LabelTask(rows.label_names), RampOptions(at=())
    model = add_ramps(pretrained, name=backbone, family=family, codec=spec, task=task, ramps=ramps)
    codec = find_codec(spec, folder)
    assert isinstance(codec, TextCodec)
    return model.eval().requires_grad_(False), codec


def _importance(
    model: EarlyExitModel, codec: TextCodec, rows: LabelledRows, path: Path
) -> list[npt.NDArray[np.float32]]:
    if path.is_file():
        kept = np.load(path)
        return np.split(kept["importance"], np.cumsum(kept["lengths"])[:-1])
    computing = deepcopy(model)
    reorder_linears(computing.backbone)
    with progress_bars() as progress:
        found = importance_of(computing, rows.encode(codec), progress=progress)
    lengths = [len(each) for each in found]
    np.savez(path, importance=np.concatenate(found), lengths=lengths)
    return found


def _features(model: EarlyExitModel, codec: TextCodec, rows: LabelledRows) -> Tensor:
    """What the head looks at, (N, D); computed in bfloat16."""
    path = FOLDER / model.info.name / f"{_hash(rows.texts)}.pt"
    (features,) = features_of(model, rows, codec, path, "bfloat16").values()
    return features


def _train(model: EarlyExitModel, features: Tensor, targets: IntArray) -> None:
    model.head.requires_grad_(True)
    train_ramps(model, (), targets, TrainOptions(seed=0), features={model.num_blocks - 1: features})
    model.head.requires_grad_(False)


@torch.inference_mode()
def _outputs(model: EarlyExitModel, features: Tensor) -> Tensor:
    return model.exit_head(model.num_blocks - 1).classify(features).float()


def _hash(texts: Sequence[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16]
