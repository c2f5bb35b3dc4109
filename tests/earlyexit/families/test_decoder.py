"""Decoders, with encoders and without: answers are those of `transformers`, however they are cut and begun."""

from __future__ import annotations

import random
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from earlyexit.named import Fill
from earlyexit.network.boundary import PackedArray, Segment, WirePiece, entry_piece
from earlyexit.network.checkpoint import load_pretrained
from earlyexit.network.model import Cut, EarlyExitModel, arbitrary_tensors, from_wire
from earlyexit.network.piece import Piece
from earlyexit.network.store import load_model, save_model
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.sequences.kv import BEHIND, RUN, Run
from earlyexit.sequences.sequence import TokenSequence, run_of, sequence_of
from tests.earlyexit.families.decoders import (
    NUM_BLOCKS,
    PROMPTS,
    SOMETIMES,
    Handfuls,
    backbone_of,
    decoder,
    held,
    hf_decoder,
    model_of,
    say,
    sequence,
)
from tests.earlyexit.families.encoder_decoders import KINDS, PAD, answers_of, hf_seq2seq, seq2seq
from tests.earlyexit.network.cuts import every_bounds, in_random_order
from tests.earlyexit.network.tokens import layout_of


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return hf_decoder()


@pytest.fixture(scope="module")
def model(reference: LlamaForCausalLM) -> EarlyExitModel:
    return decoder(reference)


def test_copies_are_of_the_state_at_the_exit(model: EarlyExitModel, reference: LlamaForCausalLM) -> None:
    backbone = backbone_of(model)
    backbone.fill = "copy"
    sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
    said = Handfuls(model=model, policy=SOMETIMES, bounds=(0, 3, 5), ramps=(1, 2)).run(sequences, end=False)
    for number, each in sequences.items():
        _see(model, number, each, each.tokens[-1:])
        assert backbone.memory.pending_blocks(Run(sequence=number, start=1000, length=1), 0, NUM_BLOCKS) == []
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
            assert (held(backbone.memory.kv, index, number, seen)[1][-1] - values).abs().max() < 1e-5
            checked += 1
    assert checked
    backbone.fill = "compute"
    for number in list(backbone.memory.kv._places):
        backbone.memory.end(number)


def test_warm_up_inputs_belong_to_no_sequence(model: EarlyExitModel) -> None:
    lengths_B = np.array([3, 1], dtype=np.int32)
    ids_N, run_B5 = arbitrary_tensors(model, 0, lengths_B, np.random.default_rng(0))
    assert run_B5.tolist() == [[0, 0, 0, 0, 0]] * 2
    _, outputs_BC = model.compute(Segment(first=0, end=NUM_BLOCKS, ramp=None), (ids_N, run_B5), layout_of(3, 1))
    assert outputs_BC is not None
    assert outputs_BC.isfinite().all()
    assert backbone_of(model).memory.use().sequences == 0


@pytest.mark.parametrize("number", [0, 1, 2**31 - 1, 2**31, 2**62 - 1])
def test_the_number_of_a_sequence_is_sent_in_two_halves(number: int) -> None:
    high, low, *others = np.array(run_of(number, 5, 9, 3), dtype=np.int32).tolist()
    assert (sequence_of(high, low), *others) == (number, 5, 9, 3)


RAMPS = (1, 2)
Told = dict[int, list[tuple[int, int]]]
"""The generated tokens of each sequence, and the block that each left after."""


@pytest.fixture(scope="module")
def models(reference: LlamaForCausalLM) -> list[EarlyExitModel]:
    """One model for each block that a stage may begin with."""
    return [decoder(reference) for _ in range(NUM_BLOCKS)]


def begun() -> dict[int, TokenSequence]:
    return {number: sequence(prompt, chunk=4) for number, prompt in enumerate(PROMPTS, 1)}


@dataclass
class Stages:
    """Replicas of one stage each, and an ingress that holds every sequence's next step."""

    models: Mapping[int, EarlyExitModel]
    """The models by the first block of their stage."""
    cuts: Mapping[int, Cut]
    seed: int = 0
    hops: list[int] = field(default_factory=list)
    """The number of rows that came along in each hop."""
    arrived: list[tuple[int, int, int]] = field(default_factory=list)
    """The sequence of each hop, and its first token and the one after its last."""
    policy: ExitPolicy = SOMETIMES

    @classmethod
    def of(
        cls,
        models: list[EarlyExitModel],
        bounds: tuple[int, ...],
        fill: Fill,
        seed: int = 0,
        policy: ExitPolicy = SOMETIMES,
    ) -> Stages:
        for model in models:
            backbone_of(model).fill = fill
        cuts = {
            first: Cut(models[first], first, end, tuple(r for r in RAMPS if first <= r < end), policy)
            for first, end in pairwise(bounds)
        }
        return cls({first: models[first] for first in cuts}, cuts, seed, policy=policy)

    def run(self, sequences: dict[int, TokenSequence]) -> Told:
        told: Told = {number: [] for number in sequences}
        for number, each in sequences.items():
            each.begin(number)
        waiting = {0: [self._step_of(number, each) for number, each in sequences.items()]}
        for step in in_random_order(self.cuts, waiting, self._goes_on, random.Random(self.seed)):
            for answer in step.answers:
                number = int(answer.sample_id)
                assert isinstance(answer.value, PackedArray)
                said = sequences[number].answered(answer.value.numpy(), answer.exit)
                told[number] += [] if said is None else [(said.token, said.exit)]
                if sequences[number].ended is None:
                    waiting[0].append(self._step_of(number, sequences[number]))
        return told

    def end(self, numbers: Mapping[int, object]) -> None:
        for model in self.models.values():
            for number in numbers:
                backbone_of(model).memory.end(number)

    def _step_of(self, number: int, each: TokenSequence) -> Piece:
        (piece,) = self._arrive(entry_piece([str(number)], [each.step()]))
        return piece

    def _goes_on(self, survivors: Piece) -> tuple[int, list[Piece]]:
        """Over the wire, from the replica that ran them to the one of their next block."""
        here = max(first for first in self.cuts if first < survivors.next_block)
        leaving = backbone_of(self.models[here]).memory.take_along(survivors)
        self.hops += (leaving.lengths_B - survivors.lengths_B).tolist()
        for name, length, run, behind in zip(
            leaving.sample_ids, leaving.lengths_B.tolist(), leaving.tensors[RUN], leaving.tensors[BEHIND], strict=True
        ):
            first = int(run[2] - behind)
            self.arrived.append((int(name), first, first + length))
        return survivors.next_block, self._arrive(leaving.to_wire())

    def _arrive(self, wire: WirePiece) -> list[Piece]:
        model = self.models[wire.next_block]
        errors = backbone_of(model).memory.admit(wire, [int(name) for name in wire.sample_ids])
        assert not any(errors)
        return from_wire(model, wire, self.policy).singles()


@pytest.mark.parametrize("bounds", every_bounds(NUM_BLOCKS), ids=str)
@pytest.mark.parametrize("fill", ["compute", "copy"])
def test_stages_answer_like_the_unsplit_model(
    models: list[EarlyExitModel], expected: Mapping[Fill, Told], bounds: tuple[int, ...], fill: Fill
) -> None:
    stages, sequences = Stages.of(models, bounds, fill, seed=len(bounds)), begun()
    assert stages.run(sequences) == expected[fill]
    if {2, 3} & set(bounds):  # behind a ramp
        assert sum(stages.hops) > 0, "tokens that left came along with later ones"
    stages.end(sequences)
    assert [backbone_of(model).memory.kv.use.pages for model in models] == [0] * NUM_BLOCKS


def test_thresholds_decay_under_any_cut(models: list[EarlyExitModel], expected: Mapping[Fill, Told]) -> None:
    """A token's place in its answer hops along."""
    policy = ConfidencePolicy(SOMETIMES.thresholds, decay=3.0)
    backbone_of(models[0]).fill = "compute"
    said = Handfuls(model=models[0], policy=policy, ramps=RAMPS).run(begun())
    whole = {number: [(each.token, each.exit) for each in steps] for number, steps in said.items()}
    assert whole != expected["compute"], "a threshold alone would let other tokens leave"
    stages, sequences = Stages.of(models, (0, 2, 3, 5), "compute", policy=policy), begun()
    assert stages.run(sequences) == whole
    stages.end(sequences)


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM) -> Mapping[Fill, Told]:
    """The tokens of the unsplit model: both kinds of fill differ, and tokens leave at every exit."""
    found: dict[Fill, Told] = {}
    model = decoder(reference)
    fills: tuple[Fill, ...] = ("compute", "copy")
    for fill in fills:
        backbone_of(model).fill = fill
        said = Handfuls(model=model, policy=SOMETIMES, ramps=RAMPS).run(begun())
        found[fill] = {number: [(each.token, each.exit) for each in steps] for number, steps in said.items()}
    assert found["compute"] != found["copy"]
    assert {block for steps in found["compute"].values() for _, block in steps} == {*RAMPS, NUM_BLOCKS - 1}
    return found


def test_no_token_hops_twice(models: list[EarlyExitModel]) -> None:
    """A survivor brings the rows that left since the last hop, and none that have hopped."""
    stages, sequences = Stages.of(models, (0, 3, 5), "compute"), begun()
    stages.run(sequences)
    for number in sequences:
        arrived = [(first, end) for each, first, end in stages.arrived if each == number]
        assert [first for first, _ in arrived] == [0, *(end for _, end in arrived)][: len(arrived)]
    assert max(end - first for _, first, end in stages.arrived) > 1
    stages.end(sequences)


SOURCES = ([7], [1, 200, 3], list(range(30, 60)), [30, 31, 32, 33, 34])
ANYHOW = [((0, 5), 64, 0, 1), ((0, 2, 5), 64, 1, 4), ((0, 1, 2, 3, 4, 5), 64, 2, 16), ((0, 3, 5), 1, 3, 5)]
"""Bounds of splits, the most tokens in one step, the seed of handfuls, and the tokens of a page."""


START = {"llama": None} | PAD
"""The token that answers start with; None for decoders without an encoder."""


@pytest.fixture(scope="module", params=("llama", *KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def theirs(kind: str) -> Any:
    return hf_decoder() if kind == "llama" else hf_seq2seq(kind)


def ours(theirs: Any) -> EarlyExitModel:
    return decoder(theirs) if theirs.config.model_type == "llama" else seq2seq(theirs)


@pytest.fixture(scope="module")
def answering(theirs: Any) -> EarlyExitModel:
    return ours(theirs)


@pytest.fixture(scope="module")
def greedily(theirs: Any, kind: str) -> list[list[int]]:
    return by_transformers(theirs, kind)


def by_transformers(theirs: Any, kind: str) -> list[list[int]]:
    """Twelve tokens of each answer, one at a time."""
    if kind != "llama":
        return answers_of(theirs, SOURCES, 12)
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    return [theirs.generate(torch.tensor([each]), **options)[0].tolist()[len(each) :] for each in SOURCES]


def sequences_of(kind: str, chunk: int = 64) -> dict[int, TokenSequence]:
    return {number: sequence(source, chunk=chunk, start=START[kind]) for number, source in enumerate(SOURCES, 1)}


def answers(sequences: dict[int, TokenSequence]) -> list[list[int]]:
    return [each.tokens[len(source) :] for each, source in zip(sequences.values(), SOURCES, strict=True)]


@pytest.mark.parametrize(("bounds", "chunk", "seed", "page_tokens"), ANYHOW, ids=str)
def test_greedy_tokens_are_those_of_transformers(
    answering: EarlyExitModel,
    kind: str,
    greedily: list[list[int]],
    bounds: tuple[int, ...],
    chunk: int,
    seed: int,
    page_tokens: int,
) -> None:
    backbone_of(answering).open_store(256 // page_tokens, page_tokens=page_tokens)
    sequences = sequences_of(kind, chunk)
    Handfuls(model=answering, bounds=bounds, seed=seed).run(sequences)
    assert answers(sequences) == greedily
    assert len({token for answer in greedily for token in answer}) > 4
    assert backbone_of(answering).memory.kv.free_pages == 256 // page_tokens


@pytest.mark.parametrize("chunk", [64, 3])
def test_a_restart_continues(answering: EarlyExitModel, kind: str, greedily: list[list[int]], chunk: int) -> None:
    begun = sequence(SOURCES[1], chunk=chunk, start=START[kind])
    said = greedily[1] if START[kind] is None else greedily[1][1:]
    say(begun, said[:7])
    Handfuls(model=answering).run({5: begun})
    assert begun.tokens == [*SOURCES[1], *greedily[1]]


@pytest.mark.parametrize("bounds", [(0, 5), (0, 2, 3, 5), (0, 1, 4, 5)], ids=str)
def test_skipped_blocks_get_the_keys_and_values_of_the_full_model(
    theirs: Any, kind: str, bounds: tuple[int, ...]
) -> None:
    answering = ours(theirs).double()  # in float32 rounding alone comes to 2e-5 of the largest on some processors
    backbone = backbone_of(answering)
    backbone.open_store(64)
    sequences = sequences_of(kind)
    handfuls = Handfuls(model=answering, policy=SOMETIMES, bounds=bounds, ramps=(1, 2))
    said = handfuls.run(sequences, end=False)
    assert {steps[0].exit for steps in said.values()} & {1, 2}, "a first token that leaves skips its source, too"
    assert {each.exit for steps in said.values() for each in steps} >= {1, NUM_BLOCKS - 1}
    for number, each in sequences.items():
        _see(answering, number, each, each.tokens[-1:])
        assert backbone.memory.pending_blocks(Run(sequence=number, start=1000, length=1), 0, NUM_BLOCKS) == []
        _see(answering, number + 10, each, each.tokens)
        for block in range(NUM_BLOCKS):
            filled, full = (held(backbone.memory.kv, block, of, len(each.tokens)) for of in (number, number + 10))
            for mine, its in zip(filled, full, strict=True):
                assert (mine - its).abs().max() < 1e-10 * its.abs().max()


@pytest.mark.parametrize("fill", ["compute", "copy"])
def test_answers_do_not_depend_on_other_inputs(answering: EarlyExitModel, kind: str, fill: Fill) -> None:
    backbone_of(answering).fill = fill
    found = []
    for seed in range(3):
        sequences = sequences_of(kind)
        said = Handfuls(model=answering, policy=SOMETIMES, bounds=(0, 2, 5), ramps=(1, 2), seed=seed).run(sequences)
        found.append({number: [(each.token, each.exit) for each in steps] for number, steps in said.items()})
    backbone_of(answering).fill = "compute"
    assert found[0] == found[1] == found[2]


def test_saved_models_are_equal(
    answering: EarlyExitModel, kind: str, greedily: list[list[int]], tmp_path: Path
) -> None:
    save_model(answering, tmp_path)
    loaded = load_model(tmp_path)
    backbone_of(loaded).open_store(64)
    sequences = sequences_of(kind)
    Handfuls(model=loaded).run(sequences)
    assert answers(sequences) == greedily


def test_a_checkpoint_is_read_with_its_settings(
    answering: EarlyExitModel, theirs: Any, kind: str, greedily: list[list[int]], tmp_path: Path
) -> None:
    theirs = deepcopy(theirs)
    theirs.config.tie_word_embeddings |= kind == "llama"  # its weights are not tied, whatever the configuration says
    settings = theirs.generation_config
    settings.decoder_start_token_id = None if kind == "llama" else 9
    settings.suppress_tokens, settings.bad_words_ids = [greedily[0][1]], [[greedily[1][2]]]
    expected = by_transformers(theirs, kind)
    settings.bad_words_ids += [[8, 9]]
    settings.update(repetition_penalty=1.5, forced_bos_token_id=0, forced_eos_token_id=0, min_length=0)
    theirs.save_pretrained(tmp_path)
    pretrained, family = load_pretrained(str(tmp_path))
    assert pretrained.ignored == ("forced_bos_token_id", "forced_eos_token_id", "repetition_penalty", "bad_words_ids")
    ours = answering.backbone.state_dict()
    assert all(values.equal(ours[name]) for name, values in pretrained.backbone.state_dict().items())
    sequences = {n: sequence(source, start=pretrained.start) for n, source in enumerate(SOURCES, 1)}
    Handfuls(model=model_of(pretrained, ramps=(1, 2), family=family)).run(sequences)
    assert answers(sequences) == expected != greedily


def _see(answering: EarlyExitModel, number: int, of: TokenSequence, tokens: list[int]) -> None:
    """Let all blocks see a sequence's last tokens, under a number, by which everything that waits is filled in."""
    backbone, count = backbone_of(answering), len(tokens)
    run_15 = torch.tensor([run_of(number, len(of.tokens) - count, of.limit, of.num_prompt)], dtype=torch.int32)
    layout = layout_of(count)
    with torch.inference_mode():
        embedded = backbone.embed((torch.tensor(tokens, dtype=torch.int32), run_15), layout)
        backbone.run_blocks(0, NUM_BLOCKS, embedded, layout)
