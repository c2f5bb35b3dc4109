"""One device on streams whose every batch can be followed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from earlyexit.engine.order import OrderSpec
from experiments import tcb_device
from experiments.tcb_device import Cost, Side, Stream, serve

A_TOKEN_A_SECOND = Cost(fixed_s=0.0, token_s=1.0, cell_s=0.0)


def stream(arrivals_s: list[float], lengths: list[int], deadlines_s: list[float]) -> Stream:
    return Stream(arrivals_s=np.array(arrivals_s), lengths=np.array(lengths), deadlines_s=np.array(deadlines_s))


def test_batches_follow_each_other_and_take_what_their_layout_costs() -> None:
    offered = stream([0.0, 1.0, 1.0, 20.0], [2, 3, 1, 4], [math.inf] * 4)
    padded = serve(offered, Side(scheme="padded", inputs=2), tcb_device.ARRIVAL, A_TOKEN_A_SECOND)
    packed = serve(offered, Side(scheme="packed", inputs=2), tcb_device.ARRIVAL, A_TOKEN_A_SECOND)
    assert padded.done_s_N.tolist() == [2.0, 8.0, 8.0, 24.0]
    assert packed.done_s_N.tolist() == [2.0, 6.0, 6.0, 24.0]
    assert padded.batch_inputs.tolist() == [1, 2, 1]
    assert padded.longest_wait_s == 1.0


def test_a_group_is_answered_before_the_longer_ones_of_its_batch() -> None:
    offered = stream([0.0, 0.0, 0.0], [5, 1, 1], [math.inf] * 3)
    served = serve(offered, Side(scheme="grouped", inputs=3), tcb_device.ARRIVAL, A_TOKEN_A_SECOND)
    assert served.done_s_N.tolist() == [7.0, 2.0, 2.0]
    assert served.batch_s.tolist() == [7.0]


def test_a_token_budget_bounds_batches_and_the_order_fills_them() -> None:
    offered = stream([0.0] * 4, [4, 1, 3, 2], [math.inf] * 4)
    side = Side(scheme="packed", inputs=10, tokens=5)
    arrival = serve(offered, side, tcb_device.ARRIVAL, A_TOKEN_A_SECOND)
    shortest = serve(offered, side, OrderSpec(name="shortest", overdue_s=100.0), A_TOKEN_A_SECOND)
    assert arrival.began_s_N.tolist() == [0.0, 0.0, 5.0, 5.0]
    assert shortest.began_s_N.tolist() == [6.0, 0.0, 3.0, 0.0]


def test_scheduled_and_answered_in_time_are_two_things() -> None:
    offered = stream([0.0, 0.0], [4, 4], [3.0, 100.0])
    served = serve(offered, Side(scheme="packed", inputs=1), OrderSpec(), A_TOKEN_A_SECOND)
    assert served.scheduled_N.tolist() == [True, True]
    assert served.in_time_N.tolist() == [False, True]
    assert served.utility_per_s(served.in_time_N) == pytest.approx(0.25 / 8)


def test_who_can_no_longer_be_in_time_is_dropped() -> None:
    offered = stream([0.0, 0.5], [4, 4], [10.0, 4.3])
    served = serve(offered, Side(scheme="packed", inputs=1), tcb_device.ARRIVAL, A_TOKEN_A_SECOND)
    assert served.scheduled_N.tolist() == [True, False]
    assert served.longest_wait_s == 0.0


def test_streams_of_two_rates_differ_by_nothing_else() -> None:
    drawn = tcb_device.lengths(50, 20.0)
    slow, fast = (tcb_device.stream(rate, 50, drawn) for rate in (10.0, 20.0))
    assert (slow.arrivals_s / 2).tolist() == pytest.approx(fast.arrivals_s.tolist())
    assert (slow.deadlines_s - slow.arrivals_s).tolist() == pytest.approx((fast.deadlines_s - fast.arrivals_s).tolist())


def test_the_paper_s_device_saturates_tnb_at_the_paper_s_rate() -> None:
    drawn = tcb_device.lengths(640, 20.0)
    assert tcb_device.capacity(tcb_device.TNB, drawn, tcb_device.paper_device(640)) == pytest.approx(
        tcb_device.SATURATED_PER_S
    )
