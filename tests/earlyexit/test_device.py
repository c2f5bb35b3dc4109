from __future__ import annotations

import threading
from dataclasses import dataclass, field

from earlyexit.clock import MonotonicClock
from earlyexit.engine.device import Device
from earlyexit.engine.engine import BatchEngine
from earlyexit.engine.release import Release, Told
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.split import Split
from tests.earlyexit.letters import (
    EVERYONE,
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


def test_answers_are_released_step_by_step_before_the_batch_ends() -> None:
    bench = one_split([Part(1, 1, "b"), Part(1, 2, "ad"), Part(1, 3, EVERYONE)])
    assert bench.run(members("abcd")) == [
        "1.000 answer b after 0",
        "2.000 answer a after 1, answer d after 1",
        "3.000 answer c after 2",
    ]


def test_a_batch_ends_where_nobody_is_left() -> None:
    bench = one_split([Part(1, 1, EVERYONE), Part(1, 2, EVERYONE)])
    bench.run(members("ab"))
    assert bench.clock.now_s() == 1.0


def test_a_device_without_block_0_runs_until_idle() -> None:
    bench = Bench([Split(first=2, end=4, batch=2)], {2: [Part(1, 4, EVERYONE)]})
    assert bench.run([member("a", block=2)]) == ["1.000 answer a after 3"]


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
    assert bench.runner.runs == ["0:a"]


def test_a_poisonous_input_fails_alone_and_its_batch_mates_get_their_answers() -> None:
    bench = one_split([Part(1, 4, EVERYONE)], poison="b")
    assert bench.run(members("abc")) == [
        "2.000 answer a after 3",
        "3.000 lost b execution: the model failed on this input: ValueError: poison",
        "4.000 answer c after 3",
    ]
    assert bench.runner.runs == ["0:abc", "0:a", "0:b", "0:c"]


def test_survivors_of_a_repeated_batch_queue_again_here() -> None:
    splits = [Split(first=0, end=2, batch=4), Split(first=2, end=4, batch=4)]
    bench = Bench(splits, {0: [Part(1, 2, "")], 2: [Part(1, 4, EVERYONE)]}, poison="b")
    bench.run(members("abc"))
    assert bench.runner.runs == ["0:abc", "0:a", "0:b", "0:c", "2:ac"]


def test_members_that_share_a_sample_id_run_alone_and_each_gets_its_own_answer() -> None:
    bench = one_split([Part(1, 2, "a"), Part(1, 4, EVERYONE)])
    first, second = member("a", origin=1), member("a", origin=2)
    log = bench.run([first, second, member("b")])
    assert log == ["1.000 answer a after 1", "2.000 answer a after 1", "4.000 answer b after 3"]


def test_inputs_that_the_model_fails_on_in_a_row_are_counted_until_one_succeeds() -> None:
    bench = one_split([Part(1, 4, EVERYONE)], poison="x")
    bench.run([member("x")])
    bench.run([member("x")])
    assert bench.device.failures_in_a_row == 2
    bench.run([member("b")])
    assert bench.device.failures_in_a_row == 0


def test_survivors_whose_block_a_plan_took_away_while_they_ran_go_on_elsewhere() -> None:
    splits = [Split(first=0, end=2, batch=2), Split(first=2, end=4, batch=2)]
    bench = Bench(splits, {0: [Part(1, 2, "")], 2: [Part(1, 4, EVERYONE)]})
    bench.engine.submit(0, members("ab"), 0.0)
    staying = bench.device.run(start(bench))
    bench.engine.follow(splits[:1], "work-conserving")
    bench.device.requeue(staying)
    assert bench.log == ["1.000 goes on 2:[a b]"]
    assert bench.engine.num_waiting == 0


def test_survivors_queue_again_inside_a_split_that_came_while_they_ran() -> None:
    bench = Bench([Split(first=0, end=2, batch=2)], {0: [Part(1, 2, "")], 2: [Part(1, 4, EVERYONE)]})
    bench.engine.submit(0, members("ab"), 0.0)
    batch = start(bench)
    bench.engine.follow([Split(first=0, end=4, batch=2)], "work-conserving")
    bench.device.requeue(bench.device.run(batch))
    bench.device.run_until_idle()
    assert bench.log == ["2.000 answer a after 3, answer b after 3"]
    assert bench.runner.runs == ["0:ab", "2:ab"]


@dataclass
class Inbox:
    """Collects what a device thread releases and says when everything that is expected has come."""

    expected: int
    answers: list[str] = field(default_factory=list)
    complete: threading.Event = field(default_factory=threading.Event)

    def deliver(self, releases: list[Release[Letters]]) -> None:
        self.answers += [release.answer.sample_id for release in releases if isinstance(release, Told)]
        if len(self.answers) >= self.expected:
            self.complete.set()


def thread_with(inbox: Inbox, name: str, runner: FakeRunner | None = None) -> Device[Letters]:
    clock = MonotonicClock()
    splits = [Split(first=0, end=2, batch=3), Split(first=2, end=4, batch=2)]
    parts = {0: [Part(0, 2, "aeiou")], 2: [Part(0, 4, EVERYONE)], 1: [Part(0, 4, EVERYONE)]}
    engine = BatchEngine[Letters](splits, ObservedTimes())
    return Device(engine, runner or FakeRunner(parts, clock), clock, inbox.deliver, name=name)


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


def test_a_device_thread_follows_another_plan_and_policy_and_takes_pieces_of_the_call_before() -> None:
    inbox = Inbox(expected=4)
    runner = FakeRunner({1: [Part(0, 4, EVERYONE)], 2: [Part(0, 4, EVERYONE)]}, MonotonicClock())
    thread = thread_with(inbox, "follows", runner)
    thread.submit(2, [member("a", block=2), member("b", block=2)])
    thread.follow([Split(first=3, end=4, batch=2)], "deferred", "another policy")
    thread.submit(1, [member("c", block=1), member("d", block=1)], fallback=[Split(first=0, end=4, batch=2)])
    thread.start()
    assert inbox.complete.wait(timeout=10)
    thread.stop()
    assert runner.runs == ["2:ab", "1:cd"]
    assert runner.policies == ["another policy"]


# Probes


def test_an_answered_probe_stays_until_the_end_and_exits_say_what_they_saw() -> None:
    bench = one_split([Part(1, 1, "a"), Part(1, 4, EVERYONE)])
    a, b = probes = members("ab", probe=True)
    assert bench.run(probes) == [
        "1.000 look a at 0, look b at 0, answer a after 0, stays",
        "2.000 look a at 3, look b at 3, answer a after 3, answer b after 3",
    ]
    assert (a.compute_s, b.compute_s) == (2.0, 2.0)


def test_an_early_answer_knows_how_long_it_ran_until_then() -> None:
    compute_s: list[float] = []
    bench = one_split([Part(1, 1, "a"), Part(4, 2, "")])
    device = Device(bench.engine, bench.runner, bench.clock, lambda releases: compute_s.append(a.compute_s))
    (a,) = probe = members("a", probe=True)
    bench.engine.submit(0, probe, 0.0)
    device.run_until_idle()
    assert compute_s == [1.0, 1.0, 5.0]  # answered, looked at after block 1, gone on


def test_probes_that_run_again_after_a_failure_say_nothing_twice_and_end_once() -> None:
    parts = {0: [Part(1, 1, "ab"), Part(1, 4, EVERYONE)]}
    bench = Bench([Split(first=0, end=4, batch=4)], parts, "b", FailsLater)
    assert bench.run(members("abc", probe=True)) == [
        "1.000 look a at 0, look b at 0, look c at 0, answer a after 0, stays, answer b after 0, stays",
        "4.000 look a at 3, answer a after 3",
        "6.000 lost b execution: the model failed on this input: ValueError: too much",
        "8.000 look c at 3, answer c after 3",
    ]
