"""What an ingress tells the controller."""

from __future__ import annotations

from simulator.controlled import Controlled, ReplicaDies, simulate_controlled
from tests.simulator.controlled_cases import control, evenly, halves, problem, rows, scenario


def probed(share: float, *faults: ReplicaDies) -> Controlled:
    """31 s of 100 inputs/s, of which 6 of 10 are easy; the last look is at 30 s."""
    made = scenario(halves(2, 2), evenly(100, 31), rows(0.6), duration_s=31.0)
    return simulate_controlled(made, control(problem(0.6), hold=True, probe_share=share), faults=faults)


def test_probes_are_handed_over_once() -> None:
    (report,) = probed(1.0).reports
    assert report.probes is not None
    # At every look before, the others were; of the last second there are 100, and those inside at 30 s.
    assert 100 <= len(report.probes) < 120
    assert report.answered == report.arrived == 3100


def test_probes_on_a_dead_replica_start_again_and_answered_ones_do_not() -> None:
    result = probed(1.0, ReplicaDies(at_s=15.031, slot="split-cpu-1"))  # it holds what was answered after block 1
    (report,) = result.reports
    assert (report.answered, report.drops) == (3100, {})
    assert sum(report.exits.values()) == 3100
