"""Tests of probes among simulated sequences: the live book has all of their tokens, and none of other sequences."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan
from simulator.events import Events
from simulator.inputs import Probing
from simulator.sequences import GeneratingIngress
from simulator.service import SimulatedService
from tests.exit_records import exit_records
from tests.simulator.test_generate import case
from tests.simulator.tiny_cases import AT_0, AT_2, DECISIONS, RAMPS, TO_END, plan, split, stage

ROWS = (TO_END, AT_0, AT_2)
ANSWERS_NE = np.array([[0, 1, 1, 1], [1, 1, 1, 0], [2, 2, 1, 1], [2, 2, 2, 1]])
RECORDS = exit_records(np.where(DECISIONS.sure_NR, 0.1, 0.9), answers_NE=ANSWERS_NE, score="entropy")
EARLY: Split = split(0, 4, ramps=RAMPS)


def played(share: float, *lengths: tuple[int, int]) -> tuple[SimulatedService, GeneratingIngress]:
    given = replace(case(plan(stage(1, EARLY)), *lengths, rows=ROWS), decisions=DECISIONS)
    events, placed = Events(), PlacedPlan(plan=given.plan)

    def probing(index: int) -> Probing:
        return Probing(RECORDS, given.rows_N, share, random.Random(3))

    service = SimulatedService(given, events, placed, probing)
    service.boot()
    [ingress] = service.ingresses
    assert isinstance(ingress, GeneratingIngress)
    for number in range(len(lengths)):
        ingress.arrive(number)
    events.run_out()
    return service, ingress


def test_a_probe_sequence_answers_all_its_tokens_after_the_last_block() -> None:
    service, ingress = played(1.0, (1, 6))
    seen = ingress.core.report(0.0, 0.0).probes
    assert seen is not None
    assert ingress.loop.counts.exits == {3: 6}
    assert seen.exits_N.tolist() == [3, 0, 2] * 2
    rows = [each % 4 for each in (TO_END, AT_0, AT_2)] * 2
    np.testing.assert_array_equal(seen.scores_NR, RECORDS.scores_NR[rows])
    np.testing.assert_array_equal(seen.losses_NR, RECORDS.losses_NR[rows])
    assert ingress.core.observations.agreement == 1 - 2 / 6  # rows that leave at ramp 0 differ from the full model
    assert service.events.time_s == 6 * 4.0
    # A part of a prompt makes no row.
    _, ingress = played(1.0, (20, 2))
    seen = ingress.core.report(0.0, 0.0).probes
    assert seen is not None
    assert len(seen) == 2


def test_other_sequences_leave_early_beside_probes() -> None:
    _, ingress = played(0.5, (1, 30), (1, 30), (1, 30))
    seen = ingress.core.report(0.0, 0.0).probes
    counts = ingress.loop.counts
    assert seen is not None
    assert (len(seen), counts.probes, counts.ended) == (30 * counts.probes, 2, {"length": 3})
    assert counts.exits[0] > 0
