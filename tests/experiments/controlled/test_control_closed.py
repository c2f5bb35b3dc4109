"""Tests of the load on a controlled service, and of external faults."""

from __future__ import annotations

import math

import numpy as np

from experiments.controlled import Closed, Mix, rows_in_turn, simulate_controlled
from tests.experiments.controlled.controlled_cases import EASY, HARD, control, halves, problem, scenario, whole
from tests.experiments.controlled.troubles import Fault, with_faults


def test_the_number_of_inputs_in_flight_is_the_loads_for_the_current_mix() -> None:
    closed = Closed(in_flight=8, mixes=(Mix(at_s=0.0, rows_N=np.array([HARD])),))
    made = scenario(whole(2), np.zeros(0), closed.rows_N, duration_s=1.0, slo_s=math.inf, admission=False)
    outcome = simulate_controlled(made, control(problem(0.0), hold=True), closed=closed).outcome
    # Two replicas run batches of 4 in 40 ms: 25 rounds of 8 per second.
    assert len(outcome.latency_s_N) == 200
    assert np.unique(outcome.latency_s_N.round(9)).tolist() == [0.04]
    mixes = (Mix(at_s=0.0, rows_N=np.array([EASY, EASY])), Mix(at_s=1.0, rows_N=np.array([HARD, HARD])))
    closed = Closed(in_flight=4, mixes=mixes)
    made = scenario(halves(1, 1), np.zeros(0), closed.rows_N, duration_s=2.0, admission=False)
    outcome = simulate_controlled(made, control(problem(0.0), hold=True), closed=closed).outcome
    early_N = outcome.arrived_s_R < 1.0
    assert set(outcome.exit_N[early_N]) == {1}
    assert set(outcome.exit_N[~early_N]) == {3}


def test_refused_inputs_are_sent_again_after_a_pause() -> None:
    closed = Closed(in_flight=2, mixes=(Mix(at_s=0.0, rows_N=np.array([HARD])),), pause_s=0.5)
    made = scenario(whole(4), np.zeros(0), closed.rows_N, duration_s=20.0, admission=False)
    lost = Fault(at_s=5.0, happen=lambda fleet: fleet.lose("cpu", (0, 1, 2, 3)))
    outcome = simulate_controlled(made, control(problem(0.0), make_fleet=with_faults(lost)), closed=closed).outcome
    refused_N = outcome.drop_N >= 0
    assert refused_N.sum() < 2 * 15 / 0.5 + 2
    assert (refused_N ^ ~np.isnan(outcome.latency_s_N)).all()


def test_inputs_come_from_the_mix_at_the_arrival_of_their_request() -> None:
    mixes = [Mix(at_s=0.0, rows_N=np.array([0, 1])), Mix(at_s=2.0, rows_N=np.array([5]))]
    assert rows_in_turn(mixes, np.array([0.0, 1.0, 1.9, 2.0, 3.0])).tolist() == [0, 1, 0, 5, 5]
    assert rows_in_turn(mixes, np.array([1.0, 2.5]), inputs_per_request=3).tolist() == [0, 1, 0, 5, 5, 5]
