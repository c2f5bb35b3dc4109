"""Answers of a network with any cuts, and its uncut answers to every input alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

import pytest

from earlyexit.engine.device import Answered, Device, Release, Runner, Step
from earlyexit.engine.engine import BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.network.boundary import Answer, Encoded, Split
from earlyexit.network.model import Cut, EarlyExitModel, SegmentRunner, from_wire
from earlyexit.network.piece import Piece, fuse
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import exit_outputs
from tests.answers import label_of
from tests.clock import ManualClock
from tests.earlyexit.network.tokens import wire_of


def every_bounds(num_blocks: int) -> list[tuple[int, ...]]:
    """Returns all ways to cut so many blocks, uncut first: (0, 4), (0, 1, 4), ... (0, 1, 2, 3, 4)."""
    inner = (each for size in range(num_blocks) for each in combinations(range(1, num_blocks), size))
    return [(0, *each, num_blocks) for each in inner]


def piece_of(model: EarlyExitModel, policy: ExitPolicy, encoded: Sequence[Encoded]) -> Piece:
    """Inputs i0, i1, ... before block 0."""
    return from_wire(model, wire_of(encoded), policy)


def cuts_of(
    model: EarlyExitModel,
    policy: ExitPolicy,
    bounds: Sequence[int],
    ramps: Sequence[int] | None = None,
    segments: SegmentRunner | None = None,
) -> dict[int, Cut]:
    """The splits between the bounds, by their first block; all ramps active unless they are named."""
    active = model.ramp_indices if ramps is None else ramps
    return {
        first: Cut(model, first, end, tuple(ramp for ramp in active if first <= ramp < end), policy, segments)
        for first, end in pairwise(bounds)
    }


def answers_alone(
    model: EarlyExitModel, policy: ExitPolicy, encoded: Sequence[Encoded], *, ramps: Sequence[int] | None = None
) -> dict[str, Answer]:
    """Runs every input alone through the whole network."""
    (cut,) = cuts_of(model, policy, (0, model.num_blocks), ramps).values()
    pieces = piece_of(model, policy, encoded).singles()
    return {answer.sample_id: answer for piece in pieces for step in cut.run(piece) for answer in step.answers}


def answers_in_cuts(
    model: EarlyExitModel,
    policy: ExitPolicy,
    encoded: Sequence[Encoded],
    bounds: Sequence[int],
    *,
    seed: int = 0,
    over_the_wire: bool = True,
    segments: SegmentRunner | None = None,
    ramps: Sequence[int] | None = None,
) -> dict[str, Answer]:
    """Runs splits in random order on random subsets of the inputs that wait for them."""
    cuts = cuts_of(model, policy, bounds, ramps, segments=segments)
    answers: dict[str, Answer] = {}

    def goes_on(survivors: Piece) -> tuple[int, list[Piece]]:
        arrived = from_wire(model, survivors.to_wire(), policy) if over_the_wire else survivors
        return survivors.next_block, arrived.singles()

    waiting = {0: piece_of(model, policy, encoded).singles()}
    for step in in_random_order(cuts, waiting, goes_on, random.Random(seed)):
        assert not answers.keys() & {answer.sample_id for answer in step.answers}
        answers |= {answer.sample_id: answer for answer in step.answers}
    return answers


def in_random_order(
    cuts: Mapping[int, Cut],
    waiting: dict[int, list[Piece]],
    goes_on: Callable[[Piece], tuple[int, list[Piece]]],
    rng: random.Random,
) -> Iterator[Step[Piece]]:
    """Yields every step of cuts, by their first blocks, that run random subsets of the inputs that wait for them.

    The caller may let others wait between steps. `goes_on`: the block for which survivors wait then, and as what.
    """
    while blocks := [block for block, waits in waiting.items() if waits]:
        block = rng.choice(blocks)
        rng.shuffle(waiting[block])
        size = rng.randint(1, 6)
        batch, waiting[block] = waiting[block][:size], waiting[block][size:]
        survivors: Piece | None = None
        for step in cuts[block].run(fuse(batch)):
            survivors = step.survivors
            yield step
        if survivors is not None:
            to, arrived = goes_on(survivors)
            waiting.setdefault(to, []).extend(arrived)


def assert_same(answers: dict[str, Answer], expected: dict[str, Answer], *, within: float = 1e-5) -> None:
    """Checks that answers and exits are equal, and scores nearly."""
    assert answers.keys() == expected.keys()
    for name, answer in answers.items():
        assert answer.score == pytest.approx(expected[name].score, abs=within)
        assert replace(answer, score=0.0) == replace(expected[name], score=0.0)


def halves(model: EarlyExitModel, encoded: Sequence[Encoded]) -> ConfidencePolicy:
    """Returns the median confidence of every ramp as its threshold."""
    thresholds = {}
    for block, outputs_NC in exit_outputs(model, encoded).items():
        scores = sorted(model.task.score(outputs_NC).tolist())
        thresholds[block] = (scores[len(scores) // 2 - 1] + scores[len(scores) // 2]) / 2
    return ConfidencePolicy(thresholds)


def answers_of(runner: Runner[Piece], splits: Sequence[Split], piece: Piece) -> dict[str, tuple[int, int]]:
    """Returns the exit and the label of every input of a piece on a new device."""
    found: dict[str, tuple[int, int]] = {}

    def deliver(releases: list[Release[Piece]]) -> None:
        for release in releases:
            assert isinstance(release, Answered)
            assert release.answer.sample_id not in found
            found[release.answer.sample_id] = (release.answer.exit, label_of(release.answer))

    device = Device(BatchEngine(splits, ObservedTimes()), runner, ManualClock(), deliver)
    members = [Member(sample_id=one.sample_ids[0], payload=one) for one in piece.singles()]
    device.engine.submit(0, members, 0.0)
    device.run_until_idle()
    return found
