from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from earlyexit.network.boundary import Answer, Encoded, Seen
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece, fuse
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy, ThresholdPolicy
from tests.earlyexit.network.cuts import answers_alone, assert_same, cuts_of, piece_of
from tests.earlyexit.network.test_cut import BOUNDS, NUM_BLOCKS, RAMPS, each_policy, model

__all__ = ["model"]
"""The fixture: four blocks whose exits disagree."""


@dataclass
class Probed:
    """What probes said on their way."""

    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    """All of an input, in their order."""
    seen: dict[tuple[str, int], Seen] = field(default_factory=dict)

    @property
    def first_answers(self) -> dict[str, Answer]:
        return {sample_id: answers[0] for sample_id, answers in self.answers.items()}


def probe(
    model: EarlyExitModel,
    policy: ExitPolicy,
    encoded: Sequence[Encoded],
    bounds: Sequence[int],
    ramps: Sequence[int] = RAMPS,
) -> Probed:
    """Every input as a probe, through the splits one after the other, in random handfuls."""
    rng = random.Random(1)
    probed = Probed()
    waiting = piece_of(model, policy, encoded).singles()
    for cut in cuts_of(model, policy, bounds, ramps).values():
        rng.shuffle(waiting)
        survivors: list[Piece] = []
        while waiting:
            size = rng.randint(1, 6)
            batch, waiting = fuse(waiting[:size]), waiting[size:]
            for step in cut.for_probes().run(batch):
                inside = step.survivors
                assert (inside is None) == (step.seen[0].block == NUM_BLOCKS - 1 if step.seen else False)
                assert inside is None or inside.sample_ids == batch.sample_ids
                for answer in step.answers:
                    probed.answers[answer.sample_id].append(answer)
                for seen in step.seen:
                    assert (seen.sample_id, seen.block) not in probed.seen
                    probed.seen[seen.sample_id, seen.block] = seen
            survivors += inside.singles() if inside is not None else []
        waiting = survivors
    return probed


@each_policy
def test_a_probe_s_first_answer_is_that_of_any_other_input(
    make_policy: Callable[[], ExitPolicy], model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    policy = make_policy()
    plain = answers_alone(model, policy, encoded)
    for bounds in BOUNDS:
        assert_same(probe(model, policy, encoded, bounds).first_answers, plain)


@pytest.mark.parametrize("active", [(), (1,), (0, 2)], ids=["none active", "one active", "two active"])
def test_ramps_that_are_not_active_look_and_decide_nothing(
    active: tuple[int, ...], model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    policy = EntropyPolicy(dict.fromkeys(active, 0.8))
    for bounds in BOUNDS:
        probed = probe(model, policy, encoded, bounds, active)
        assert {answer.exit for answer in probed.first_answers.values()} == {*active, NUM_BLOCKS - 1}
        assert set(probed.seen) == {(f"i{k}", block) for k in range(24) for block in range(NUM_BLOCKS)}


@each_policy
def test_every_probe_is_answered_at_the_model_s_end_as_well(
    make_policy: Callable[[], ExitPolicy], model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    probed = probe(model, make_policy(), encoded, (0, NUM_BLOCKS))
    assert {answers[-1].exit for answers in probed.answers.values()} == {NUM_BLOCKS - 1}
    assert {len(answers) for answers in probed.answers.values()} == {1, 2}


@pytest.mark.parametrize("make", [EntropyPolicy, ConfidencePolicy], ids=["entropy", "confidence"])
def test_what_is_seen_is_what_the_policy_compares_with_its_threshold(
    make: Callable[[float], ThresholdPolicy], model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    policy = make(0.7)
    probed = probe(model, policy, encoded, (0, 2, NUM_BLOCKS))
    for sample_id, answer in answers_alone(model, policy, encoded).items():
        sure = [
            ramp for ramp in RAMPS if policy.is_sure(ramp, torch.tensor([probed.seen[sample_id, ramp].score])).item()
        ]
        assert answer.exit == min([*sure, NUM_BLOCKS - 1])
        assert answer.value == probed.seen[sample_id, answer.exit].value
        assert math.isnan(probed.seen[sample_id, NUM_BLOCKS - 1].score)
