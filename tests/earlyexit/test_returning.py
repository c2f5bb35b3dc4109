"""Steps of sequences: a batch waits a moment for those that are on their way back."""

from __future__ import annotations

from earlyexit.engine.engine import SHARE
from earlyexit.engine.queue import Member
from earlyexit.network.split import Split
from tests.earlyexit.engine_driver import Engine, TableTimes, chosen, names

UNTIL_S = 1.0 + SHARE


def step(name: str, sequence: int) -> Member[None]:
    return Member(sample_id=name, payload=None, sequence=sequence)


def two_have_run(batch: int = 8) -> Engine:
    """Steps of sequences 1 and 2 were answered at 1 s; those of 3 and 4 came while they ran."""
    engine = Engine((Split(first=0, end=2, batch=batch),), TableTimes({0: 1.0}))
    engine.submit(0, [step("a", 1), step("b", 2)], 0.0)
    first = chosen(engine)
    engine.submit(0, [step("c", 3), step("d", 4)], 0.5)
    engine.finished(first, first_s=1.0, total_s=1.0)
    engine.returning.answered([1, 2], took_s=1.0, now_s=1.0)
    return engine


def test_two_groups_become_one() -> None:
    engine = two_have_run()
    waits = engine.choose(1.0)
    assert (waits.batch, waits.wake_s) == (None, UNTIL_S)
    engine.submit(0, [step("e", 1)], 1.01)
    assert engine.choose(1.01).wake_s == UNTIL_S
    engine.submit(0, [step("f", 2)], 1.02)
    assert names(chosen(engine, 1.02).members) == "c d e f"


def test_who_does_not_come_is_not_waited_for_any_longer_nor_again() -> None:
    engine = two_have_run()
    assert names(chosen(engine, UNTIL_S).members) == "c d"
    engine.submit(0, [step("e", 1)], 1.2)
    assert names(chosen(engine, 1.2).members) == "e"


def test_who_has_ended_is_not_waited_for() -> None:
    engine = two_have_run()
    engine.take_out([1, 2])
    assert names(chosen(engine, 1.0).members) == "c d"


def test_who_left_early_and_has_ended_before_its_batch_is_not_waited_for() -> None:
    engine = Engine((Split(first=0, end=2, batch=8),), TableTimes({0: 1.0}))
    engine.submit(0, [step("a", 1), step("b", 2)], 0.0)
    first = chosen(engine)
    engine.submit(0, [step("c", 3)], 0.5)
    engine.take_out([1])
    engine.finished(first, first_s=0.5, total_s=1.0)
    engine.returning.answered([1, 2], took_s=1.0, now_s=1.0)
    assert engine.choose(1.0).wake_s == UNTIL_S, "the other one may come"
    engine.take_out([2])
    assert names(chosen(engine, 1.0).members) == "c"


def test_a_full_batch_waits_for_nobody() -> None:
    engine = two_have_run(batch=2)
    assert names(chosen(engine, 1.0).members) == "c d"


def test_a_device_without_other_work_waits_for_nothing() -> None:
    engine = Engine((Split(first=0, end=2, batch=8),), TableTimes({0: 1.0}))
    engine.returning.answered([1], took_s=1.0, now_s=1.0)
    assert engine.choose(1.0).wake_s is None
    engine.submit(0, [step("b", 1)], 1.02)
    assert names(chosen(engine, 1.02).members) == "b"
