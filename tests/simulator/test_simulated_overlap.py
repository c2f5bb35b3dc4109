"""Timetables of overlapping batches: a block takes 1 s, and 0.25 s more for every further input of both batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from optimizer.plans.plan import Plan
from simulator.simulate import booted, play, simulate
from tests.simulator.test_simulated_replica import EVERY_RAMP, at
from tests.simulator.tiny_cases import AT_0, AT_2, TO_END, kill, plan, scenario, split, stage

RAMP_0 = plan(stage(1, split(0, 4, ramps=(0,))))
TWO: dict[str, Any] = {"inputs_per_request": 2}


def latencies_s(served_by: Plan, arrivals_s: Sequence[float], rows: Sequence[int], **options: Any) -> Any:
    return pytest.approx(simulate(scenario(served_by, arrivals_s, rows, **options)).latency_s_N.tolist())


def test_the_next_batch_begins_beside_remaining_inputs() -> None:
    rows, arrivals_s = (AT_0, TO_END), [0.0, 1.0]
    # Two inputs in block 0 until 1.25 s, then one in three blocks, until 4.25 s; then the four that came meanwhile.
    assert latencies_s(RAMP_0, [0.0, 1.0, 2.0], rows, **TWO) == [1.25, 4.25, 6 - 1, 9.75 - 1, 6 - 2, 9.75 - 2]
    # From 1.25 s on one input of the first batch and two of the second: each block takes as long as one of three would,
    # 1.5 s. From 2.75 s on one of each, 1.25 s a block. The first has two left, until 5.25 s, and the second then one.
    overlapping = RAMP_0.with_splits(overlap_below=2)
    assert latencies_s(overlapping, arrivals_s, rows, **TWO) == [1.25, 5.25, 2.75 - 1, 6.25 - 1]
    # The second batch has no input after 2.75 s.
    assert latencies_s(overlapping, arrivals_s, (AT_0, TO_END, AT_0, AT_0), **TWO) == [1.25, 2.75 + 2, 1.75, 1.75]
    # Inputs that stay are inside until the end.
    stays = RAMP_0.with_splits(after_answer="stay").with_splits(overlap_below=2)
    assert latencies_s(stays, [0.0, 1.0], (AT_0, TO_END), **TWO) == [1.25, 5.0, 5 + 1.25 - 1, 10.0 - 1]


def test_the_threshold_counts_the_remaining_inputs() -> None:
    rows, arrivals_s = (AT_0, TO_END, TO_END), [0.0, 1.0]
    # Two remain at 1.5 s, which is not fewer than two: they run three blocks of two, until 5.25 s.
    apart_s = [1.5, 5.25, 5.25, 5.25 + 1.5 - 1, 10.5 - 1, 10.5 - 1]
    assert latencies_s(RAMP_0.with_splits(overlap_below=2), arrivals_s, rows, inputs_per_request=3) == apart_s
    # Two and three are five, above the profile: 5/4 of its largest batch, 2.1875 s, until 3.6875 s. Then two and two,
    # 1.75 s a block: the first has two left, until 7.1875 s, and the second one, alone.
    at_once_s = [1.5, 7.1875, 7.1875, 2.6875, 7.4375, 7.4375]
    assert latencies_s(RAMP_0.with_splits(overlap_below=3), arrivals_s, rows, inputs_per_request=3) == at_once_s


def test_a_device_that_runs_two_batches_is_busy_once() -> None:
    outcome = simulate(scenario(RAMP_0.with_splits(overlap_below=2), [0.0, 1.0], (AT_0, TO_END), **TWO))
    assert sum(each.busy_s for each in outcome.splits) == pytest.approx(6.25)
    assert outcome.ended_s == pytest.approx(6.25)
    assert [slot.utilisation for slot in outcome.slots] == [pytest.approx(1.0)]


def test_a_batch_of_few_may_be_joined_at_once() -> None:
    # By another ingress, because the first does not queue another call. Until 4.5 s they take 1.25 s a block.
    assert latencies_s(RAMP_0.with_splits(overlap_below=2), [0.0, 2.0], (TO_END,), num_ingresses=2) == [4.5, 4.5]


def test_batches_that_never_shrink_below_the_threshold_do_not_overlap() -> None:
    arrivals_s, rows = [0.0, 0.1, 0.2, 0.3, 3.0], (TO_END, AT_0, AT_2)
    apart = simulate(scenario(EVERY_RAMP, arrivals_s, rows))
    # No input waits while the first batch, of one, could be joined; then four run, and two remain at the end.
    never = simulate(scenario(plan(stage(1, split(0, 4, 1))).with_splits(overlap_below=1), arrivals_s, rows))
    alone = simulate(scenario(plan(stage(1, split(0, 4, 1))), arrivals_s, rows))
    assert never.latency_s_N.tolist() == pytest.approx(alone.latency_s_N.tolist())
    assert apart.latency_s_N.tolist() == pytest.approx(
        simulate(scenario(EVERY_RAMP.with_splits(overlap_below=1), arrivals_s, rows)).latency_s_N.tolist()
    )


def test_both_batches_of_a_dead_replica_restart() -> None:
    served_by = plan(stage(1, split(0, 2, 1), split(2, 4, 2))).with_splits(overlap_below=2)
    # Two batches of one at 1.25 s a block, then one of both.
    assert simulate(scenario(served_by, [0.0, 0.0])).latency_s_N.tolist() == pytest.approx([5.0, 5.0])
    served_by = replace(plan(stage(2, split(0, 4, 1))).with_splits(overlap_below=2), predicted={})
    service = booted(scenario(served_by, [0.0, 0.0, 0.0, 0.0]))
    outcome = at(service, 1.0, partial(kill, service))
    # Two of four continue at 1.25 s a block, and two more find the other replica full until then.
    assert sorted(outcome.latency_s_N.tolist()) == pytest.approx([5.0, 5.0, 10.0, 10.0])


def test_a_slow_replica_is_slow_beside_another_batch_too() -> None:
    service = booted(scenario(RAMP_0.with_splits(overlap_below=2), [0.0, 2.0], (AT_0, TO_END), **TWO))
    for replica in service.replicas():
        service.slow(replica, 2.0)
    assert play(service).latency_s_N.tolist() == pytest.approx([2.5, 10.5, 5.5 - 2, 12.5 - 2])
