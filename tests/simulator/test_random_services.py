"""Tests that, for any plan, load and limits, every input has exactly one outcome, which is right."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.engine.engine import Dispatch
from earlyexit.network.boundary import AfterAnswer, Split
from optimizer.plans.plan import Plan, Stage
from simulator.events import CONTROLS
from simulator.inputs import NOWHERE
from simulator.outcome import UNANSWERED, Outcome
from simulator.processes import SimulatedReplica
from simulator.scenario import Scenario
from simulator.service import SimulatedService
from simulator.simulate import booted, play
from tests.simulator.tiny_cases import DECISIONS, NUM_BLOCKS, RAMPS, kill, plan, scenario

AFTER_ANSWERS: tuple[AfterAnswer, ...] = ("stop", "stay")
DISPATCHES: tuple[Dispatch, ...] = ("work-conserving", "deferred")
BEGIN_S = st.one_of(st.just(0.0), st.floats(0, 40), st.integers(0, 40).map(float))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    after_answer = draw(st.sampled_from(AFTER_ANSWERS))
    cuts = [0, *sorted(draw(st.sets(st.integers(1, NUM_BLOCKS - 1)))), NUM_BLOCKS]
    active = draw(st.sets(st.sampled_from(RAMPS)))
    splits = [
        Split(
            first=first,
            end=end,
            batch=draw(st.integers(1, 4)),
            ramps=tuple(ramp for ramp in sorted(active) if first <= ramp < end),
            after_answer=after_answer,
        )
        for first, end in pairwise(cuts)
    ]
    bounds = [0, *sorted(draw(st.sets(st.integers(1, len(splits))))), len(splits)]
    stages = [
        Stage(device="cpu", replicas=draw(st.integers(1, 2)), splits=tuple(splits[begin:end]))
        for begin, end in pairwise(bounds)
        if begin < end
    ]
    drawn = plan(*stages, dispatch=draw(st.sampled_from(DISPATCHES)), rate_per_s=draw(st.floats(0.1, 2)), latency_s=5.0)
    return drawn.with_splits(overlap_below=draw(st.none() | st.integers(1, 5)))


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    arrivals_s = sorted(draw(st.lists(BEGIN_S, max_size=40)))
    options: dict[str, Any] = {
        "slo_s": draw(st.sampled_from([math.inf, 0.5, 5.0, 10.0, 40.0])),
        "admission": draw(st.booleans()),
        "inputs_per_request": draw(st.integers(1, 5)),
        "num_ingresses": draw(st.integers(1, 3)),
        "calls_per_replica": draw(st.integers(1, 3)),
        "max_queued": draw(st.none() | st.integers(5, 20)),
        "duration_s": 50.0,
    }
    rows = draw(st.lists(st.integers(0, len(RAMPS)), min_size=1, max_size=7))
    return scenario(draw(plans()), arrivals_s, rows, **options)


def check(service: SimulatedService, outcome: Outcome) -> None:
    """Checks one outcome per input, answers by the decisions, and latencies that are not below the work's time."""
    given_to, answered_N = service.scenario, ~np.isnan(outcome.latency_s_N)
    assert (answered_N == (outcome.drop_N < 0)).all()
    assert (answered_N == (outcome.exit_N >= 0)).all()
    assert not (outcome.drop_N == UNANSWERED).any()
    rows_N = np.resize(given_to.rows_N, len(answered_N))
    leaves_N = DECISIONS.leaves_N(given_to.plan.ramps, given_to.plan.ramps)[rows_N]
    exits_N = np.where(leaves_N == NOWHERE, NUM_BLOCKS - 1, leaves_N)
    assert (outcome.exit_N == exits_N)[answered_N].all()
    assert (outcome.latency_s_N >= exits_N + 1.0 - 1e-9)[answered_N].all()
    assert all(not ingress.core.num_waiting and not ingress.core.num_unanswered for ingress in service.ingresses)
    assert all(not replica.engine.num_waiting for replica in service.replicas() if replica.is_up)


FEW_AND_MANY = pytest.mark.parametrize("examples", [40, pytest.param(600, marks=pytest.mark.slow)])


@FEW_AND_MANY
def test_every_input_has_exactly_one_outcome(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(scenarios())
    def has_one(drawn: Scenario) -> None:
        service = booted(drawn)
        outcome = play(service)
        check(service, outcome)
        assert all(not replica.calls for replica in service.replicas())
        assert all(slot.utilisation <= 1 + 1e-9 for slot in outcome.slots)
        for split in outcome.splits:
            reached_N = outcome.exit_N >= split.first
            assert reached_N.sum() <= split.inputs <= split.batches * split.batch
            assert 0 < split.fill <= 1
            if drawn.plan.after_answer == "stay" and math.isinf(drawn.slo_s):
                assert split.inputs == (outcome.exit_N >= 0).sum()  # inputs that stay run to the end, answered or not
        if math.isinf(drawn.slo_s) and drawn.max_queued is None:
            assert not (outcome.drop_N >= 0).any()

    has_one()


TIMES = st.lists(st.tuples(st.floats(0, 60), st.integers(0, 5)), max_size=4)


@FEW_AND_MANY
def test_every_input_has_exactly_one_outcome_while_replicas_start_and_die(examples: int) -> None:
    @settings(max_examples=examples, deadline=None)
    @given(drawn=scenarios(), kills=TIMES, stops=TIMES)
    def has_one(drawn: Scenario, kills: list[tuple[float, int]], stops: list[tuple[float, int]]) -> None:
        service = booted(drawn)

        def start(device: str) -> None:
            service.start(device)

        def replace(ending: tuple[Callable[[SimulatedReplica], None], int]) -> None:
            end, which = ending
            running = [replica for replicas in service.running.values() for replica in replicas.values()]
            if running:
                replica = running[which % len(running)]
                end(replica)
                back_s = service.events.time_s + 3 * (which % 2)
                service.events.at(back_s, CONTROLS, start, replica.device)

        for end, times in ((partial(kill, service), kills), (service.stop, stops)):
            for at_s, which in times:
                service.events.at(at_s, CONTROLS, replace, (end, which))
        check(service, play(service))

    has_one()
