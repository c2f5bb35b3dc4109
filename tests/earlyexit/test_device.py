from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from earlyexit.clock import Clock, ManualClock, MonotonicClock
from earlyexit.cut import Step
from earlyexit.device import Answered, Device, DeviceThread, GoesOn, Lost, PieceMember, Release
from earlyexit.engine import Batch, BatchEngine, Member
from earlyexit.errors import PlanError
from earlyexit.piece import Piece
from earlyexit.split import Split
from earlyexit.times import ObservedTimes
from earlyexit.wire import Answer

EVERYONE = "*"


@dataclass(frozen=True)
class Part:
    """One step of a fake cut: how long it takes, where it ends, and who leaves there."""

    seconds: float
    end: int
    leave: str = ""


@dataclass
class FakeCut:
    """Spends the parts' seconds; fails at the end of its first part if a poisonous input is inside."""

    parts: list[Part]
    clock: Clock
    poison: str = ""
    runs: list[str] = field(default_factory=list)
    """The inputs of every run."""

    def run(self, piece: Piece) -> Iterator[Step]:
        self.runs.append("".join(piece.sample_ids))
        inside: Piece | None = piece
        for part in self.parts:
            if inside is None:
                return
            if isinstance(self.clock, ManualClock):
                self.clock.advance(part.seconds)
            if set(piece.sample_ids) & set(self.poison):
                raise ValueError("poison")
            leavers = [k for k, name in enumerate(inside.sample_ids) if part.leave == EVERYONE or name in part.leave]
            stay = [k for k in range(len(inside)) if k not in leavers]
            answers = tuple(
                Answer(sample_id=inside.sample_ids[k], label=0, score=1.0, exit=part.end - 1) for k in leavers
            )
            inside = replace(inside.select(stay), next_block=part.end) if stay else None
            yield Step(answers=answers, survivors=inside)


def member(name: str, *, block: int = 0, deadline_s: float = float("inf"), origin: object = None) -> PieceMember:
    piece = Piece(
        sample_ids=(name,),
        next_block=block,
        lengths_B=np.ones(1, dtype=np.int32),
        values=torch.zeros(1, 1),
        state_BS=torch.zeros(1, 0, dtype=torch.int32),
    )
    return Member(sample_id=name, payload=piece, deadline_s=deadline_s, origin=origin)


def members(names: str) -> list[PieceMember]:
    return [member(name) for name in names]


@dataclass
class Bench:
    """A device on a manual clock that writes down what it releases, and when."""

    splits: list[Split]
    parts: Mapping[int, list[Part]]
    poison: str = ""
    clock: ManualClock = field(default_factory=ManualClock)
    log: list[str] = field(default_factory=list)
    cuts: dict[int, FakeCut] = field(init=False)
    engine: BatchEngine[Piece] = field(init=False)
    device: Device = field(init=False)

    def __post_init__(self) -> None:
        self.cuts = {first: FakeCut(parts, self.clock, self.poison) for first, parts in self.parts.items()}
        self.engine = BatchEngine(self.splits, ObservedTimes())
        self.device = Device(self.engine, self.cuts, self.clock, self._write)

    def _write(self, releases: list[Release]) -> None:
        self.log.append(f"{self.clock.now_s():.3f} " + ", ".join(map(_described, releases)))


def _described(release: Release) -> str:
    match release:
        case Answered(answer=answer):
            return f"answer {answer.sample_id} after {answer.exit}"
        case GoesOn(members=going, piece=piece):
            assert tuple(each.sample_id for each in going) == piece.sample_ids
            return f"goes on {piece.next_block}:[{' '.join(piece.sample_ids)}]"
        case Lost(member=lost, error=error):
            return f"lost {lost.sample_id} {error.kind}: {error}"


def one_split(parts: list[Part], *, batch: int = 4, poison: str = "") -> Bench:
    return Bench([Split(first=0, end=parts[-1].end, batch=batch)], {0: parts}, poison)


def start(bench: Bench) -> Batch[Piece]:
    batch = bench.device.start_next()
    assert isinstance(batch, Batch)
    return batch


def test_answers_are_released_step_by_step_before_the_batch_ends() -> None:
    bench = one_split([Part(1, 1, "b"), Part(1, 2, "ad"), Part(1, 3, EVERYONE)])
    bench.engine.submit(0, members("abcd"), 0.0)
    bench.device.run_until_idle()
    assert bench.log == [
        "1.000 answer b after 0",
        "2.000 answer a after 1, answer d after 1",
        "3.000 answer c after 2",
    ]


def test_a_batch_ends_where_nobody_is_left() -> None:
    bench = one_split([Part(1, 1, EVERYONE), Part(1, 2, EVERYONE)])
    bench.engine.submit(0, members("ab"), 0.0)
    bench.device.run_until_idle()
    assert bench.clock.now_s() == 1.0


def test_survivors_queue_again_for_the_next_hosted_split() -> None:
    splits = [Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=2)]
    bench = Bench(splits, {0: [Part(1, 2, "ad")], 2: [Part(1, 4, EVERYONE)]})
    bench.engine.submit(0, members("abcd"), 0.0)
    bench.device.run_until_idle()
    assert bench.log == [
        "1.000 answer a after 1",
        "2.000 answer d after 1",
        "3.000 answer b after 3, answer c after 3",
    ]
    assert bench.cuts[2].runs == ["bc"]


def test_survivors_go_on_where_their_next_block_is_not_hosted() -> None:
    bench = one_split([Part(1, 2, "b")])
    bench.engine.submit(0, members("abc"), 0.0)
    bench.device.run_until_idle()
    assert bench.log == ["1.000 answer b after 1", "1.000 goes on 2:[a c]"]


def test_a_device_without_block_0_runs_until_idle() -> None:
    bench = Bench([Split(first=2, end=4, batch=2)], {2: [Part(1, 4, EVERYONE)]})
    bench.engine.submit(2, [member("a", block=2)], 0.0)
    bench.device.run_until_idle()
    assert bench.log == ["1.000 answer a after 3"]


def test_answers_know_how_long_they_waited_and_ran() -> None:
    splits = [Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=2)]
    bench = Bench(splits, {0: [Part(1, 1, "a"), Part(2, 2, "")], 2: [Part(4, 4, EVERYONE)]})
    a, b, c, d = pieces = members("abcd")
    bench.engine.submit(0, pieces, 0.0)
    bench.clock.advance(0.5)
    bench.device.run_until_idle()
    # 0.5 [a b] 3.5 [c d] 6.5 [b c], which is full, 10.5 [d] 14.5
    assert (a.queue_s, a.compute_s) == (0.5, 1.0)
    assert (c.queue_s, c.compute_s) == (3.5, 7.0)
    assert (b.queue_s, b.compute_s) == (3.5, 7.0)
    assert (d.queue_s, d.compute_s) == (7.5, 7.0)


def test_what_comes_too_late_is_lost_with_its_reason_and_costs_no_time() -> None:
    bench = one_split([Part(1, 4, EVERYONE)], batch=1)
    bench.engine.submit(0, [member("a", deadline_s=5.0), member("b", deadline_s=5.0)], 0.0)
    bench.device.run(start(bench))
    bench.clock.advance(3.5)
    assert bench.device.start_next() is None
    assert bench.log == [
        "1.000 answer a after 3",
        "4.500 lost b deadline: the deadline could no longer be met, so the input was not run",
    ]
    assert bench.cuts[0].runs == ["a"]


def test_a_poisonous_input_fails_alone_and_its_batch_mates_get_their_answers() -> None:
    bench = one_split([Part(1, 4, EVERYONE)], poison="b")
    bench.engine.submit(0, members("abc"), 0.0)
    bench.device.run_until_idle()
    assert bench.log == [
        "2.000 answer a after 3",
        "3.000 lost b execution: the model failed on this input: ValueError: poison",
        "4.000 answer c after 3",
    ]
    assert bench.cuts[0].runs == ["abc", "a", "b", "c"]


@dataclass
class FailsLater(FakeCut):
    """Fails at its second step, so after the first answers are out, unless an input is alone."""

    def run(self, piece: Piece) -> Iterator[Step]:
        for index, step in enumerate(super().run(piece)):
            if index == 1 and len(piece) > 1:
                raise ValueError("too much at once")
            yield step


def test_answers_given_before_a_failure_are_not_given_again() -> None:
    bench = one_split([Part(1, 1, "a"), Part(1, 2, "b")])
    bench.cuts[0] = FailsLater(bench.parts[0], bench.clock)
    device = Device(bench.engine, bench.cuts, bench.clock, bench._write)
    bench.engine.submit(0, members("abc"), 0.0)
    device.run_until_idle()
    assert bench.log == ["1.000 answer a after 0", "4.000 answer b after 1", "6.000 goes on 2:[c]"]
    assert bench.cuts[0].runs == ["abc", "b", "c"]


def test_survivors_of_a_repeated_batch_queue_again_here() -> None:
    splits = [Split(first=0, end=2, batch=4), Split(first=2, end=4, batch=4)]
    bench = Bench(splits, {0: [Part(1, 2, "")], 2: [Part(1, 4, EVERYONE)]}, poison="b")
    bench.engine.submit(0, members("abc"), 0.0)
    next_block, again = bench.device.run(start(bench))
    assert (next_block, [each.sample_id for each in again]) == (2, ["a", "c"])
    assert [each.payload.next_block for each in again] == [2, 2]


def test_members_that_share_a_sample_id_run_alone_and_each_gets_its_own_answer() -> None:
    bench = one_split([Part(1, 2, "a"), Part(1, 4, EVERYONE)])
    first, second = member("a", origin=1), member("a", origin=2)
    bench.engine.submit(0, [first, second, member("b")], 0.0)
    bench.device.run_until_idle()
    assert bench.log == ["1.000 answer a after 1", "2.000 answer a after 1", "4.000 answer b after 3"]


def test_inputs_that_the_model_fails_on_in_a_row_are_counted_until_one_succeeds() -> None:
    bench = one_split([Part(1, 4, EVERYONE)], poison="x")
    bench.engine.submit(0, [member("x")], 0.0)
    bench.device.run_until_idle()
    bench.engine.submit(0, [member("x")], bench.clock.now_s())
    bench.device.run_until_idle()
    assert bench.device.failures_in_a_row == 2
    bench.engine.submit(0, [member("b")], bench.clock.now_s())
    bench.device.run_until_idle()
    assert bench.device.failures_in_a_row == 0


@dataclass
class Inbox:
    """Collects what a device thread releases and says when everything that is expected has come."""

    expected: int
    answers: list[str] = field(default_factory=list)
    complete: threading.Event = field(default_factory=threading.Event)

    def deliver(self, releases: list[Release]) -> None:
        self.answers += [release.answer.sample_id for release in releases if isinstance(release, Answered)]
        if len(self.answers) >= self.expected:
            self.complete.set()


def thread_with(inbox: Inbox, name: str) -> DeviceThread:
    clock = MonotonicClock()
    splits = [Split(first=0, end=2, batch=3), Split(first=2, end=4, batch=2)]
    cuts = {0: FakeCut([Part(0, 2, "aeiou")], clock), 2: FakeCut([Part(0, 4, EVERYONE)], clock)}
    device = Device(BatchEngine(splits, ObservedTimes()), cuts, clock, inbox.deliver)
    return DeviceThread(device, name=name)


def test_a_device_thread_answers_everything_and_ends_when_told() -> None:
    inbox = Inbox(expected=26)
    thread = thread_with(inbox, "answers everything")
    thread.start()
    for name in "abcdefghijklmnopqrstuvwxyz":
        thread.submit(0, [member(name)])
    assert inbox.complete.wait(timeout=10)
    thread.stop()
    assert sorted(inbox.answers) == list("abcdefghijklmnopqrstuvwxyz")
    assert "answers everything" not in [running.name for running in threading.enumerate()]


def test_a_device_thread_forgets_an_origin_and_still_answers_the_others() -> None:
    inbox = Inbox(expected=2)
    thread = thread_with(inbox, "forgets")
    gone = object()
    thread.submit(0, [member("p", origin=gone), member("q"), member("r", origin=gone), member("s")])
    assert thread.forget(gone) == 2
    thread.start()
    assert inbox.complete.wait(timeout=10)
    thread.stop()
    assert sorted(inbox.answers) == ["q", "s"]


def test_a_device_thread_refuses_a_block_it_does_not_host() -> None:
    with pytest.raises(PlanError, match="no split here starts at block 3"):
        thread_with(Inbox(expected=0), "refuses").submit(3, [member("a")])
