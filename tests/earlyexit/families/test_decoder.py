"""Decoders equal `transformers`', however they are cut and whoever runs beside; what leaves early is filled in."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from earlyexit.errors import ModelFolderError, OverloadedError
from earlyexit.families.decoder import Llama
from earlyexit.named import Fill
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
    say,
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


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM) -> list[list[int]]:
    """Prompts and twelve tokens each, by `transformers`, one at a time."""
    return [
        reference.generate(
            torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0, eos_token_id=None
        )[0].tolist()
        for prompt in PROMPTS
    ]


@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("chunk", [64, 3, 1])
@pytest.mark.parametrize(("seed", "page_tokens"), [(0, 1), (1, 4), (2, 16)], ids=str)
def test_greedy_tokens_are_those_of_transformers(
    model: EarlyExitModel,
    expected: list[list[int]],
    bounds: tuple[int, ...],
    chunk: int,
    seed: int,
    page_tokens: int,
) -> None:
    backbone_of(model).open_store(256 // page_tokens, page_tokens=page_tokens)
    sequences = {number: sequence(prompt, chunk=chunk) for number, prompt in enumerate(PROMPTS, 1)}
    Handfuls(model=model, bounds=bounds, seed=seed).run(sequences)
    assert [each.tokens for each in sequences.values()] == expected
    assert backbone_of(model).kv.free_pages == 256 // page_tokens


def test_a_sequence_that_begins_anew_elsewhere_goes_on_as_it_would_have(
    model: EarlyExitModel, expected: list[list[int]]
) -> None:
    begun = sequence(PROMPTS[1])
    say(begun, expected[1][len(PROMPTS[1]) : 8])
    Handfuls(model=model).run({5: begun})
    assert begun.tokens == expected[1]


@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 3, 5), (0, 3, 5), (0, 1, 4, 5)], ids=str)
@pytest.mark.parametrize("ramps", [(1, 2), (1,), (2,)], ids=str)
def test_blocks_that_a_token_skipped_come_to_hold_of_it_what_the_full_model_does(
    model: EarlyExitModel, reference: LlamaForCausalLM, bounds: tuple[int, ...], ramps: tuple[int, ...]
) -> None:
    sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
    handfuls = Handfuls(model=model, policy=SOMETIMES, bounds=bounds, ramps=ramps)
    said = handfuls.run(sequences, end=False)
    exits = {each.exit for each in (each for steps in said.values() for each in steps)}
    assert exits == {*ramps, NUM_BLOCKS - 1}
    _catch_up(model, sequences)
    for number, each in sequences.items():
        assert _distance(model, reference, number, each.tokens) < 1e-5
    _end(model)


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


@pytest.mark.parametrize("fill", ["compute", "copy"])
def test_answers_do_not_depend_on_batch_mates(model: EarlyExitModel, fill: Fill) -> None:
    backbone_of(model).fill = fill
    found = []
    for seed in range(3):
        sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
        said = Handfuls(model=model, policy=SOMETIMES, bounds=(0, 2, 5), ramps=(1, 2), seed=seed).run(sequences)
        found.append({number: [(each.chosen.token, each.exit) for each in steps] for number, steps in said.items()})
    backbone_of(model).fill = "compute"
    assert found[0] == found[1] == found[2]


def test_what_does_not_fit_the_store_fails_alone(reference: LlamaForCausalLM) -> None:
    model = decoder(reference, num_pages=4)
    Handfuls(model=model).run({1: sequence([1, 2], max_tokens=14)}, end=False)
    with pytest.raises(OverloadedError, match="1 pages are needed for keys and values, 0 of 4 are free"):
        Handfuls(model=model).run({2: sequence([1, 2], max_tokens=2)})
    backbone_of(model).end(1)
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


def _distance(model: EarlyExitModel, reference: LlamaForCausalLM, number: int, tokens: list[int]) -> float:
    cache = reference(torch.tensor([tokens]), use_cache=True).past_key_values
    held = [backbone_of(model).kv.held(block, number, len(tokens)) for block in range(NUM_BLOCKS)]
    return max(
        float((theirs[0].transpose(0, 1) - ours).abs().max())
        for layer, pair in zip(cache.layers, held, strict=True)
        for theirs, ours in zip((layer.keys, layer.values), pair, strict=True)
    )


def _end(model: EarlyExitModel) -> None:
    for number in backbone_of(model).kv.sequences:
        backbone_of(model).end(number)
