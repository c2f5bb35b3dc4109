"""Tests of the figures of a ledger."""

from __future__ import annotations

import math

import numpy as np
import pytest

from simulator.outcome import NO_EXIT, NOT_DROPPED, REASONS, Outcome, SlotUse, SplitUse

NAN = math.nan
ADMISSION, DEADLINE = REASONS["admission"], REASONS["deadline"]
SPLIT = SplitUse(device="V100", first=0, end=4, batch=4, ramps=(1,), batches=2, inputs=6, fill=0.75, busy_s=8.0)
SLOTS = (
    SlotUse(slot="split-V100-0", device="V100", replica_s=30.0, utilisation=0.5),
    SlotUse(slot="split-K80-0", device="K80", replica_s=10.0, utilisation=0.1),
)


def outcome(latency_s: list[float], drops: dict[int, int] | None = None, *, width: int = 1) -> Outcome:
    """Returns one request per second from 0 on, SLO 3 s, within 10 s; dropped inputs by their number."""
    number = len(latency_s)
    drop_N = np.full(number, NOT_DROPPED, dtype=np.int8)
    for at, reason in (drops or {}).items():
        drop_N[at] = reason
    return Outcome(
        duration_s=10.0,
        warm_up_s=2.0,
        slo_s=3.0,
        inputs_per_request=width,
        arrived_s_R=np.arange(number // width, dtype=np.float64),
        latency_s_N=np.array(latency_s),
        exit_N=np.where(np.isnan(latency_s), NO_EXIT, 1 + np.arange(number) % 2).astype(np.int16),
        drop_N=drop_N,
        splits=(SPLIT,),
        slots=SLOTS,
        usd=0.2,
        ended_s=12.0,
    )


def test_figures_are_of_the_requests_after_the_warm_up_or_in_a_window() -> None:
    figures = outcome([9, 9, 1, 3, 4, 2, NAN, NAN], {6: DEADLINE, 7: ADMISSION}).figures()
    assert (figures.seconds, figures.inputs, figures.offered_per_s) == (8, 6, 0.75)
    assert (figures.answered, figures.in_slo) == (4, 3)
    assert (figures.goodput_per_s, figures.request_goodput_per_s) == (0.375, 0.375)
    assert figures.drops == {"admission": 1, "deadline": 1}
    assert figures.exits == {1: 2, 2: 2}
    assert figures.in_slo_share == 0.5
    assert (figures.p50_s, figures.mean_s) == (2.5, 2.5)
    assert figures.p95_s == pytest.approx(3.85)  # between 3 and 4
    assert figures.p99_s == pytest.approx(3.97)
    assert figures.utilisation == pytest.approx(0.4)  # 16 of 40 s
    assert figures.usd_per_hour == pytest.approx(60.0)  # 0.2 USD in 12 s
    made = outcome([1.0] * 10)
    assert made.figures_between(2.0, 5.0).inputs == 3
    assert made.figures_between(5.0, 9.5).inputs == 5
    assert outcome([1.0] * 11).figures().inputs == 9  # seconds 2 to 10, including the end


def test_a_request_is_as_late_as_its_last_input_and_whole_only_with_all_of_them() -> None:
    figures = outcome([9, 9, 9, 9, 1, 2, 3, 4, 1, NAN], {9: DEADLINE}, width=2).figures()
    assert (figures.inputs, figures.in_slo) == (6, 4)
    assert figures.p50_s == 3  # of the requests that took 2 s and 4 s
    assert figures.request_goodput_per_s == 0.25  # two inputs of one request in 8 s


def test_without_answers_there_are_no_latencies_and_without_requests_no_losses() -> None:
    figures = outcome([NAN] * 4, dict.fromkeys(range(4), ADMISSION)).figures()
    assert (figures.p50_s, figures.p99_s, figures.mean_s) == (None, None, None)
    assert (figures.goodput_per_s, figures.in_slo_share, figures.exits) == (0, 0, {})
    figures = outcome([]).figures()
    assert (figures.inputs, figures.in_slo_share, figures.drops) == (0, 1, {})
