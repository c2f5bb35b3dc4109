"""Tests of sequences by hand-made timetables: a block takes 1 s for a token, and 0.25 s more for each further one."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from deployments.ingress.core.calls import bucket_of
from deployments.ingress.core.generation import GenerationLoop
from deployments.ingress.core.inputs import IngressOptions
from deployments.ingress.core.routes import lost
from earlyexit.errors import DataError, OverloadedError
from earlyexit.sequences.sequence import SequenceProgress
from optimizer.plans.plan import PlacedPlan, Plan
from simulator.scenario import Scenario, SequenceLengths
from simulator.sequences import GeneratingIngress
from simulator.simulate import PlayedSequences, booted, generate
from tests.simulator.tiny_cases import AT_0, RAMPS, TO_END, kill, plan, problem, scenario, split, stage

ALONE = plan(stage(1, split(0, 4)))
TWO_STAGES = plan(stage(2, split(0, 2)), stage(2, split(2, 4)))


def case(
    served_by: Plan,
    *lengths: tuple[int, int],
    arrivals_s: tuple[float, ...] | None = None,
    rows: tuple[int, ...] = (TO_END,),
    chunk: int = 8,
    **options: Any,
) -> Scenario:
    """Returns a scenario; `lengths` has the tokens of prompt and answer of every sequence."""
    given = problem()
    tables = {"cpu": replace(given.latency["cpu"], length=1)}
    prompt_K, answer_K = (np.array(each, dtype=np.int64) for each in zip(*lengths, strict=True))
    return scenario(
        served_by,
        (0.0,) * len(lengths) if arrivals_s is None else arrivals_s,
        rows,
        problem=replace(given, latency=tables),
        sequences=SequenceLengths(prompt_K=prompt_K, answer_K=answer_K, chunk=chunk),
        **options,
    )


def told(found: PlayedSequences) -> list[tuple[int, float, float]]:
    """Returns the tokens, the time to the first, and the time per further token of every sequence."""
    return list(zip(found.tokens_K.tolist(), found.ttft_s_K.tolist(), found.tpot_s_K.tolist(), strict=True))


def test_a_sequence_takes_its_prompt_and_then_a_step_per_token() -> None:
    found = generate(case(ALONE, (2, 3)))
    assert told(found) == [(3, 4 * 1.25, 4.0)]
    assert (found.ended_s, found.exits) == (13.0, {3: 3})
    # The parts of a prompt that is longer than a chunk run one after the other.
    assert told(generate(case(ALONE, (5, 2), chunk=2))) == [(2, 5.0 + 5.0 + 4.0, 4.0)]
    # The first token of the one at 4 s; the other's first and its second share a step of 5 s.
    assert told(generate(case(ALONE, (1, 2), (1, 3)))) == [(2, 4.0, 5.0), (3, 9.0, 4.0)]
    early = plan(stage(1, split(0, 1, ramps=RAMPS[:1]), split(1, 4)))
    found = generate(case(early, (1, 3), rows=(TO_END, AT_0, AT_0)))
    assert (told(found), found.exits) == ([(3, 4.0, 1.0)], {0: 2, 3: 1})


def test_a_sequence_stays_with_its_replicas_stage_by_stage() -> None:
    service = booted(case(TWO_STAGES, (1, 4), (1, 4), (1, 4)))
    [ingress] = service.ingresses
    assert isinstance(ingress, GeneratingIngress)
    places: dict[int, set[tuple[str, str]]] = {}
    for number in range(3):
        ingress.arrive(number)
    while service.events.next_s < np.inf:
        service.events.run_arrivals([service.events.next_s], lambda _: None)
        for state in ingress._states.values():
            keepers = {(slot, each.replica.name) for slot, each in state.placement.keepers.items()}
            places.setdefault(state.placement.number, set()).update(keepers)
    assert [len(each) for each in places.values()] == [2, 2, 2]
    assert len(set().union(*places.values())) == 4
    assert ingress.num_tokens.tolist() == [4, 4, 4]
    assert not any(each.sequences for slot in service.slots.values() for each in slot.by_ingress[0]._known.values())


@pytest.mark.parametrize(("at_s", "ended_s"), [(2.0, 2.0 + 3 * 4.0), (8.0, 8.0 + 6.0), (8.5, 8.5 + 6.0)])
def test_a_sequence_whose_replica_dies_continues_on_another(at_s: float, ended_s: float) -> None:
    """Its tokens so far, one or three, are part of the prompt on the other replica."""
    service = booted(case(plan(stage(2, split(0, 4))), (1, 3)))
    [ingress] = service.ingresses
    assert isinstance(ingress, GeneratingIngress)
    ingress.arrive(0)
    service.events.run_arrivals([at_s], lambda _: None)
    [state] = ingress._states.values()
    [keeper] = state.placement.keepers.values()
    kill(service, keeper.replica)
    service.events.run_out()
    counts = ingress.loop.counts
    assert (counts.lost, counts.ended, counts.exits.total()) == (1, {"length": 1}, 3)
    assert (service.events.time_s, ingress.core.num_unanswered) == (ended_s, 0)


def test_a_sequence_that_started_waits_as_long_as_all_replicas_are_full() -> None:
    loop = GenerationLoop(IngressOptions(), ALONE, Random(0))
    state = loop.begin(SequenceProgress(1, 9, 1), 0.0)
    loop.on_token(state, 3, 1.0)
    assert max(loop.retry(state, OverloadedError("no pages")) for _ in range(30)) < 5.0
    loop.retry(state, lost("its replica died"))


def test_every_sequence_counts_once_towards_each_latency_that_it_has() -> None:
    loop = GenerationLoop(IngressOptions(), ALONE, Random(0))
    for num_tokens in (1, 3):
        state = loop.begin(SequenceProgress(1, 9, 1), 0.0)
        for k in range(num_tokens):
            loop.on_token(state, 3, 2.0 + k)
        loop.end(state, "length")
    assert (loop.counts.ttft, loop.counts.tpot) == ({bucket_of(2.0): 2}, {bucket_of(1.0): 1})
    assert (loop.counts.exits, loop.counts.in_slo) == ({3: 4}, 2)


def test_only_a_plan_that_moves_blocks_restarts_sequences() -> None:
    service = booted(case(ALONE, (1, 4)))
    [ingress] = service.ingresses
    assert isinstance(ingress, GeneratingIngress)
    ingress.arrive(0)
    service.events.run_arrivals([4.5], lambda _: None)
    smaller = replace(ALONE, stages=(stage(1, split(0, 4, batch=2)),), epoch=1)
    service.follow(PlacedPlan(plan=smaller))
    service.events.run_arrivals([8.5], lambda _: None)
    assert ingress.loop.counts.lost == 0


def test_a_sequence_that_cannot_keep_its_slo_is_refused() -> None:
    given = case(ALONE, *((1, 20),) * 8, arrivals_s=tuple(float(10 * k) for k in range(8)))
    assert given.sequences is not None
    strict = replace(given, sequences=replace(given.sequences, tpot_slo_s=5.0))
    counts = generate(strict).counts[0]
    assert counts.refused > 0
    assert counts.ended.total() + counts.refused == 8


def test_equal_scenarios_give_equal_outcomes() -> None:
    lengths = [(1 + k % 5, 1 + k % 7) for k in range(40)]
    made = [generate(case(TWO_STAGES, *lengths, rows=(0, 3, 1), num_ingresses=2)) for _ in range(2)]
    assert str(told(made[0])) == str(told(made[1]))  # times are NaN without a second token
    assert made[0].tokens_K.tolist() == [answer for _, answer in lengths]


def test_an_invalid_sequence_is_refused() -> None:
    with pytest.raises(DataError, match="at least one token"):
        case(ALONE, (0, 3))
    with pytest.raises(DataError, match="one sequence"):
        case(ALONE, (1, 3), slo_s=5.0)
