"""Checkpoints of texts, pairs of texts and numbers answer as `transformers` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from earlyexit.families import find_family
from earlyexit.families.base import Backbone
from earlyexit.families.encoder import bucket
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import load_pretrained, random_model
from earlyexit.network.cut import cut_out
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.ramps import exit_outputs, pack
from tests.earlyexit.families.checkpoints import FAMILIES, hf_inputs, hf_model
from tests.earlyexit.network.models import SMALL, ramped
from tests.earlyexit.network.tokens import of_tokens, random_inputs, wire_of

NAMES = ("bad", "fair", "good")
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def mixed(encoded: list[Encoded]) -> list[Encoded]:
    """Eight inputs of different lengths, without the token that RoBERTa takes for padding."""
    return [of_tokens(np.maximum(each.tensors[0], 2)) for each in encoded[:8]]


def hidden_after_every_block(backbone: Backbone, encoded: Sequence[Encoded]) -> list[Tensor]:
    values, layout = pack(encoded, torch.device("cpu"))
    after = [backbone.embed(values, layout)]
    for index in range(backbone.num_blocks):
        after.append(backbone.run_block(index, after[-1], layout))
    return [hidden_ND for (hidden_ND,) in after]


@each_family
@torch.inference_mode()
def test_every_hidden_state_equals_that_of_transformers(family: str, mixed: list[Encoded]) -> None:
    theirs = hf_model(family, classifies=False)
    ours = find_family(family).from_transformers(theirs)
    assert (ours.head, ours.label_names) == (None, None)
    inputs = hf_inputs(mixed)
    expected = theirs(**inputs, output_hidden_states=True).hidden_states
    found = hidden_after_every_block(ours.backbone, mixed)
    assert len(found) == len(expected) == 4
    for hidden_ND, hidden_BTD in zip(found, expected, strict=True):
        torch.testing.assert_close(hidden_ND, hidden_BTD[inputs["attention_mask"].bool()], rtol=0, atol=1e-5)


@each_family
@torch.inference_mode()
def test_fine_tuned_logits_equal_those_of_transformers(family: str, mixed: list[Encoded], tmp_path: Path) -> None:
    theirs = hf_model(family, id2label=dict(enumerate(NAMES)))
    theirs.save_pretrained(tmp_path)
    pretrained, name = load_pretrained(str(tmp_path))
    assert (name, pretrained.label_names) == (family, NAMES)
    model = ramped(pretrained, family, LabelTask(NAMES))
    torch.testing.assert_close(exit_outputs(model, mixed)[2], theirs(**hf_inputs(mixed)).logits, rtol=0, atol=1e-5)


def test_a_checkpoints_order_of_the_labels_wins_over_the_datas() -> None:
    theirs = hf_model("bert", id2label=dict(enumerate(NAMES)))
    theirs.config.id2label = {0: "good", 1: "bad", 2: "fair"}
    pretrained = find_family("bert").from_transformers(theirs)
    model = ramped(pretrained, "bert", LabelTask(NAMES))
    assert model.task.spec()["label_names"] == ["good", "bad", "fair"]
    assert model.info.provenance["head"] == "checkpoint"
    assert model.head.state_dict()["classifier.weight"].equal(theirs.classifier.weight)


def test_random_models_of_one_seed_are_equal_and_of_another_are_not() -> None:
    models = [random_model(SMALL | {"num_blocks": 2}, seed=seed) for seed in (0, 0, 1)]
    first, same, other = (torch.nn.utils.parameters_to_vector(model.parameters()) for model in models)
    assert first.equal(same)
    assert not first.equal(other)


@pytest.mark.parametrize("num_buckets", [16, 4])
def test_every_distance_falls_into_the_bucket_that_transformers_has_for_it(num_buckets: int) -> None:
    offset_R = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(offset_R, num_buckets=num_buckets)
    assert bucket(offset_R, num_buckets).tolist() == expected.tolist()


@torch.inference_mode()
def test_inputs_longer_than_the_largest_distance_equal_those_of_transformers() -> None:
    theirs = hf_model("mpnet", classifies=False, noise=0.3, max_position_embeddings=202)
    ours = find_family("mpnet").from_transformers(theirs).backbone
    inputs = random_inputs(np.random.default_rng(0), [200, 3, 150], least=2)
    values, layout = pack(inputs, torch.device("cpu"))
    (hidden_ND,) = ours.run_blocks(0, 3, ours.embed(values, layout), layout)
    padded = hf_inputs(inputs)
    expected = theirs(**padded).last_hidden_state[padded["attention_mask"].bool()]
    torch.testing.assert_close(hidden_ND, expected, rtol=0, atol=1e-5)


NEVER = ConfidencePolicy(2.0)
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
    return ramped(pretrained, family, task, codec={"name": "text_pair" if pairs else "text", "max_length": 32})


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


def test_pairs_and_single_texts_get_the_logits_of_transformers(tmp_path: Path) -> None:
    hf_model = pair_checkpoint(tmp_path)
    model = ours(tmp_path, LabelTask(NAMES), pairs=True)
    found_BC = exit_outputs(model, some_pairs())[2]
    torch.testing.assert_close(found_BC, theirs(hf_model, some_pairs()), atol=1e-4, rtol=0)
    model = ours(tmp_path, LabelTask(NAMES))
    assert [each.name for each in model.boundary(-1)] == ["token_ids"]
    texts = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    torch.testing.assert_close(exit_outputs(model, texts)[2], theirs(hf_model, texts), atol=1e-4, rtol=0)
    hf_model = checkpoint(tmp_path, family="roberta", id2label=dict(enumerate(NAMES)))
    model = ours(tmp_path, LabelTask(NAMES), pairs=True)
    assert [each.name for each in model.boundary(-1)] == ["token_ids"]
    pairs = [Encoded(each.length, each.tensors[:1]) for each in some_pairs()]
    torch.testing.assert_close(exit_outputs(model, pairs)[2], theirs(hf_model, pairs), atol=1e-4, rtol=0)


def answers(model: EarlyExitModel, piece: Piece) -> list[object]:
    (step,) = cut_out(model, 0, 3, (), NEVER).run(piece)
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
    outputs_NC = exit_outputs(model, [Encoded(each.length, each.tensors[:1]) for each in some_pairs()])[2]
    assert STARS.score(outputs_NC).tolist() == [0.5] * len(LENGTHS)
