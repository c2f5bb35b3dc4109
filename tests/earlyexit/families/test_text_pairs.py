"""Pairs of texts, told apart by token types, and checkpoints that answer a number: as `transformers` has them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained
from earlyexit.network.cut import cut_out
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.checkpoints import hf_inputs, hf_model
from tests.earlyexit.network.tokens import wire_of

NAMES = ("different", "same", "unknown")
NEVER = ConfidencePolicy(2.0)
NUM_BLOCKS = 3
LENGTHS = ((2, 3), (9, 2), (4, 12), (1, 1), (6, 6))
"""Of the first and the second text of every pair."""
STARS = RegressionTask(scale=4.0, offset=3.0)


def checkpoint(folder: Path, *, family: str = "bert", **config: Any) -> Any:
    """A fine-tuned checkpoint with random weights, saved and as `transformers` has it."""
    model = hf_model(family, noise=0.2, **config)
    model.save_pretrained(folder)
    return model


def pair_checkpoint(folder: Path) -> Any:
    return checkpoint(folder, type_vocab_size=2, id2label=dict(enumerate(NAMES)))


def ours(folder: Path, task: Task, *, pairs: bool = False) -> EarlyExitModel:
    pretrained, family = load_pretrained(str(folder), pairs=pairs)
    codec = {"name": "text_pair" if pairs else "text", "max_length": 32}
    return add_ramps(pretrained, name="m", family=family, codec=codec, task=task, ramps=RampOptions())


def some_pairs() -> list[Encoded]:
    rng = np.random.default_rng(0)
    return [
        Encoded(
            sum(lengths),
            (rng.integers(2, 100, sum(lengths), dtype=np.int32), np.repeat(np.arange(2, dtype=np.int32), lengths)),
        )
        for lengths in LENGTHS
    ]


@torch.inference_mode()
def theirs(hf_model: Any, encoded: Sequence[Encoded]) -> Tensor:
    logits_BC: Tensor = hf_model(**hf_inputs(encoded)).logits
    return logits_BC


def test_pairs_get_the_logits_of_transformers(tmp_path: Path) -> None:
    hf_model = pair_checkpoint(tmp_path)
    model = ours(tmp_path, LabelTask(NAMES), pairs=True)
    found_BC = exit_outputs(model, some_pairs())[NUM_BLOCKS - 1]
    torch.testing.assert_close(found_BC, theirs(hf_model, some_pairs()), atol=1e-4, rtol=0)


def test_a_model_of_single_texts_has_the_first_type_in_its_positions(tmp_path: Path) -> None:
    hf_model = pair_checkpoint(tmp_path)
    model = ours(tmp_path, LabelTask(NAMES))
    assert [each.name for each in model.boundary(-1)] == ["token_ids"]
    texts = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    torch.testing.assert_close(exit_outputs(model, texts)[NUM_BLOCKS - 1], theirs(hf_model, texts), atol=1e-4, rtol=0)


def test_a_family_without_token_types_takes_pairs_by_their_separators(tmp_path: Path) -> None:
    hf_model = checkpoint(tmp_path, family="roberta", id2label=dict(enumerate(NAMES)))
    model = ours(tmp_path, LabelTask(NAMES), pairs=True)
    assert [each.name for each in model.boundary(-1)] == ["token_ids"]
    pairs = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    torch.testing.assert_close(exit_outputs(model, pairs)[NUM_BLOCKS - 1], theirs(hf_model, pairs), atol=1e-4, rtol=0)


def answers(model: EarlyExitModel, piece: Piece) -> list[object]:
    (step,) = cut_out(model, 0, NUM_BLOCKS, (), NEVER).run(piece)
    return [answer.value for answer in step.answers]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_a_checkpoint_of_one_number_answers_what_transformers_answers(family: str, tmp_path: Path) -> None:
    hf_model = checkpoint(tmp_path, family=family, num_labels=1)
    model = ours(tmp_path, STARS)
    texts = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    expected = theirs(hf_model, texts)[:, 0].tolist()
    assert max(expected) - min(expected) > 0.1
    assert answers(model, from_wire(model, wire_of(texts), NEVER)) == pytest.approx(expected, abs=1e-4)
    assert model.info.provenance["head"] == "checkpoint"


@pytest.mark.parametrize(
    ("num_labels", "task"),
    [pytest.param(3, STARS, id="labels for a number"), pytest.param(1, LabelTask(NAMES), id="a number for labels")],
)
def test_a_head_for_another_task_is_not_kept(num_labels: int, task: Task, tmp_path: Path) -> None:
    checkpoint(tmp_path, num_labels=num_labels)
    model = ours(tmp_path, task)
    assert (model.info.head_style, model.info.provenance) == ("light", {})
    assert model.task == task


def test_a_number_is_as_unsure_as_its_scale_before_training(tmp_path: Path) -> None:
    checkpoint(tmp_path, num_labels=1)
    model = ours(tmp_path, STARS)
    outputs_NC = exit_outputs(model, [Encoded(each.length, each.tensors[:1]) for each in some_pairs()])[NUM_BLOCKS - 1]
    assert STARS.score(outputs_NC).tolist() == [0.5] * len(LENGTHS)
