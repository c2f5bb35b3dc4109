from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

from earlyexit.families import find_family
from earlyexit.families.encoder import bucket
from earlyexit.training.ramps import pack
from tests.earlyexit.families.checkpoints import hf_inputs, hf_model
from tests.earlyexit.network.tokens import random_inputs


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
