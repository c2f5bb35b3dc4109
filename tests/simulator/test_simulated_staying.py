"""Timetables of simulated inputs that stay after their answer, compared with a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cluster.emulated import EmulatedPiece, PacedRunner
from earlyexit.engine.device import Answered, Device, Release
from earlyexit.engine.engine import BatchEngine, ObservedTimes
from earlyexit.engine.queue import Member
from earlyexit.network.boundary import AfterAnswer
from optimizer.plans.plan import Plan
from simulator.simulate import simulate
from tests.clock import ManualClock
from tests.cluster.recorded_batches import HALF, RAMPS, piece_of, recorded
from tests.simulator.tiny_cases import AT_0, AT_1, AT_2, TO_END, plan, problem, scenario, split, stage

EVERY_RAMP = plan(stage(1, split(0, 4, ramps=(0, 1, 2)))).with_splits(after_answer="stay")


def test_batches_of_inputs_that_stay_continue_after_their_answers() -> None:
    rows = (TO_END, AT_1, AT_0, AT_2)
    outcome = simulate(scenario(EVERY_RAMP, [0.0, 1.0], rows, inputs_per_request=4))
    first = [7.0, 3.5, 1.75, 5.25]  # 1.75 s for every block of four
    assert outcome.latency_s_N.tolist() == [*first, *(seconds + 6 for seconds in first)]
    assert outcome.exit_N.tolist() == [3, 1, 0, 2] * 2
    assert [(each.inputs, each.busy_s) for each in outcome.splits] == [(8, 14.0)]
    served_by = plan(stage(1, split(0, 2, ramps=(1,))), stage(1, split(2, 4, ramps=(2,)))).with_splits(
        after_answer="stay"
    )
    outcome = simulate(scenario(served_by, [0.0], (AT_1, AT_2, AT_1), inputs_per_request=3))
    # Two blocks of three take 1.5 s each, the link 0.5 s for each input, and the first block of the next stage 1.5 s.
    assert outcome.latency_s_N.tolist() == [3.0, 6.0, 3.0]
    assert [(each.first, each.inputs) for each in outcome.splits] == [(0, 3), (2, 3)]
    # No caller waits for stages whose inputs were all answered, and the stages work nevertheless.
    served_by = plan(stage(1, split(0, 2, ramps=(0,))), stage(1, split(2, 4))).with_splits(after_answer="stay")
    outcome = simulate(scenario(served_by, [0.0], (AT_0,)))
    assert (outcome.latency_s_N.tolist(), outcome.exit_N.tolist()) == ([1.0], [0])
    assert [each.busy_s for each in outcome.splits] == [2.0, 2.0]


@pytest.mark.parametrize("after_answer", ["stop", "stay"])
@pytest.mark.parametrize("rows", [(AT_0, AT_1, TO_END, AT_2, AT_0, TO_END, TO_END, AT_1), (AT_2, AT_0), (AT_1,)])
def test_a_device_behaves_as_the_simulated_one(after_answer: AfterAnswer, rows: Sequence[int]) -> None:
    served_by = plan(stage(1, split(0, 2, 4, ramps=(0, 1)), split(2, 4, 3, ramps=(2,)))).with_splits(
        after_answer=after_answer
    )
    simulated = simulate(scenario(served_by, [0.0], rows, inputs_per_request=8, problem=problem(ramp_s=0.125)))
    log, engine = run_live(served_by, [rows[k % len(rows)] for k in range(8)])
    first = {number: (at_s, block) for at_s, number, block in reversed(log)}
    assert [first[number][0] for number in range(8)] == pytest.approx(simulated.latency_s_N.tolist())
    assert [first[number][1] for number in range(8)] == simulated.exit_N.tolist()
    for use in simulated.splits:
        counts = engine.counts[use.first]
        assert (counts.batches, counts.inputs) == (use.batches, use.inputs)
        assert counts.busy_s == pytest.approx(use.busy_s)
    assert sum(use.batches for use in simulated.splits) == sum(counts.batches for counts in engine.counts.values())


def run_live(served_by: Plan, rows: Sequence[int]) -> tuple[list[tuple[float, int, int]], BatchEngine[EmulatedPiece]]:
    """Returns second, input (as a letter) and block of every answer of a device that sleeps for the profile's times."""
    clock, log = ManualClock(), list[tuple[float, int, int]]()

    def deliver(releases: list[Release[EmulatedPiece]]) -> None:
        for each in releases:
            if isinstance(each, Answered):
                log.append((clock.now_s(), int(each.answer.sample_id.partition("#")[2]), each.answer.exit))

    table = problem(ramp_s=0.125).latency["cpu"]
    runner = PacedRunner(recorded(HALF), table, RAMPS, time_scale=1.0, clock=clock, sleep=clock.advance)
    engine = BatchEngine[EmulatedPiece](served_by.splits, ObservedTimes())
    singles = piece_of([f"{'abcd'[row]}#{number}" for number, row in enumerate(rows)]).singles()
    engine.submit(0, [Member(sample_id=each.sample_ids[0], payload=each) for each in singles], 0.0)
    Device(engine, runner, clock, deliver).run_until_idle()
    assert np.all(np.diff([at_s for at_s, _, _ in log]) >= 0)
    return log, engine
