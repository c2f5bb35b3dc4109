"""Two batches at once on a device's two threads; the test releases each step."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import pytest

from earlyexit.clock import MonotonicClock
from earlyexit.engine.device import Answered, Device, DeviceThreads, Failed, Release, Step, Survivors
from earlyexit.engine.engine import Batch, BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.network.boundary import Answer, Split
from earlyexit.network.model import TorchRunner
from earlyexit.network.piece import Piece
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.engine.letters import ALL_OF_THEM, FakeRunner, Letters, Part, member, members
from tests.earlyexit.network.cuts import answers_alone, assert_same, piece_of
from tests.earlyexit.tasks.maps import STREET, encoded_images, model_of_maps

WHOLE = Split(first=0, end=4, batch=4, ramps=(0,), overlap_below=2)
PARTS = {0: [Part(0, 1, "aeiou"), Part(0, 4, ALL_OF_THEM)]}
PATIENCE_S = 20.0


@dataclass
class HeldRunner(FakeRunner):
    """Yields a step when the test releases the batch's first letter; records which batches run at once."""

    gates: dict[str, threading.Semaphore] = field(default_factory=dict)
    inside: set[str] = field(default_factory=set)
    most_at_once: int = 0
    began: dict[str, threading.Event] = field(default_factory=dict)

    def run(self, batch: Batch[Letters]) -> Iterator[Step[Letters]]:
        name = batch.members[0].sample_id
        self.inside.add(name)
        self.most_at_once = max(self.most_at_once, len(self.inside))
        self.began.setdefault(name, threading.Event()).set()
        try:
            for step in super().run(batch):
                if name in self.gates:
                    assert self.gates[name].acquire(timeout=PATIENCE_S)
                yield step
        finally:
            self.inside.discard(name)

    def hold(self, *names: str) -> None:
        for name in names:
            self.gates[name] = threading.Semaphore(0)
            self.began[name] = threading.Event()

    def let(self, name: str) -> None:
        self.gates[name].release()

    def waits_for(self, name: str) -> bool:
        return self.began[name].wait(PATIENCE_S)


class Outbox:
    """The releases of a device by input; checks that two threads never deliver at once."""

    def __init__(self, expected: int) -> None:
        self.released: list[str] = []
        self.complete = threading.Event()
        self._expected = expected
        self._news = threading.Condition()
        self._busy = False

    def deliver(self, releases: list[Release[Letters]]) -> None:
        assert not self._busy, "two threads deliver at once"
        self._busy = True
        for release in releases:
            match release:
                case Answered() | Failed():
                    self.released.append(release.member.sample_id)
                case Survivors():
                    self.released += [each.sample_id for each in release.members]
                case _:
                    raise AssertionError("no ramp looks here")
        self._busy = False
        with self._news:
            self._news.notify_all()
        if len(self.released) >= self._expected:
            self.complete.set()

    def waits_for(self, name: str) -> bool:
        with self._news:
            return self._news.wait_for(lambda: name in self.released, PATIENCE_S)


def thread_of(split: Split, runner: FakeRunner, outbox: Outbox) -> DeviceThreads[Letters]:
    engine: BatchEngine[Letters] = BatchEngine((), ObservedTimes())
    thread = DeviceThreads(Device(engine, runner, runner.clock, outbox.deliver), name="overlapping")
    thread.device.follow([split], "work-conserving", "a policy")
    return thread


@pytest.fixture
def runner() -> HeldRunner:
    held = HeldRunner(PARTS, MonotonicClock())
    held.hold("a", "x")
    return held


def test_a_batch_begins_beside_one_that_shrank_and_may_end_before_it(runner: HeldRunner) -> None:
    outbox = Outbox(expected=5)
    thread = thread_of(WHOLE, runner, outbox)
    thread.device.submit(0, members("aeiz"))
    thread.start()
    assert runner.waits_for("a")
    thread.device.submit(0, [member("x")])
    with thread.device.lock:
        assert not thread.device.engine.may_begin, "four are inside"
    assert not runner.began["x"].is_set()
    runner.let("a")
    assert runner.waits_for("x")
    runner.let("x")
    runner.let("x")
    assert outbox.waits_for("x")
    assert outbox.released == ["a", "e", "i", "x"]
    runner.let("a")
    assert outbox.complete.wait(PATIENCE_S)
    thread.stop()
    assert outbox.released == ["a", "e", "i", "x", "z"]
    assert runner.most_at_once == 2
    assert not [each for each in threading.enumerate() if each.name.startswith("overlapping")]


def test_stopping_waits_for_both_batches(runner: HeldRunner) -> None:
    outbox = Outbox(expected=5)
    thread = thread_of(WHOLE, runner, outbox)
    thread.device.submit(0, members("aeiz"))
    thread.start()
    runner.let("a")
    thread.device.submit(0, [member("x")])
    assert runner.waits_for("x")
    stopping = threading.Thread(target=thread.stop)
    stopping.start()
    stopping.join(0.05)
    assert stopping.is_alive()
    for name in "axx":
        runner.let(name)
    stopping.join(PATIENCE_S)
    assert sorted(outbox.released) == list("aeixz")


def test_no_input_is_lost_or_answered_twice_while_plans_change() -> None:
    names = [f"{letter}{number}" for number in range(60) for letter in "abez"]
    outbox = Outbox(expected=len(names))
    parts = {0: [Part(0, 1, "".join(n for n in names if n[0] in "ae")), Part(0, 4, ALL_OF_THEM)]}
    runner = HeldRunner(parts, MonotonicClock())
    thread = thread_of(WHOLE, runner, outbox)
    thread.start()
    rng = random.Random(0)
    for start in range(0, len(names), 3):
        thread.device.submit(0, [member(name) for name in names[start : start + 3]])
        if rng.random() < 0.3:
            below = rng.choice([None, 1, 3, 8])
            thread.device.follow(
                [replace(WHOLE, overlap_below=below, batch=rng.choice([2, 4]))], "work-conserving", "other"
            )
    assert outbox.complete.wait(PATIENCE_S)
    thread.stop()
    assert sorted(outbox.released) == sorted(names)
    assert runner.most_at_once <= 2


def test_overlapping_batches_answer_like_every_input_alone() -> None:
    model, encoded = model_of_maps(), encoded_images(40)
    outputs = exit_outputs(model, encoded)
    policy = ConfidencePolicy({ramp: float(STREET.score(outputs[ramp]).median()) for ramp in (0, 1)})
    answers: dict[str, Answer] = {}
    complete = threading.Event()

    def deliver(releases: list[Release[Piece]]) -> None:
        for release in releases:
            assert isinstance(release, Answered)
            assert release.answer is not None
            assert release.member.sample_id not in answers
            answers[release.member.sample_id] = release.answer
        if len(answers) == len(encoded):
            complete.set()

    engine = BatchEngine[Piece]((), ObservedTimes())
    thread = DeviceThreads(Device(engine, TorchRunner(model, policy), MonotonicClock(), deliver))
    thread.device.follow([Split(first=0, end=3, batch=4, ramps=(0, 1), overlap_below=4)], "work-conserving", policy)
    for piece in piece_of(model, policy, encoded).singles():
        thread.device.submit(0, [Member(sample_id=piece.sample_ids[0], payload=piece)])
    thread.start()
    assert complete.wait(PATIENCE_S)
    thread.stop()
    assert_same(answers, answers_alone(model, policy, encoded))
