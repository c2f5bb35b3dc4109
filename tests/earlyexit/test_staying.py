"""Inputs that run on when they are answered: on a device, in the engine's queues, and through a real model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from earlyexit.clock import ManualClock
from earlyexit.engine.device import Device
from earlyexit.engine.engine import BatchEngine
from earlyexit.engine.queue import Member
from earlyexit.engine.release import Observed, Release, Survivors, Told
from earlyexit.engine.runner import TorchRunner
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece
from earlyexit.network.split import Split
from earlyexit.network.wire import Answer, Encoded
from earlyexit.policies.threshold import EntropyPolicy
from tests.earlyexit.cuts import assert_same
from tests.earlyexit.letters import EVERYONE, Bench, Part, members
from tests.earlyexit.test_cut import NUM_BLOCKS, model
from tests.earlyexit.test_engine_live import splits_of
from tests.earlyexit.tokens import wire_of

__all__ = ["model"]
"""The fixture: four blocks whose exits disagree."""


def staying(*splits: Split) -> list[Split]:
    return [replace(split, after_answer="stay") for split in splits]


def halves() -> Bench:
    """Batches of two; ramps after blocks 0 and 2 are on; a leaves at the first, a and b at the second."""
    splits = staying(Split(first=0, end=2, batch=2, ramps=(0,)), Split(first=2, end=4, batch=2, ramps=(2,)))
    return Bench(splits, {0: [Part(1, 1, "a"), Part(1, 2, "")], 2: [Part(1, 3, "ab"), Part(1, 4, EVERYONE)]})


def test_answers_leave_and_inputs_run_on_in_full_batches_seen_by_the_active_ramps_and_the_end() -> None:
    bench = halves()
    assert bench.run(members("abc")) == [
        "1.000 look a at 0, look b at 0, answer a after 0, stays",
        "3.000 look a at 2, look b at 2, answer b after 2, stays",  # a is not answered twice
        "4.000 look a at 3, look b at 3, answer a after 3, answer b after 3",
        "5.000 look c at 0",
        "7.000 look c at 2",
        "8.000 look c at 3, answer c after 3",
    ]
    assert bench.runner.runs == ["0:ab", "2:ab", "0:c", "2:c"]


def test_a_probe_among_them_is_seen_by_every_ramp_and_waits_for_nobody() -> None:
    bench = halves()
    assert bench.run([*members("b"), *members("x", probe=True)]) == [
        "1.000 look x at 0",
        "2.000 look x at 1",
        "3.000 look x at 2",
        "4.000 look x at 3, answer x after 3",
        "5.000 look b at 0",
        "7.000 look b at 2, answer b after 2, stays",
        "8.000 look b at 3, answer b after 3",
    ]


def test_who_stayed_goes_on_elsewhere_with_the_others() -> None:
    bench = Bench(staying(Split(first=0, end=2, batch=4, ramps=(1,))), {0: [Part(1, 2, "a")]})
    assert bench.run(members("ab")) == [
        "1.000 look a at 1, look b at 1, answer a after 1, stays",
        "1.000 goes on 2:[a b]",
    ]


@pytest.mark.parametrize("bounds", [(0, 4), (0, 2, 4), (0, 1, 2, 3, 4)], ids=str)
def test_first_answers_are_those_of_inputs_that_stop_and_everything_on_their_way_is_seen(
    bounds: tuple[int, ...], model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    runner = TorchRunner(model, EntropyPolicy({0: 0.8, 2: 0.8}))
    alone = first_answers(run_all(runner, [Split(first=0, end=NUM_BLOCKS, batch=1, ramps=(0, 2))], encoded))
    plain = [replace(each, ramps=tuple({0, 2} & set(range(each.first, each.end)))) for each in splits_of(*bounds)]
    releases = run_all(runner, staying(*plain), encoded)
    first = first_answers(releases)
    assert_same(first, alone)
    assert {answer.exit for answer in first.values()} == {0, 2, NUM_BLOCKS - 1}
    # Every input is answered early at most once, and leaves once: at the end.
    told = [release for release in releases if isinstance(release, Told)]
    assert [release.answer.exit for release in told if not release.stays] == [NUM_BLOCKS - 1] * len(encoded)
    early = sum(answer.exit < NUM_BLOCKS - 1 for answer in first.values())
    assert len(told) == len(encoded) + early
    seen = [(release.seen.sample_id, release.seen.block) for release in releases if isinstance(release, Observed)]
    assert sorted(seen) == sorted((name, block) for name in alone for block in (0, 2, NUM_BLOCKS - 1))


def first_answers(releases: Sequence[Release[Piece]]) -> dict[str, Answer]:
    told = [release.answer for release in releases if isinstance(release, Told)]
    return {answer.sample_id: answer for answer in reversed(told)}


def run_all(runner: TorchRunner, splits: Sequence[Split], encoded: Sequence[Encoded]) -> list[Release[Piece]]:
    releases: list[Release[Piece]] = []
    device = Device(BatchEngine(splits, ObservedTimes()), runner, ManualClock(), releases.extend)
    singles = runner.from_wire(wire_of(encoded)).singles()
    device.engine.submit(0, [Member(sample_id=one.sample_ids[0], payload=one) for one in singles], 0.0)
    device.run_until_idle()
    assert not any(isinstance(release, Survivors) for release in releases)
    return releases
