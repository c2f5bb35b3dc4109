from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
import transformers
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.errors import InputError, ModelFolderError
from earlyexit.families import find_family
from earlyexit.families.encoder import MPNetBackbone, bucket, by_distance
from earlyexit.network.boundary import Segment
from earlyexit.network.checkpoint import load_pretrained
from earlyexit.network.piece import Layout
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import pack
from offramp.commands.packaged import resolve_backbone
from tests.earlyexit.families.checkpoints import hf_inputs, hf_model
from tests.earlyexit.network.cuts import piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs

POLICY = ConfidencePolicy(0.36)
"""Between the confidences of the random ramps: some inputs leave at each."""


def layout_of(*lengths: int) -> Layout:
    return Layout(np.array(lengths, dtype=np.int32))


@pytest.mark.parametrize("num_buckets", [32, 16, 4])
def test_every_distance_falls_into_the_bucket_that_transformers_has_for_it(num_buckets: int) -> None:
    offset_R = torch.arange(-600, 601)
    expected = MPNetEncoder.relative_position_bucket(offset_R, num_buckets=num_buckets)
    assert bucket(offset_R, num_buckets).tolist() == expected.tolist()


def test_a_query_must_not_look_behind_its_input() -> None:
    backbone = find_family("mpnet").build({"hidden_size": 8, "num_blocks": 1, "num_heads": 2, "vocab_size": 9})
    assert isinstance(backbone, MPNetBackbone)
    layout = Layout(np.array([3, 1], dtype=np.int32), attention="padded")
    (mask,) = layout.masks(backbone.attention_bias(layout))
    assert mask is not None
    assert mask.shape == (2, 2, 3, 3)
    assert torch.isinf(mask)[1, 0, 0].tolist() == [False, True, True]
    assert not torch.isinf(mask)[0].any()
    of_one_length = layout_of(3, 3)
    (uniform,) = of_one_length.masks(backbone.attention_bias(of_one_length))
    assert uniform is not None
    assert uniform.equal(by_distance(backbone.distance_bias, 3))


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


@pytest.mark.parametrize("lengths", [[7], [1, 1], [9, 9, 9], [5, 200, 1, 12]], ids=str)
def test_a_piece_on_onnx_runtime_gives_what_torch_gives(
    lengths: Sequence[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = small(family="mpnet", num_blocks=2, max_length=200)
    cache = tmp_path_factory.getbasetemp() / "onnx-mpnet"
    segments = OnnxSegments(model, cache=cache, num_threads=1)
    segment = Segment(first=0, end=2, ramp=None)
    piece = piece_of(model, POLICY, random_inputs(np.random.default_rng(1), lengths, least=2))
    with torch.inference_mode():
        expected = model.run(segment, piece)
        found = segments.run(segment, piece)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("num_buckets", [0, 2, 30])
def test_buckets_that_cannot_be_divided_into_quarters_are_refused(num_buckets: int) -> None:
    with pytest.raises(ModelFolderError, match=f"num_buckets must be a multiple of 4, not {num_buckets}"):
        find_family("mpnet").build({"num_buckets": num_buckets})


@pytest.mark.slow
@torch.inference_mode()
def test_all_mpnet_base_v2_equals_that_of_transformers() -> None:
    try:
        place = resolve_backbone("mpnet")
    except InputError as absent:
        pytest.skip(str(absent))
    theirs = transformers.AutoModel.from_pretrained(place).eval()
    ours, family = load_pretrained(place)
    assert (family, ours.backbone.num_blocks, ours.backbone.max_length) == ("mpnet", 12, 512)
    inputs = random_inputs(np.random.default_rng(6), [512, 12, 3, 140], least=2)
    values, layout = pack(inputs, torch.device("cpu"))
    padded = hf_inputs(inputs)
    expected = theirs(**padded, output_hidden_states=True).hidden_states
    hidden = ours.backbone.embed(values, layout)
    for block in range(12):
        hidden = ours.backbone.run_block(block, hidden, layout)
        hidden_ND = expected[block + 1][padded["attention_mask"].bool()]
        torch.testing.assert_close(hidden[0], hidden_ND, rtol=0, atol=1e-4)
