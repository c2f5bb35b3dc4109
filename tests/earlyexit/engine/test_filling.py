from __future__ import annotations

import math

import pytest

from earlyexit.engine.queue import Member, Queue
from earlyexit.engine.times import Load, Standing, patience, pick
from earlyexit.network.boundary import Split
from tests.earlyexit.engine.driver import Driver, Engine, TableTimes, member, names, splits_of

FULL_S = 2.0
"""Of a batch of 4, which is half a second for each."""


def standing(
    first: int, waiting: str, batch_s: float, *, since_s: float = 0.0, latest_s: float = 10.0, may_wait: bool = True
) -> Standing[None]:
    queue: Queue[None] = Queue(Split(first=first, end=first + 1, batch=4))
    queue.members = [
        Member(sample_id=name, payload=None, since_s=since_s, queued_serial=first, reserve_s=4.0) for name in waiting
    ]
    return Standing(
        queue=queue,
        number=len(waiting),
        batch_s=batch_s,
        full_each_s=FULL_S / 4,
        latest_s=latest_s,
        may_wait=may_wait,
    )


def first_of(queue: Queue[None] | None) -> int | None:
    return None if queue is None else queue.split.first


def test_a_device_was_busy_for_the_share_of_its_time_that_it_ran() -> None:
    load = Load()
    assert load.share(5.0) == 0.0
    load.ran(1.0, 6.0)
    assert load.share(6.0) == 1.0
    assert load.share(9.0) == pytest.approx(1 / 4)
    load.ran(1.0, 9.0)  # two seconds of the last three it was idle; what was before weighs nine tenths
    assert load.share(9.0) == pytest.approx((0.9 + 1) / (0.9 + 3))


@pytest.mark.parametrize(("busy", "share"), [(0.0, 0.0), (0.4, 0.0), (0.5, 0.25), (0.6, 0.5), (0.8, 0.5), (1.2, 0.5)])
def test_the_busier_a_device_is_the_longer_batches_wait(busy: float, share: float) -> None:
    assert patience(busy) == pytest.approx(share)


def all_busy(until_s: float, for_s: float = 1000.0) -> Load:
    load = Load()
    load.ran(for_s, until_s)
    return load


def test_a_batch_is_due_when_it_has_waited_as_long_as_it_may() -> None:
    waiting, load = [standing(0, "a", 1.0, since_s=2.0)], all_busy(2.0)
    chosen, at_s = pick(waiting, load, 2.0)
    assert chosen is None
    assert at_s is not None
    assert at_s == pytest.approx(5.0), "half of what three full batches take"
    assert first_of(pick(waiting, load, at_s)[0]) == 0


def test_a_wait_is_shorter_the_less_the_device_did_before() -> None:
    load = all_busy(2.0, for_s=4.0)
    due_s = load.due_s(2.0, 10.0)
    assert due_s - 2.0 == pytest.approx(8.0 * patience(load.share(due_s)))
    assert 2.0 < due_s < 6.0


def test_a_device_that_waits_for_processors_counts_as_busier() -> None:
    load = Load()
    load.ran(1.0, 1.0)
    load.ran(1.0, 5.0)
    assert load.share(5.0) == pytest.approx(1.9 / 4.9)
    assert load.due_s(5.0, 13.0) == 5.0
    load.waited = 0.25
    assert load.share(5.0) == pytest.approx(1.5 * 1.9 / 4.9)
    due_s = load.due_s(5.0, 13.0)
    assert due_s > 5.5
    assert due_s - 5.0 == pytest.approx(8.0 * patience(load.share(due_s)))


@pytest.mark.parametrize(
    "waiting",
    [
        pytest.param(standing(0, "abc", 1.7), id="hardly dearer than in a full batch"),
        pytest.param(standing(0, "a", 1.0, latest_s=math.inf), id="no deadline, or nothing known"),
        pytest.param(standing(0, "a", 1.0, may_wait=False), id="waited before"),
    ],
)
def test_nobody_waits_where_that_gains_nothing_or_nothing_says_how_long(waiting: Standing[None]) -> None:
    assert first_of(pick([waiting], all_busy(0.0), 0.0)[0]) == 0


@pytest.mark.parametrize(
    ("press_s", "first"),
    [pytest.param(3.0, 0, id="the others can wait for it"), pytest.param(2.9, 2, id="the others are urgent")],
)
def test_the_batch_of_the_fewest_seconds_per_input_goes_first(press_s: float, first: int) -> None:
    deep = standing(2, "xy", 4.0, latest_s=press_s - 2.0)  # and half of the 4 seconds kept for later
    assert first_of(pick([deep, standing(0, "ab", 3.0)], Load(), 0.0)[0]) == first


def filling() -> Driver:
    """Blocks 0-1 and 2-3, batches of 4, a second and three whatever they hold; block 0 is where new inputs come."""
    splits, seconds = splits_of(0, 2, 4, batch=4), {0: 1.0, 2: 3.0}
    engine = Engine(splits, TableTimes(seconds))
    engine.follow(splits, "filling", entry=0)
    return Driver(engine, seconds)


def test_under_load_survivors_wait_for_a_fuller_batch_and_new_inputs_do_not() -> None:
    # The device was busy all the time, so survivors may wait half of the time until 12 - 3 = 9: until 5.
    # The fourth makes the batch full.
    assert filling().play("0 a <12; 1 b <13; 2 c <14; 3 d <15") == (
        "0 start 0:[a]; 1 start 0:[b]; 2 start 0:[c]; 3 start 0:[d]; 4 start 2:[a b c d]"
    )
    assert filling().play("0 a <12; 12 b <24").endswith("12 start 0:[b]; 13 start 2:[b]"), "it was mostly idle"


def test_a_wait_ends_when_half_of_what_the_most_urgent_deadline_leaves_is_over() -> None:
    engine = filling().engine
    engine.load.ran(1000.0, 10.0)
    engine.submit(2, [member("x", deadline_s=16.0)], 10.0)
    choice = engine.choose(10.0)
    assert choice.batch is None
    assert choice.wake_s == pytest.approx(11.5), "it must start at 13"
    batch = engine.choose(11.6).batch
    assert batch is not None
    assert names(batch.members) == "x"
