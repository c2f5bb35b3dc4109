"""Probes that are steps of sequences run in turn with others."""

from __future__ import annotations

import pytest

from earlyexit.engine.queue import Member
from earlyexit.network.split import Split
from tests.earlyexit.engine_driver import Engine, TableTimes, chosen, names

WHOLE = Split(first=0, end=2, batch=2)


def member(name: str, sequence: int) -> Member[None]:
    """Capital letters are probes."""
    return Member(sample_id=name, payload=None, sequence=sequence, probe=name.isupper())


def engine_of(*members: Member[None]) -> Engine:
    engine = Engine((WHOLE,), TableTimes({0: 1.0}))
    for each in members:
        engine.submit(0, [each], 0.0)
    return engine


def order_of(engine: Engine, *coming_back: Member[None]) -> list[str]:
    """The batches, after each of which one of these is there."""
    found = []
    for each in coming_back:
        found.append(names(chosen(engine).members))
        engine.submit(0, [each], 0.0)
    return [*found, names(chosen(engine).members)]


def test_others_go_between_two_probes_that_come_back_by_turns() -> None:
    engine = engine_of(member("A", 1), member("c", 3))
    came = member("B", 2), member("A", 1), member("c", 3), member("B", 2)
    assert order_of(engine, *came) == ["A", "c", "B A", "c", "B"]


def test_probes_go_between_two_batches_that_are_always_full() -> None:
    engine = engine_of(*(member(name, 2 + k) for k, name in enumerate("abcdef")), member("A", 1))
    assert order_of(engine, member("A", 1), member("g", 9), member("A", 1)) == ["A", "a b", "A", "c d"]


def test_a_probe_alone_waits_for_nobody() -> None:
    assert order_of(engine_of(member("A", 1)), member("B", 2), member("A", 1)) == ["A", "B", "A"]


@pytest.mark.parametrize("dispatch", ["deferred", "filling"])
def test_a_probe_goes_on_while_others_still_wait_for_their_batch_to_fill(dispatch: str) -> None:
    engine = Engine((WHOLE,), TableTimes({0: 1.0}), dispatch=dispatch)  # type: ignore[arg-type] # of these two
    engine.submit(0, [Member(sample_id="a", payload=None, sequence=2, deadline_s=99.0)], 0.0)
    engine.submit(0, [member("A", 1)], 0.0)
    assert names(chosen(engine).members) == "A"
    engine.submit(0, [member("A", 1)], 0.0)
    assert names(chosen(engine).members) == ("A" if dispatch == "deferred" else "a")


def test_others_do_not_wait_for_a_probe_that_is_on_its_way_back() -> None:
    engine = engine_of(member("A", 1), member("b", 2))
    assert names(chosen(engine).members) == "A"
    engine.returning.answered([1], took_s=1.0, now_s=1.0)
    assert names(chosen(engine, 1.0).members) == "b"


def test_probes_of_no_sequence_are_run_as_soon_as_they_wait() -> None:
    engine = engine_of(member("A", 0), member("b", 0))
    assert order_of(engine, member("B", 0)) == ["A", "B"]
