"""What an ingress tells the controller."""

from __future__ import annotations

import numpy as np
import pytest

from simulator.controlled import Controlled, ReplicaDies, simulate_controlled
from tests.simulator.controlled_cases import control, evenly, halves, problem, rows, scenario, whole


def probed(share: float, *faults: ReplicaDies) -> Controlled:
    """31 s of 100 inputs/s, of which 6 of 10 are easy; the last look is at 30 s."""
    made = scenario(halves(2, 2), evenly(100, 31), rows(0.6), duration_s=31.0)
    return simulate_controlled(made, control(problem(0.6), hold=True, probe_share=share), faults=faults)


def test_a_probe_shows_every_ramp_and_leaves_where_its_plan_lets_it_out() -> None:
    (report,) = probed(1.0).reports
    probes = report.probes
    assert probes is not None
    easy_N = probes.exits_N == 1
    assert np.unique(probes.scores_NR[easy_N], axis=0).tolist() == [[0, 1, 1]]
    assert np.unique(probes.scores_NR[~easy_N], axis=0).tolist() == [[0, 0, 0]]
    assert set(probes.exits_N[~easy_N]) == {3}
    assert probes.active_NR.any(0).tolist() == [False, True, False]
    assert easy_N.mean() == pytest.approx(0.6, abs=0.05)


def test_probes_are_handed_over_once() -> None:
    (report,) = probed(1.0).reports
    assert report.probes is not None
    # At every look before, the others were; of the last second there are 100, and those inside at 30 s.
    assert 100 <= len(report.probes) < 120
    assert report.answered == report.arrived == 3100


def test_without_a_share_there_are_none() -> None:
    (report,) = probed(0.0).reports
    assert report.probes is None


def test_probes_on_a_dead_replica_start_again_and_answered_ones_do_not() -> None:
    result = probed(1.0, ReplicaDies(at_s=15.031, slot="split-cpu-1"))  # it holds what was answered after block 1
    (report,) = result.reports
    assert (report.answered, report.drops) == (3100, {})
    assert sum(report.exits.values()) == 3100


def test_exits_are_counted_anew_under_another_plan() -> None:
    made = scenario(whole(4), evenly(100, 65), rows(0.9), duration_s=65.0)
    result = simulate_controlled(made, control(problem(0.0), probe_share=0.5))
    (report,) = result.reports
    assert report.epoch == 1
    assert report.answered == 6500
    # From 60 s on, less what was inside then, which went to the end.
    assert 490 <= sum(report.exits.values()) <= 500
    assert report.exits[1] == pytest.approx(450, abs=10)
