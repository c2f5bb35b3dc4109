from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from earlyexit.errors import ModelFolderError
from earlyexit.families import find_family
from earlyexit.families.base import Backbone, Pretrained
from earlyexit.families.encoder import bucket
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained, random_model
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import pack
from tests.earlyexit.families.checkpoints import FAMILIES, hf_config, hf_inputs, hf_model
from tests.earlyexit.network.models import SMALL
from tests.earlyexit.network.tokens import of_tokens, random_inputs

NAMES = {0: "bad", 1: "fair", 2: "good"}
each_family = pytest.mark.parametrize("family", FAMILIES)


@pytest.fixture
def mixed(encoded: list[Encoded]) -> list[Encoded]:
    """Eight inputs of different lengths, without the token that RoBERTa takes for padding."""
    return [of_tokens(np.maximum(each.tensors[0], 2)) for each in encoded[:8]]


def with_ramps(pretrained: Pretrained, family: str, names: tuple[str, ...], *, max_length: int = 32) -> EarlyExitModel:
    codec = {"name": "text", "max_length": max_length}
    return add_ramps(pretrained, name="m", family=family, codec=codec, task=LabelTask(names), ramps=RampOptions())


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
def test_the_logits_of_a_fine_tuned_checkpoint_equal_those_of_transformers(family: str, mixed: list[Encoded]) -> None:
    theirs = hf_model(family, id2label=NAMES)
    pretrained = find_family(family).from_transformers(theirs)
    assert pretrained.label_names == ("bad", "fair", "good")
    ours = with_ramps(pretrained, family, ("bad", "fair", "good"))
    values, layout = pack(mixed, torch.device("cpu"))
    logits_BC = ours.exit_outputs(2, ours.run_blocks(0, 3, values, layout), layout)
    torch.testing.assert_close(logits_BC, theirs(**hf_inputs(mixed)).logits, rtol=0, atol=1e-5)


@each_family
def test_a_checkpoint_folder_gives_the_network_that_was_saved(family: str, tmp_path: Path) -> None:
    theirs = hf_model(family, id2label=NAMES)
    theirs.save_pretrained(tmp_path)
    pretrained, name = load_pretrained(str(tmp_path))
    expected = find_family(family).from_transformers(theirs)
    assert name == family
    assert pretrained.label_names == expected.label_names
    for key, tensor in expected.backbone.state_dict().items():
        assert pretrained.backbone.state_dict()[key].equal(tensor)


def test_a_checkpoints_order_of_the_labels_wins_over_the_datas() -> None:
    theirs = hf_model("bert", id2label=NAMES)
    theirs.config.id2label = {0: "good", 1: "bad", 2: "fair"}
    pretrained = find_family("bert").from_transformers(theirs)
    model = with_ramps(pretrained, "bert", ("bad", "fair", "good"))
    assert model.task.spec()["label_names"] == ["good", "bad", "fair"]
    assert model.info.provenance["head"] == "checkpoint"
    assert model.head.state_dict()["classifier.weight"].equal(theirs.classifier.weight)


def test_random_models_of_one_seed_are_equal_and_of_another_are_not() -> None:
    models = [random_model(SMALL | {"num_blocks": 2}, seed=seed) for seed in (0, 0, 1)]
    first, same, other = (torch.nn.utils.parameters_to_vector(model.parameters()) for model in models)
    assert first.equal(same)
    assert not first.equal(other)


def test_a_checkpoint_with_broken_weights_is_refused(tmp_path: Path) -> None:
    hf_config("bert").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(ModelFolderError, match=r"the weights of .* cannot be loaded: "):
        load_pretrained(str(tmp_path))


def test_a_checkpoint_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    hf_model("bert", classifies=False).save_pretrained(tmp_path)
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelFolderError, match="no fast tokenizer can be loaded from"):
        copy_tokenizer(str(tmp_path), tmp_path / "model")


@pytest.mark.parametrize("num_buckets", [32, 16, 4])
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
