"""Decoders equal `transformers`', however they are cut and fused; what leaves early is filled in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from earlyexit.errors import ModelFolderError, OverloadedError
from earlyexit.families.decoder import Llama
from earlyexit.network.boundary import Segment
from earlyexit.network.model import EarlyExitModel, arbitrary_tensors
from earlyexit.network.piece import Layout
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.sequences.sequence import TokenSequence, run_of, sequence_of
from tests.earlyexit.families.decoders import (
    NUM_BLOCKS,
    Handfuls,
    backbone_of,
    decoder,
    hf_decoder,
    sequence,
)

PROMPTS = ([7], [1, 200, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1], [30, 31, 32, 33, 34])
NOBODYS = torch.zeros(1, 5, dtype=torch.int32)
SOMETIMES = ConfidencePolicy(0.4)
"""Between the confidences of the random ramps: some tokens leave at each."""


def layout_of(*lengths: int) -> Layout:
    return Layout(np.array(lengths, dtype=np.int32))


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return hf_decoder()


@pytest.fixture(scope="module")
def model(reference: LlamaForCausalLM) -> EarlyExitModel:
    return decoder(reference)


def test_copies_are_made_of_the_state_that_a_token_left_with(
    model: EarlyExitModel, reference: LlamaForCausalLM
) -> None:
    backbone = backbone_of(model)
    backbone.fill = "copy"
    sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
    said = Handfuls(model=model, policy=SOMETIMES, bounds=(0, 3, 5), ramps=(1, 2)).run(sequences, end=False)
    _catch_up(model, sequences)
    checked = 0
    for number, steps in said.items():
        # The first token to leave after block 1, where all before it ran whole: what it left with is the full model's.
        early = next((k for k, each in enumerate(steps) if each.exit != NUM_BLOCKS - 1), None)
        if early is None or steps[early].exit != 1:
            continue
        tokens = sequences[number].tokens
        seen = len(PROMPTS[number - 1]) + early  # the token that left is the last of so many
        states = reference(torch.tensor([tokens[:seen]]), output_hidden_states=True).hidden_states[2][0]
        for index in range(2, NUM_BLOCKS):
            block = reference.model.layers[index]
            values = block.self_attn.v_proj(block.input_layernorm(states[-1])).view(2, 8)
            assert (backbone.kv.held(index, number, seen)[1][-1] - values).abs().max() < 1e-5
            checked += 1
    assert checked
    backbone.fill = "compute"
    _end(model)


def test_what_does_not_fit_the_store_fails_alone(reference: LlamaForCausalLM) -> None:
    model = decoder(reference, num_pages=4)
    Handfuls(model=model).run({1: sequence([1, 2], max_tokens=14)}, end=False)
    with pytest.raises(OverloadedError, match="1 pages are needed for keys and values, 0 of 4 are free"):
        Handfuls(model=model).run({2: sequence([1, 2], max_tokens=2)})
    backbone_of(model).memory.end(1)
    Handfuls(model=model).run({2: sequence([1, 2], max_tokens=2)})


def test_made_up_inputs_are_of_no_sequence(model: EarlyExitModel) -> None:
    lengths_B = np.array([3, 1], dtype=np.int32)
    ids_N, run_B5 = arbitrary_tensors(model, 0, lengths_B, np.random.default_rng(0))
    assert run_B5.tolist() == [[0, 0, 0, 0, 0]] * 2
    _, outputs_BC = model.compute(Segment(first=0, end=NUM_BLOCKS, ramp=None), (ids_N, run_B5), layout_of(3, 1))
    assert outputs_BC is not None
    assert outputs_BC.isfinite().all()
    assert backbone_of(model).kv.sequences == set()


def test_a_decoder_without_a_store_says_so(reference: LlamaForCausalLM) -> None:
    backbone = Llama().from_transformers(reference).backbone
    with pytest.raises(ModelFolderError, match="a decoder needs a store of keys and values"):
        backbone.run_blocks(0, 1, (torch.zeros(1, 48), NOBODYS, NOBODYS[:, 0]), layout_of(1))


@pytest.mark.parametrize("number", [0, 1, 2**31 - 1, 2**31, 2**62 - 1])
def test_a_sequences_number_travels_in_two_halves(number: int) -> None:
    high, low, *others = np.array(run_of(number, 5, 9, 3), dtype=np.int32).tolist()
    assert (sequence_of(high, low), *others) == (number, 5, 9, 3)


def _catch_up(model: EarlyExitModel, sequences: dict[int, TokenSequence]) -> None:
    """One more token of every sequence through all blocks, by which everything that waits is filled in."""
    backbone = backbone_of(model)
    for number, each in sequences.items():
        tokens = each.tokens
        ids = torch.tensor([tokens[-1]], dtype=torch.int32)
        run = torch.tensor([run_of(number, len(tokens) - 1, 0, 0)], dtype=torch.int32)
        with torch.inference_mode():
            backbone.run_blocks(0, NUM_BLOCKS, backbone.embed((ids, run), layout_of(1)), layout_of(1))
        assert backbone.pending.num_waiting(number) == 0


def _end(model: EarlyExitModel) -> None:
    for number in backbone_of(model).kv.sequences:
        backbone_of(model).memory.end(number)
