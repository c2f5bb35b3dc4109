"""Answers of batches that tokens bound: those of every input alone, however a model is cut, whoever is beside."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from earlyexit.clock import ManualClock
from earlyexit.engine.device import Answered, Device, Release
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import Member
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.boundary import Answer, Encoded, Split
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.counting import PatiencePolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from tests.earlyexit.network.cuts import answers_alone, assert_same, every_bounds
from tests.earlyexit.network.tokens import wire_of

BUDGETS = (1, 33, None)
"""Tokens: every input alone, and a few; without any."""
POLICIES = {"entropy": EntropyPolicy(1.05), "confidence": ConfidencePolicy(0.4), "patience": PatiencePolicy(1)}


def splits_of(bounds: Sequence[int], tokens: int | None) -> tuple[Split, ...]:
    return tuple(
        Split(first=first, end=end, batch=7, tokens=tokens, ramps=tuple(r for r in (0, 1, 2) if first <= r < end))
        for first, end in pairwise(bounds)
    )


class Bench:
    """A device of the model; whatever else happens, every batch keeps to its budget."""

    def __init__(self, model: EarlyExitModel, policy: ExitPolicy, splits: Sequence[Split]) -> None:
        self.answers: dict[str, Answer] = {}
        self.runner = TorchRunner(model, policy)
        self.device: Device[Piece] = Device(
            BatchEngine(splits, ObservedTimes()), self.runner, ManualClock(), self.deliver, self.check
        )

    def submit(self, encoded: Sequence[Encoded], rng: random.Random) -> None:
        """In any order."""
        singles = self.runner.from_wire(wire_of(encoded)).singles()
        rng.shuffle(singles)
        members = [Member(sample_id=one.sample_ids[0], payload=one, tokens=int(one.lengths_B.sum())) for one in singles]
        self.device.engine.submit(0, members, 0.0)

    def run(self, batches: int) -> None:
        """So many of them."""
        for _ in range(batches):
            batch = self.device.start_next()
            assert isinstance(batch, Batch)
            self.device.requeue(self.device.run(batch))

    def deliver(self, releases: list[Release[Piece]]) -> None:
        for release in releases:
            assert isinstance(release, Answered)
            assert release.answer.sample_id not in self.answers
            self.answers[release.answer.sample_id] = release.answer

    def check(self, batch: Batch[Piece], seconds: float) -> None:
        assert len(batch.members) <= batch.split.batch
        assert batch.tokens == sum(int(each.payload.lengths_B.sum()) for each in batch.members)
        assert len(batch.members) == 1 or batch.split.tokens is None or batch.tokens <= batch.split.tokens


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
@pytest.mark.parametrize("tokens", BUDGETS)
def test_cuts_and_batch_mates_change_no_answer_of_batches_that_tokens_bound(
    tokens: int | None, policy: ExitPolicy, small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    expected = answers_alone(small_model, policy, encoded)
    for seed, bounds in enumerate(every_bounds(small_model.num_blocks)):
        bench = Bench(small_model, policy, splits_of(bounds, tokens))
        bench.submit(encoded, random.Random(seed))
        bench.device.run_until_idle()
        assert_same(bench.answers, expected, within=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_plans_that_begin_and_cease_to_count_tokens_change_no_answer(
    seed: int, small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    rng, policy = random.Random(seed), POLICIES["entropy"]
    expected = answers_alone(small_model, policy, encoded)
    plans = [splits_of(bounds, tokens) for bounds in ((0, 4), (0, 1, 4), (0, 2, 3, 4)) for tokens in (None, 25)]
    rng.shuffle(plans)
    bench = Bench(small_model, policy, plans[0])
    bench.submit(encoded, rng)
    for splits in plans[1:]:
        bench.run(1)
        bench.device.engine.follow(splits, "work-conserving")
    bench.device.run_until_idle()
    assert_same(bench.answers, expected, within=1e-4)
