"""A decoder whose blocks several replicas host, each with its own store, says what the unsplit one does."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from transformers import LlamaForCausalLM

from earlyexit.named import Fill
from earlyexit.network.boundary import Numbers, WirePiece, entering
from earlyexit.network.cut import Cut, cut_out
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.sequences.kv_memory import BEHIND, RUN
from earlyexit.sequences.sequence import TokenSequence
from tests.earlyexit.families.decoders import NUM_BLOCKS, Handfuls, backbone_of, decoder, hf_decoder, sequence
from tests.earlyexit.network.cuts import every_bounds, in_random_order

RAMPS = (1, 2)
SOMETIMES = ConfidencePolicy(0.4)
PROMPTS = ([7], [1, 200, 3], [9, 8, 7, 6, 5, 4, 3, 2, 1], [30, 31, 32, 33, 34])
Told = dict[int, list[tuple[int, int]]]
"""Of every sequence the tokens it said, and the block that each left after."""


@pytest.fixture(scope="module")
def reference() -> LlamaForCausalLM:
    return hf_decoder()


@pytest.fixture(scope="module")
def models(reference: LlamaForCausalLM) -> list[EarlyExitModel]:
    """One for every block that a stage may begin with."""
    return [decoder(reference) for _ in range(NUM_BLOCKS)]


def begun() -> dict[int, TokenSequence]:
    return {number: sequence(prompt, chunk=4) for number, prompt in enumerate(PROMPTS, 1)}


@dataclass
class Stages:
    """Replicas of one stage each, and an ingress that holds every sequence's next step."""

    models: Mapping[int, EarlyExitModel]
    """By their stage's first block."""
    cuts: Mapping[int, Cut]
    seed: int = 0
    hops: list[int] = field(default_factory=list)
    """Of every hop, how many rows came along."""
    arrived: list[tuple[int, int, int]] = field(default_factory=list)
    """Of every hop the sequence, and which of its tokens, from the first up to the last."""
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
            first: cut_out(models[first], first, end, tuple(r for r in RAMPS if first <= r < end), policy)
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
                assert isinstance(answer.value, Numbers)
                said = sequences[number].answered(answer.value.numpy(), answer.exit)
                told[number] += [] if said is None else [(said.chosen.token, said.exit)]
                if sequences[number].ended is None:
                    waiting[0].append(self._step_of(number, sequences[number]))
        return told

    def end(self, numbers: Mapping[int, object]) -> None:
        for model in self.models.values():
            for number in numbers:
                backbone_of(model).memory.end(number)

    def _step_of(self, number: int, each: TokenSequence) -> Piece:
        (piece,) = self._arrive(entering([str(number)], [each.step()]))
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
def test_stages_say_what_the_unsplit_model_does(
    models: list[EarlyExitModel], expected: Mapping[Fill, Told], bounds: tuple[int, ...], fill: Fill
) -> None:
    stages, sequences = Stages.of(models, bounds, fill, seed=len(bounds)), begun()
    assert stages.run(sequences) == expected[fill]
    if {2, 3} & set(bounds):  # behind a ramp
        assert sum(stages.hops) > 0, "tokens that left came along with later ones"
    stages.end(sequences)
    assert [backbone_of(model).kv.use.pages for model in models] == [0] * NUM_BLOCKS


def test_thresholds_fall_along_an_answer_wherever_it_is_cut(
    models: list[EarlyExitModel], expected: Mapping[Fill, Told]
) -> None:
    """A token's place in its answer hops along."""
    policy = ConfidencePolicy(SOMETIMES.thresholds, decay=3.0)
    backbone_of(models[0]).fill = "compute"
    said = Handfuls(model=models[0], policy=policy, ramps=RAMPS).run(begun())
    whole = {number: [(each.chosen.token, each.exit) for each in steps] for number, steps in said.items()}
    assert whole != expected["compute"], "a threshold alone would let other tokens leave"
    stages, sequences = Stages.of(models, (0, 2, 3, 5), "compute", policy=policy), begun()
    assert stages.run(sequences) == whole
    stages.end(sequences)


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM) -> Mapping[Fill, Told]:
    """By the unsplit model; both kinds of fills differ, and tokens leave everywhere."""
    found: dict[Fill, Told] = {}
    model = decoder(reference)
    fills: tuple[Fill, ...] = ("compute", "copy")
    for fill in fills:
        backbone_of(model).fill = fill
        said = Handfuls(model=model, policy=SOMETIMES, ramps=RAMPS).run(begun())
        found[fill] = {number: [(each.chosen.token, each.exit) for each in steps] for number, steps in said.items()}
    assert found["compute"] != found["copy"]
    assert {block for steps in found["compute"].values() for _, block in steps} == {*RAMPS, NUM_BLOCKS - 1}
    return found


def test_no_token_hops_twice(models: list[EarlyExitModel]) -> None:
    """A survivor brings what left since the last one, and nothing of what has hopped."""
    stages, sequences = Stages.of(models, (0, 3, 5), "compute"), begun()
    stages.run(sequences)
    for number in sequences:
        arrived = [(first, end) for each, first, end in stages.arrived if each == number]
        assert [first for first, _ in arrived] == [0, *(end for _, end in arrived)][: len(arrived)]
    assert max(end - first for _, first, end in stages.arrived) > 1
    stages.end(sequences)
