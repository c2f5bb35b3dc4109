"""One device: what it releases and when, two batches at once, sequences, and inputs that stay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from earlyexit.engine.device import Answered, Device, Failed, MemoryUse, Observed, Release, Survivors
from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.errors import OfframpError, OverloadedError, SequenceLostError
from earlyexit.network.boundary import Answer, Encoded, Split, WirePiece
from earlyexit.network.model import TorchRunner
from earlyexit.network.piece import Piece
from earlyexit.policies.threshold import EntropyPolicy
from tests.clock import ManualClock
from tests.earlyexit.engine.driver import Engine, TableTimes, begun, splits_of
from tests.earlyexit.engine.driver import member as waiting
from tests.earlyexit.engine.letters import (
    ALL_OF_THEM,
    Bench,
    FailsLater,
    FakeRunner,
    Letters,
    Part,
    member,
    members,
    one_split,
    start,
)
from tests.earlyexit.network.chains import spread
from tests.earlyexit.network.cuts import assert_same
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import wire_of


def test_answers_have_their_waiting_and_running_times() -> None:
    splits = [Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=2)]
    bench = Bench(splits, {0: [Part(1, 1, "a"), Part(2, 2, "")], 2: [Part(4, 4, ALL_OF_THEM)]})
    a, b, c, d = pieces = members("abcd")
    bench.engine.submit(0, pieces, 0.0)
    bench.clock.advance(0.5)
    bench.device.run_until_idle()
    # 0.5 [a b] 3.5 [c d] 6.5 [b c], which is full, 10.5 [d] 14.5
    assert (a.queue_s, a.compute_s) == (0.5, 1.0)
    assert (c.queue_s, c.compute_s) == (3.5, 7.0)
    assert (b.queue_s, b.compute_s) == (3.5, 7.0)
    assert (d.queue_s, d.compute_s) == (7.5, 7.0)


def test_a_late_input_fails_with_its_reason_and_is_not_run() -> None:
    bench = one_split([Part(1, 4, ALL_OF_THEM)], batch=1)
    bench.engine.submit(0, [member("a", deadline_s=5.0), member("b", deadline_s=5.0)], 0.0)
    bench.device.run(start(bench))
    bench.clock.advance(3.5)
    assert bench.device.start_next() is None
    assert bench.log == [
        "1.000 answer a after 3",
        "4.500 lost b deadline: the deadline could no longer be met, so the input was not run",
    ]
    assert bench.runner.runs == ["0:a"]


def test_a_bad_input_fails_alone_and_failures_in_a_row_are_counted() -> None:
    bench = one_split([Part(1, 4, ALL_OF_THEM)], poison="b")
    assert bench.run(members("abc")) == [
        "2.000 answer a after 3",
        "3.000 lost b execution: the model failed on this input: ValueError: poison",
        "4.000 answer c after 3",
    ]
    assert bench.runner.runs == ["0:abc", "0:a", "0:b", "0:c"]
    bench = one_split([Part(1, 4, ALL_OF_THEM)], poison="x")
    bench.run([member("x")])
    bench.run([member("x")])
    assert bench.device.failures_in_a_row == 2
    bench.run([member("b")])
    assert bench.device.failures_in_a_row == 0


def a_plan_comes(engine: BatchEngine[Letters], monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the engine host only blocks 0 and 1 as soon as survivors of a batch are prepared for the queue."""
    split = Letters.singles

    def singles(letters: Letters) -> list[Letters]:
        engine.follow([FIRST], "work-conserving")
        return split(letters)

    monkeypatch.setattr(Letters, "singles", singles)


# Probes


def test_probes_that_run_again_release_nothing_twice() -> None:
    bench = one_split([Part(1, 1, "a"), Part(1, 4, ALL_OF_THEM)])
    a, b = probes = members("ab", probe=True)
    assert bench.run(probes) == [
        "1.000 look a at 0, look b at 0, answer a after 0, stays",
        "2.000 look a at 3, look b at 3, answer a after 3, answer b after 3",
    ]
    assert (a.compute_s, b.compute_s) == (2.0, 2.0)
    parts = {0: [Part(1, 1, "ab"), Part(1, 4, ALL_OF_THEM)]}
    bench = Bench([Split(first=0, end=4, batch=4)], parts, "b", FailsLater)
    assert bench.run(members("abc", probe=True)) == [
        "1.000 look a at 0, look b at 0, look c at 0, answer a after 0, stays, answer b after 0, stays",
        "4.000 look a at 3, answer a after 3",
        "6.000 lost b execution: the model failed on this input: ValueError: too much",
        "8.000 look c at 3, answer c after 3",
    ]


# Two batches at once

WHOLE = Split(first=0, end=4, batch=4, ramps=(0, 1), overlap_below=2)


def overlapping(batch: int = 4) -> Engine:
    """An engine whose batches overlap as soon as fewer than two inputs remain inside."""
    return BatchEngine([replace(WHOLE, batch=batch)], TableTimes({0: 4.0, 2: 4.0}))


def test_seconds_of_a_shared_device_count_half() -> None:
    engine = overlapping(batch=1)
    engine.submit(0, [waiting(name) for name in "zyx"], 0.0)
    first, second = begun(engine), begun(engine, 4.0)
    assert engine.end(first, first_s=9.0, total_s=9.0, now_s=9.0) == 6.5, "beside another from 4 to 9 s"
    engine.leave(first, 9.0)
    assert engine.end(second, first_s=9.0, total_s=9.0, now_s=13.0) == 6.5
    engine.leave(second, 13.0)
    assert engine.end(begun(engine, 13.0), first_s=9.0, total_s=9.0, now_s=22.0) == 9.0
    assert [(run.batches, run.seconds, run.shared) for run in engine.times.runs()] == [(2, 13.0, True), (1, 9.0, False)]


def test_at_most_two_batches_run_and_the_running_batchs_plan_decides() -> None:
    engine = overlapping(batch=1)
    engine.submit(0, [waiting(name) for name in "zyxw"], 0.0)
    first, second = begun(engine), begun(engine)
    assert not engine.may_begin
    engine.leave(first, 2.0)
    assert (first.lane, second.lane, begun(engine, 2.0).lane) == (0, 1, 0)
    engine = overlapping()
    engine.submit(0, [waiting(name) for name in "zy"], 0.0)
    first = begun(engine)
    engine.follow([replace(WHOLE, overlap_below=None)], "work-conserving")
    engine.submit(0, [waiting(name) for name in "x"], 0.0)
    assert not engine.may_begin
    engine.shrink(first, 1)
    beside = begun(engine, 1.0)
    assert (beside.lane, beside.split.overlap_below) == (1, None)
    engine.leave(first, 2.0)
    assert not engine.may_begin  # the new plan's batch is alone, and says never


def test_filling_begins_only_full_batches_or_survivors_beside_a_running_one() -> None:
    splits = [Split(first=first, end=first + 2, batch=2, overlap_below=3) for first in (0, 2)]
    engine: Engine = BatchEngine(splits, TableTimes({0: 4.0, 2: 4.0}))
    engine.follow(splits, "filling")
    engine.submit(0, [waiting("z")], 0.0)
    begun(engine)
    engine.submit(0, [waiting("y")], 1.0)
    assert engine.begin(1.0).batch is None
    engine.submit(0, [waiting("x")], 2.0)
    beside = begun(engine, 2.0)
    assert [member.sample_id for member in beside.members] == ["y", "x"]
    engine.leave(beside, 3.0)
    engine.submit(2, [waiting("y")], 3.0)
    deeper = begun(engine, 3.0)
    assert deeper.split is splits[1]
    engine.leave(deeper, 4.0)
    engine.submit(0, [replace(waiting("w"), counts_as_full=True)], 4.0)
    assert [member.sample_id for member in begun(engine, 4.0).members] == ["w"]


def test_a_member_that_runs_again_shares_the_device_only_from_then_on() -> None:
    engine = overlapping(batch=1)
    engine.submit(0, [waiting(name) for name in "zyx"], 0.0)
    failing, beside = begun(engine), begun(engine)
    engine.leave(beside, 2.0)
    beside = begun(engine, 2.0)
    again = engine.again(failing, failing.members, 3.0)
    assert (again.started_s, again.lane) == (3.0, 0)
    assert engine.end(beside, first_s=None, total_s=3.0, now_s=5.0) == 1.5
    engine.leave(beside, 5.0)
    assert engine.end(again, first_s=None, total_s=4.0, now_s=7.0) == 4.0 - 2.0 / 2, "beside another from 3 to 5 s"


# Sequences

FIRST, LAST = Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=4, batch=4)


@dataclass
class FakeMemory:
    """A memory with room for some sequences, which records its calls."""

    room: int = 8
    num_tokens: dict[int, int] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        return [self._admit(sequence) for sequence in sequences]

    def end(self, sequence: int) -> None:
        self.num_tokens.pop(sequence, None)
        self.ended.append(sequence)

    def take_along(self, piece: Letters) -> Letters:
        return Letters(sample_ids=tuple(f"{name}+" for name in piece.sample_ids), next_block=piece.next_block)

    def use(self) -> MemoryUse:
        return MemoryUse(sequences=len(self.num_tokens))

    def _admit(self, sequence: int) -> OfframpError | None:
        if sequence not in self.num_tokens and len(self.num_tokens) == self.room:
            return OverloadedError("full", retry_after_s=1.0)
        self.num_tokens[sequence] = 1
        return None


class Scene:
    """A device of two splits; a, b, c belong to sequences 1, 2, 3. Ramp 1 lets a leave."""

    def __init__(self, *splits: Split, room: int = 8) -> None:
        self.clock = ManualClock()
        self.memory = FakeMemory(room)
        parts = {0: [Part(1.0, 2, "a")], 2: [Part(1.0, 4, ALL_OF_THEM)]}
        runner = FakeRunner(parts, self.clock, memory=self.memory)
        engine: BatchEngine[Letters] = BatchEngine(splits or (FIRST, LAST), TableTimes({0: 1.0, 2: 1.0}))
        self.released: list[Release[Letters]] = []
        self.device = Device(engine, runner, self.clock, self.released.extend)

    def submit(self, names: str) -> list[str]:
        """The inputs that are admitted."""
        wire = WirePiece(
            sample_ids=tuple(names), next_block=0, lengths_B=np.ones(len(names), np.int32), tensors=(), state_BS=None
        )
        members = [
            Member(sample_id=name, payload=Letters(sample_ids=(name,), next_block=0), sequence=1 + "abc".index(name))
            for name in names
        ]
        admitted = self.device.admit(wire, members)
        self.device.engine.submit(0, admitted, self.clock.now_s())
        return [member.sample_id for member in admitted]

    def batch(self) -> Batch[Letters]:
        batch = self.device.start_next()
        assert isinstance(batch, Batch)
        return batch

    def run_until_idle(self) -> None:
        """Covers a batch that waits a moment for the next steps of sequences that were just answered."""
        self.device.run_until_idle()
        while (choice := self.device.start_next()) is not None:
            assert isinstance(choice, float)
            self.clock.advance(choice - self.clock.now_s())
            self.device.run_until_idle()

    @property
    def answered(self) -> list[str]:
        return [each.answer.sample_id for each in self.released if isinstance(each, Answered)]

    @property
    def lost(self) -> list[tuple[str, type[OfframpError]]]:
        return [(each.member.sample_id, type(each.error)) for each in self.released if isinstance(each, Failed)]


def test_only_inputs_that_are_not_admitted_and_steps_of_ended_sequences_fail() -> None:
    scene = Scene(room=2)
    assert scene.submit("abc") == ["a", "b"]
    assert scene.lost == [("c", OverloadedError)]
    scene.run_until_idle()
    assert scene.answered == ["a", "b"]
    assert scene.memory.num_tokens.keys() == {1, 2}
    scene = Scene()
    scene.submit("ab")
    scene.device.end([2, 7])
    assert (scene.memory.ended, scene.lost) == ([2, 7], [("b", SequenceLostError)])
    scene.run_until_idle()
    assert scene.answered == ["a"]


def test_a_step_after_the_end_of_its_sequence_does_not_restart_it() -> None:
    """The sequence ended while a batch had its previous token. It is kept until then, but must not restart."""
    scene = Scene(FIRST)
    scene.submit("ab")
    batch = scene.batch()
    scene.device.end([1])
    assert scene.submit("ac") == ["c"]
    assert scene.lost == [("a", SequenceLostError)]
    scene.device.run(batch)
    scene.run_until_idle()
    assert scene.memory.num_tokens.keys() == {2, 3}


def test_a_survivor_of_an_ended_sequence_does_not_go_on() -> None:
    scene = Scene()
    scene.submit("bc")
    batch = scene.batch()
    scene.device.end([2])
    assert scene.memory.num_tokens.keys() == {2, 3}, "it is still in the device's hands"
    scene.device.run(batch)
    assert (set(scene.memory.num_tokens), scene.lost) == ({3}, [("b", SequenceLostError)])
    scene.run_until_idle()
    assert scene.answered == ["c"]


@pytest.mark.parametrize("before", [(FIRST,), (FIRST, replace(LAST, first=3))])
def test_sequences_end_if_a_plan_adds_blocks_that_have_not_seen_their_tokens(before: Sequence[Split]) -> None:
    scene = Scene(*before)
    scene.submit("ab")
    batch = scene.batch()
    scene.device.follow((replace(FIRST, end=4),), "work-conserving", None)
    scene.device.run(batch)
    assert (scene.answered, scene.lost) == (["a"], [("b", SequenceLostError)]), "b does not go on at block 2"
    assert scene.submit("bc") == ["c"], "its sender has not ended b yet"
    scene.device.end([2])
    assert scene.submit("b") == ["b"]


@pytest.mark.parametrize("hosted", [True, False])
def test_a_batch_whose_sequences_all_ended_has_no_survivors(hosted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.submit("bc")
    batch = scene.batch()
    scene.device.end([2, 3])
    if not hosted:
        a_plan_comes(scene.device.engine, monkeypatch)
    scene.device.run(batch)
    assert (set(scene.memory.num_tokens), len(scene.lost), len(scene.released)) == (set(), 2, 2)
    assert scene.device.start_next() is None


def test_the_next_token_of_an_answered_one_may_start_before_its_batch_is_over() -> None:
    """Other inputs of its batch run on: two batches use the sequence, which is freed after both."""
    scene = Scene(Split(first=0, end=4, batch=4, ramps=(1,), overlap_below=2))
    scene.submit("a")
    first = scene.batch()
    scene.submit("a")
    second = scene.batch()
    scene.device.end([1])
    scene.device.run(first)
    assert scene.memory.num_tokens.keys() == {1}
    scene.device.run(second)
    assert scene.memory.num_tokens.keys() == set()


def test_a_queued_step_of_an_ended_sequence_fails() -> None:
    scene, told = Scene(), list[str]()
    scene.device.wake = lambda: told.append("b may run")
    scene.submit("a")
    scene.device.run(scene.batch())
    scene.submit("b")
    assert isinstance(scene.device.start_next(), float), "the next step of a may come"
    scene.device.end([7])
    assert told == []
    scene.device.end([1])
    assert told == ["b may run"]
    assert [each.sample_id for each in scene.batch().members] == ["b"]


@pytest.mark.parametrize("later", [False, True], ids=["at the batch's end", "as a plan comes in between"])
def test_survivors_for_another_stage_take_waiting_tokens_along(later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene(*((FIRST, LAST) if later else (FIRST,)))
    a_plan_comes(scene.device.engine, monkeypatch)
    scene.submit("ab")
    scene.device.run(scene.batch())
    [going] = [each for each in scene.released if isinstance(each, Survivors)]
    assert going.piece.sample_ids == ("b+",)


# Inputs that stay after their answer


def staying(*splits: Split) -> list[Split]:
    return [replace(split, after_answer="stay") for split in splits]


@pytest.mark.parametrize("bounds", [(0, 4), (0, 2, 4), (0, 1, 2, 3, 4)], ids=str)
def test_all_exits_of_inputs_that_stay_are_observed(bounds: tuple[int, ...], encoded: list[Encoded]) -> None:
    runner = TorchRunner(spread(small()), EntropyPolicy({0: 0.8, 2: 0.8}))
    alone = first_answers(run_all(runner, [Split(first=0, end=4, batch=1, ramps=(0, 2))], encoded))
    plain = [replace(each, ramps=tuple({0, 2} & set(range(each.first, each.end)))) for each in splits_of(*bounds)]
    releases = run_all(runner, staying(*plain), encoded)
    first = first_answers(releases)
    assert_same(first, alone)
    assert {answer.exit for answer in first.values()} == {0, 2, 4 - 1}
    # Every input is answered early at most once, and leaves once: at the end.
    told = [release for release in releases if isinstance(release, Answered)]
    assert [release.answer.exit for release in told if not release.stays] == [4 - 1] * len(encoded)
    early = sum(answer.exit < 4 - 1 for answer in first.values())
    assert len(told) == len(encoded) + early
    seen = [(release.seen.sample_id, release.seen.exit) for release in releases if isinstance(release, Observed)]
    assert sorted(seen) == sorted((name, block) for name in alone for block in (0, 2, 4 - 1))


def first_answers(releases: Sequence[Release[Piece]]) -> dict[str, Answer]:
    told = [release.answer for release in releases if isinstance(release, Answered)]
    return {answer.sample_id: answer for answer in reversed(told)}


def run_all(runner: TorchRunner, splits: Sequence[Split], encoded: Sequence[Encoded]) -> list[Release[Piece]]:
    releases: list[Release[Piece]] = []
    device = Device(BatchEngine(splits, ObservedTimes()), runner, ManualClock(), releases.extend)
    singles = runner.from_wire(wire_of(encoded)).singles()
    device.engine.submit(0, [Member(sample_id=one.sample_ids[0], payload=one) for one in singles], 0.0)
    device.run_until_idle()
    assert not any(isinstance(release, Survivors) for release in releases)
    return releases
