"""A device and what its network keeps of sequences: who is let in, and when it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from earlyexit.clock import ManualClock
from earlyexit.engine.device import Device
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import Member
from earlyexit.engine.release import Lost, Release, Survivors, Told
from earlyexit.errors import OfframpError, OverloadedError, SequenceLostError
from earlyexit.network.split import Split
from earlyexit.network.wire import WirePiece
from earlyexit.sequences.memory import MemoryUse
from tests.earlyexit.engine_driver import TableTimes
from tests.earlyexit.letters import EVERYONE, FakeRunner, Letters, Part

FIRST, LAST = Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=4, batch=4)


@dataclass
class FakeMemory:
    """Room for some sequences; notes what it is told."""

    room: int = 8
    kept: set[int] = field(default_factory=set)
    ended: list[int] = field(default_factory=list)

    def admit(self, wire: WirePiece, sequences: Sequence[int]) -> list[OfframpError | None]:
        return [self._admit(sequence) for sequence in sequences]

    def end(self, sequence: int) -> None:
        self.kept.discard(sequence)
        self.ended.append(sequence)

    def take_along(self, piece: Letters) -> Letters:
        return Letters(sample_ids=tuple(f"{name}+" for name in piece.sample_ids), next_block=piece.next_block)

    def use(self) -> MemoryUse:
        return MemoryUse(sequences=len(self.kept))

    def _admit(self, sequence: int) -> OfframpError | None:
        if sequence not in self.kept and len(self.kept) == self.room:
            return OverloadedError("full", retry_after_s=1.0)
        self.kept.add(sequence)
        return None


class Scene:
    """A device of two splits; a, b, c belong to sequences 1, 2, 3. Ramp 1 lets a leave."""

    def __init__(self, *splits: Split, room: int = 8) -> None:
        self.clock = ManualClock()
        self.memory = FakeMemory(room)
        parts = {0: [Part(1.0, 2, "a")], 2: [Part(1.0, 4, EVERYONE)]}
        runner = FakeRunner(parts, self.clock, memory=self.memory)
        engine: BatchEngine[Letters] = BatchEngine(splits or (FIRST, LAST), TableTimes({0: 1.0, 2: 1.0}))
        self.released: list[Release[Letters]] = []
        self.device = Device(engine, runner, self.clock, self.released.extend)

    def submit(self, names: str) -> list[str]:
        """Who is let in."""
        wire = WirePiece(
            sample_ids=tuple(names),
            next_block=0,
            lengths_B=np.ones(len(names), np.int32),
            tensors=(),
            state_BS=None,
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
        """Also when a batch waits a moment for the next steps of sequences that were just answered."""
        self.device.run_until_idle()
        while (choice := self.device.start_next()) is not None:
            assert isinstance(choice, float)
            self.clock.advance(choice - self.clock.now_s())
            self.device.run_until_idle()

    @property
    def answered(self) -> list[str]:
        return [each.answer.sample_id for each in self.released if isinstance(each, Told)]

    @property
    def lost(self) -> list[tuple[str, type[OfframpError]]]:
        return [(each.member.sample_id, type(each.error)) for each in self.released if isinstance(each, Lost)]


def test_whom_the_network_does_not_take_is_lost_and_nobody_else() -> None:
    scene = Scene(room=2)
    assert scene.submit("abc") == ["a", "b"]
    assert scene.lost == [("c", OverloadedError)]
    scene.run_until_idle()
    assert scene.answered == ["a", "b"]
    assert scene.memory.kept == {1, 2}


def test_a_sequence_that_nobody_computes_goes_at_once_and_what_is_queued_of_it_is_lost() -> None:
    scene = Scene()
    scene.submit("ab")
    scene.device.end([2, 7])
    assert (scene.memory.ended, scene.lost) == ([2, 7], [("b", SequenceLostError)])
    scene.run_until_idle()
    assert scene.answered == ["a"]


def test_what_is_kept_of_a_sequence_stays_until_its_batch_is_over() -> None:
    scene = Scene(FIRST)
    scene.submit("ab")
    batch = scene.batch()
    scene.device.end([1])
    assert scene.memory.kept == {1, 2}
    scene.device.run(batch)
    assert scene.memory.ended == [1]


def test_a_step_that_comes_in_behind_the_end_of_its_sequence_does_not_begin_it_anew() -> None:
    """Its caller left while a batch still had the token before: kept until that batch is over, it may not come back."""
    scene = Scene(FIRST)
    scene.submit("ab")
    batch = scene.batch()
    scene.device.end([1])
    assert scene.submit("ac") == ["c"]
    assert scene.lost == [("a", SequenceLostError)]
    scene.device.run(batch)
    scene.run_until_idle()
    assert scene.memory.kept == {2, 3}


def test_a_survivor_of_a_sequence_that_was_ended_meanwhile_does_not_go_on() -> None:
    scene = Scene()
    scene.submit("bc")
    coming_back = scene.device.run(scene.batch())
    scene.device.end([2])
    assert scene.memory.kept == {2, 3}, "it is still in the device's hands"
    scene.device.requeue(coming_back)
    assert (scene.memory.kept, scene.lost) == ({3}, [("b", SequenceLostError)])
    scene.run_until_idle()
    assert scene.answered == ["c"]


@pytest.mark.parametrize("hosted", [True, False])
def test_where_nobody_of_a_batch_goes_on_nobody_is_asked_for(hosted: bool) -> None:
    scene = Scene()
    scene.submit("bc")
    coming_back = scene.device.run(scene.batch())
    scene.device.end([2, 3])
    if not hosted:
        scene.device.engine.follow([FIRST], "work-conserving")
    scene.device.requeue(coming_back)
    assert (scene.memory.kept, len(scene.lost), len(scene.released)) == (set(), 2, 2)
    assert scene.device.start_next() is None


def test_a_token_that_was_answered_may_be_followed_before_its_batch_is_over() -> None:
    """Its batch-mates run on: the sequence is in hand twice, and goes when both batches are over."""
    scene = Scene(Split(first=0, end=4, batch=4, ramps=(1,), overlap_below=2))
    scene.submit("a")
    first = scene.batch()
    scene.submit("a")
    second = scene.batch()
    scene.device.end([1])
    scene.device.run(first)
    assert scene.memory.kept == {1}
    scene.device.run(second)
    assert scene.memory.kept == set()


def test_who_waits_for_a_step_of_a_sequence_that_is_over_is_told() -> None:
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
def test_survivors_that_go_elsewhere_take_along_what_waits_for_them(later: bool) -> None:
    scene = Scene(*((FIRST, LAST) if later else (FIRST,)))
    scene.submit("ab")
    coming_back = scene.device.run(scene.batch())
    scene.device.engine.follow([FIRST], "work-conserving")
    scene.device.requeue(coming_back)
    [going] = [each for each in scene.released if isinstance(each, Survivors)]
    assert going.piece.sample_ids == ("b+",)
