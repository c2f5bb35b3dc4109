"""Networks that generate equal those of `transformers`, however they are cut and whichever inputs run beside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from earlyexit.named import Fill
from earlyexit.network.checkpoint import load_pretrained, start_of
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from earlyexit.sequences.sequence import TokenSequence, run_of
from tests.earlyexit.families.decoders import (
    NUM_BLOCKS,
    SOMETIMES,
    Handfuls,
    backbone_of,
    decoder,
    hf_decoder,
    say,
    sequence,
)
from tests.earlyexit.families.encoder_decoders import KINDS, PAD, answers_of, hf_seq2seq, seq2seq
from tests.earlyexit.network.tokens import layout_of

SOURCES = ([7], [1, 200, 3], list(range(30, 60)), [30, 31, 32, 33, 34])
ANYHOW = [((0, 5), 64, 0, 1), ((0, 2, 5), 64, 1, 4), ((0, 1, 2, 3, 4, 5), 64, 2, 16), ((0, 3, 5), 1, 3, 5)]
"""Where it is cut, the most tokens in one step, which sequences run together, and the tokens of a page."""


START = {"llama": None} | PAD
"""The token that answers start with; None for decoders without an encoder."""


@pytest.fixture(scope="module", params=("llama", *KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def reference(kind: str) -> Any:
    return hf_decoder() if kind == "llama" else hf_seq2seq(kind)


def ours(reference: Any) -> EarlyExitModel:
    return decoder(reference) if reference.config.model_type == "llama" else seq2seq(reference)


@pytest.fixture(scope="module")
def model(reference: Any) -> EarlyExitModel:
    return ours(reference)


@pytest.fixture(scope="module")
def expected(reference: Any, kind: str) -> list[list[int]]:
    """Twelve tokens of each answer, by `transformers`, one at a time."""
    if kind != "llama":
        return answers_of(reference, SOURCES, 12)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [reference.generate(torch.tensor([each]), **options)[0].tolist()[len(each) :] for each in SOURCES]


def sequences_of(kind: str, chunk: int = 64) -> dict[int, TokenSequence]:
    return {number: sequence(source, chunk=chunk, start=START[kind]) for number, source in enumerate(SOURCES, 1)}


def answers(sequences: dict[int, TokenSequence]) -> list[list[int]]:
    return [each.tokens[len(source) :] for each, source in zip(sequences.values(), SOURCES, strict=True)]


@pytest.mark.parametrize(("bounds", "chunk", "seed", "page_tokens"), ANYHOW, ids=str)
def test_greedy_tokens_are_those_of_transformers(
    model: EarlyExitModel,
    kind: str,
    expected: list[list[int]],
    bounds: tuple[int, ...],
    chunk: int,
    seed: int,
    page_tokens: int,
) -> None:
    backbone_of(model).open_store(256 // page_tokens, page_tokens=page_tokens)
    sequences = sequences_of(kind, chunk)
    Handfuls(model=model, bounds=bounds, seed=seed).run(sequences)
    assert answers(sequences) == expected
    assert len({token for answer in expected for token in answer}) > 4
    assert backbone_of(model).memory.kv.free_pages == 256 // page_tokens


@pytest.mark.parametrize("chunk", [64, 3])
def test_one_that_begins_anew_goes_on(model: EarlyExitModel, kind: str, expected: list[list[int]], chunk: int) -> None:
    begun = sequence(SOURCES[1], chunk=chunk, start=START[kind])
    said = expected[1] if START[kind] is None else expected[1][1:]
    say(begun, said[:7])
    Handfuls(model=model).run({5: begun})
    assert begun.tokens == [*SOURCES[1], *expected[1]]


@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 3, 5), (0, 1, 4, 5)], ids=str)
def test_blocks_that_a_token_skipped_come_to_hold_of_it_and_of_the_source_what_the_full_model_does(
    reference: Any, kind: str, bounds: tuple[int, ...]
) -> None:
    model = ours(reference).double()  # in float32 rounding alone comes to 2e-5 of the largest on some processors
    backbone = backbone_of(model)
    backbone.open_store(64)
    sequences = sequences_of(kind)
    handfuls = Handfuls(model=model, policy=SOMETIMES, bounds=bounds, ramps=(1, 2))
    said = handfuls.run(sequences, end=False)
    assert {steps[0].exit for steps in said.values()} & {1, 2}, "a first token that leaves skips its source, too"
    assert {each.exit for steps in said.values() for each in steps} >= {1, NUM_BLOCKS - 1}
    for number, each in sequences.items():
        _see(model, number, each, each.tokens[-1:])
        assert backbone.memory.pending.num_waiting(number) == 0
        _see(model, number + 10, each, each.tokens)
        for block in range(NUM_BLOCKS):
            filled, full = (backbone.memory.kv.held(block, of, len(each.tokens)) for of in (number, number + 10))
            for mine, its in zip(filled, full, strict=True):
                assert (mine - its).abs().max() < 1e-10 * its.abs().max()


@pytest.mark.parametrize("fill", ["compute", "copy"])
def test_answers_do_not_depend_on_batch_mates(model: EarlyExitModel, kind: str, fill: Fill) -> None:
    backbone_of(model).fill = fill
    found = []
    for seed in range(3):
        sequences = sequences_of(kind)
        said = Handfuls(model=model, policy=SOMETIMES, bounds=(0, 2, 5), ramps=(1, 2), seed=seed).run(sequences)
        found.append({number: [(each.chosen.token, each.exit) for each in steps] for number, steps in said.items()})
    backbone_of(model).fill = "compute"
    assert found[0] == found[1] == found[2]


def test_saved_models_answer_alike(model: EarlyExitModel, kind: str, expected: list[list[int]], tmp_path: Path) -> None:
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    backbone_of(loaded).open_store(64)
    sequences = sequences_of(kind)
    Handfuls(model=loaded).run(sequences)
    assert answers(sequences) == expected


def test_a_checkpoints_folder_is_read_and_says_what_answers_start_with(
    model: EarlyExitModel, reference: Any, kind: str, tmp_path: Path
) -> None:
    reference.save_pretrained(tmp_path)
    pretrained, family = load_pretrained(str(tmp_path))
    assert family == model.info.family
    assert start_of(str(tmp_path)) == START[kind]
    ours = model.backbone.state_dict()
    assert all(values.equal(ours[name]) for name, values in pretrained.backbone.state_dict().items())
    assert pretrained.head is not None


def _see(model: EarlyExitModel, number: int, of: TokenSequence, tokens: list[int]) -> None:
    """Let all blocks see a sequence's last tokens, under a number."""
    backbone, count = backbone_of(model), len(tokens)
    run_15 = torch.tensor([run_of(number, len(of.tokens) - count, of.limit, of.num_prompt)], dtype=torch.int32)
    layout = layout_of(count)
    with torch.inference_mode():
        embedded = backbone.embed((torch.tensor(tokens, dtype=torch.int32), run_15), layout)
        backbone.run_blocks(0, NUM_BLOCKS, embedded, layout)
