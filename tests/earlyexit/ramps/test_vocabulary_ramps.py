"""Ramps that share a decoder's vocabulary head, and policies that decide before it is computed."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open
from torch import Tensor

from earlyexit.errors import PlanError
from earlyexit.families.decoder import Llama
from earlyexit.network.cut import cut_out
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, fuse
from earlyexit.network.store import WEIGHTS_FILE, load_model, save_model
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.foresight import ForeseenPolicy, SimilarPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.ramps import RampStyle
from earlyexit.ramps.vocabulary import VocabularyHead
from tests.earlyexit.families.decoders import (
    NUM_BLOCKS,
    PROMPTS,
    VOCABULARY,
    Handfuls,
    backbone_of,
    decoder,
    hf_decoder,
    model_of,
    sequence,
)

RAMPS = (1, 2)


def sharing(style: RampStyle) -> EarlyExitModel:
    """The small decoder with the embedding's weights in its head, and ramps at random."""
    return model_of(Llama().from_transformers(hf_decoder(tie_word_embeddings=True)), ramps=RAMPS, style=style, seed=5)


def exits_of(model: EarlyExitModel, policy: ExitPolicy, bounds: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Of every token: its sequence, itself, the block it left after."""
    sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
    said = Handfuls(model=model, policy=policy, bounds=bounds, ramps=RAMPS).run(sequences)
    return [(number, each.chosen.token, each.exit) for number, steps in said.items() for each in steps]


@pytest.mark.parametrize("style", ["normed", "adapted"])
def test_a_shared_vocabulary_is_kept_once(tmp_path: Path, style: RampStyle) -> None:
    model = sharing(style)
    save_model(model, tmp_path)
    with safe_open(tmp_path / WEIGHTS_FILE, "pt") as file:
        vocabularies = [name for name in file.keys() if VOCABULARY in file.get_slice(name).get_shape()]  # noqa: SIM118
    assert vocabularies == ["backbone.word.weight"]
    loaded = load_model(tmp_path)
    assert isinstance(loaded.head, VocabularyHead)
    assert loaded.head.classifier.weight is backbone_of(loaded).word.weight
    backbone_of(loaded).open_store(64, page_tokens=4)
    policy = ConfidencePolicy(0.02)
    assert exits_of(loaded, policy, (0, NUM_BLOCKS)) == exits_of(model, policy, (0, NUM_BLOCKS))


@pytest.mark.parametrize(
    "policy", [ForeseenPolicy({1: 0.52, 2: 0.5}), SimilarPolicy({1: 0.72, 2: 0.85})], ids=["foreseen", "similar"]
)
@pytest.mark.parametrize("bounds", [(0, 1, 5), (0, 2, 5), (0, 2, 3, 5)], ids=str)
def test_what_decides_before_the_vocabulary_is_the_same_in_cuts(policy: ExitPolicy, bounds: tuple[int, ...]) -> None:
    model = sharing("adapted")
    found = exits_of(model, policy, bounds)
    assert found == exits_of(model, policy, (0, NUM_BLOCKS))
    assert {exit_block for *_, exit_block in found} == {*RAMPS, NUM_BLOCKS - 1}


@pytest.mark.parametrize("end", [3, NUM_BLOCKS], ids=["in the middle", "to the end"])
def test_the_vocabulary_is_computed_once_of_all_who_leave_a_batch(monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    model, rows = sharing("normed"), list[int]()

    def counted(head: VocabularyHead, gathered: Tensor, compute: object = VocabularyHead.classify) -> Tensor:
        rows.append(len(gathered))
        return compute(head, gathered)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(VocabularyHead, "classify", counted)
    cut = cut_out(model, 0, end, RAMPS, ForeseenPolicy({1: 0.52, 2: 0.5}))
    *before, last = cut.run(fuse(first_steps(model)))
    assert not [answer for step in before for answer in step.answers]
    staying = 0 if last.survivors is None else len(last.survivors)
    assert rows == [len(last.answers)] == [len(PROMPTS) - staying]
    assert len({answer.exit for answer in last.answers}) > 1


def first_steps(model: EarlyExitModel) -> list[Piece]:
    """Of every prompt."""
    sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
    for number, each in sequences.items():
        each.begin(number)
    return [Handfuls(model=model)._piece(number, each) for number, each in sequences.items()]


def test_every_ramp_looks_at_probes_and_says_what_it_decides_by() -> None:
    model, policy = sharing("normed"), ForeseenPolicy(2.0)
    cut = cut_out(model, 0, NUM_BLOCKS, (), policy).for_probes()
    seen = [each for step in cut.run(first_steps(model)[1]) for each in step.seen]
    assert [each.block for each in seen] == [*RAMPS, NUM_BLOCKS - 1]
    assert all(0 < each.score < 1 for each in seen[:-1])


def test_policies_that_ask_before_outputs_refuse_ramps_that_cannot_say() -> None:
    plain = decoder(hf_decoder())
    with pytest.raises(PlanError, match="block 0 has none"):
        SimilarPolicy(0.5).check_ramps((0, 1))
    with pytest.raises(PlanError, match=r"asks a ramp's classifier, and ramps \[1, 2\] have none"):
        cut_out(plain, 0, NUM_BLOCKS, RAMPS, ForeseenPolicy(0.5))
