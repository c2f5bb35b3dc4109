"""Tests of steps of sequences: which steps wait for which, what is filled in, and when early tokens are answered."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from cluster.emulated import Pace
from deployments.ingress.core.inputs import PendingInput
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import SplitCounts
from earlyexit.errors import PlanError
from earlyexit.policies.threshold import ForeseenPolicy, SimilarPolicy
from optimizer.generation.demand import Generation
from optimizer.generation.seconds import DecoderSeconds
from optimizer.plans.plan import PolicySpec
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from simulator.scenario import Scenario
from simulator.simulate import generate
from simulator.work import LATE, Behind, StepMember, StepSize, StepWork, leave
from tests.simulator.test_generate import ALONE, case, told
from tests.simulator.tiny_cases import AT_0, RAMPS, TO_END, plan, split, stage

EARLY = plan(stage(1, split(0, 4, ramps=RAMPS[:1])))
PROMPTS = LatencyTable(batches=(1,), block_s_NB=np.full((4, 1), 2.0), ramp_s_EB=np.zeros((3, 1)), length=4)


def asking(given: Scenario, **changes: object) -> Scenario:
    """Returns a scenario of generation."""
    generation = Generation(prompt=Lengths(mean=1), output=Lengths(mean=3), **changes)  # type: ignore[arg-type]
    return replace(given, problem=replace(given.problem, generation=generation))


def with_table(given: Scenario, **changes: object) -> Scenario:
    table = replace(given.problem.latency["cpu"], **changes)  # type: ignore[arg-type]
    return replace(given, problem=replace(given.problem, latency={"cpu": table}))


def test_tokens_that_left_early_run_with_the_next_surviving_token() -> None:
    # The first step, of the prompt, runs all; the second leaves after block 0; the third runs it too, 1.25 s a block.
    rows = (TO_END, AT_0, TO_END)
    assert told(generate(case(EARLY, (1, 3), rows=rows))) == [(3, 4.0, (1.0 + 1.0 + 3 * 1.25) / 2)]
    copied = asking(case(EARLY, (1, 3), rows=rows), fill="copy", copy_share=0.4)
    assert told(generate(copied)) == [(3, 4.0, (1.0 + 1.0 + 3 * 1.1) / 2)]
    # A prompt that left takes the time of a prompt there too, and 0.25 s more beside the token that fills it in.
    prompted = asking(case(EARLY, (4, 2), rows=(AT_0, TO_END)), prefill={"cpu": PROMPTS})
    assert told(generate(prompted)) == [(2, 2.0, 1.0 + 3 * 2.25)]
    behind = Counter({(0, False): 2, (0, True): 5, (2, False): 1})
    leave(behind, 1, 1)
    assert behind == {(1, False): 3, (1, True): 5, (2, False): 1}


def test_a_longer_context_a_prompt_beside_steps_and_the_head_take_the_measured_time() -> None:
    # The prompt 1.25 s a block, a step after 2 tokens 1 s, one after 3 tokens 1.25 s.
    assert told(generate(with_table(case(ALONE, (2, 3)), context=2, context_s=0.25))) == [(3, 5.0, (4.0 + 5.0) / 2)]
    given = asking(case(ALONE, (1, 2), (4, 2), arrivals_s=(0.0, 0.5)), prefill={"cpu": PROMPTS})
    # One at 4 s; then a step beside the prompt, 2 s a block and 0.25 s for one more of four.
    assert told(generate(given)) == [(2, 4.0, 9.0), (2, 12.5, 4.0)]
    # The head runs on one token of every input.
    block_s_NB = case(ALONE, (1, 1)).problem.latency["cpu"].block_s_NB.copy()
    block_s_NB[-1] += [0.5, 1.0, 2.0]
    given = with_table(case(ALONE, (4, 1)), block_s_NB=block_s_NB)
    assert told(generate(given))[0][1] == 4 * 1.75 + 0.5


@pytest.mark.parametrize(("policy", "second_s"), [("confidence", 1.5), ("foreseen", 1.5 + 3 * 1.25)])
def test_a_token_that_leaves_by_the_shared_head_is_answered_late(policy: str, second_s: float) -> None:
    """One sequence's second token leaves after block 0, beside the prompt of the other sequence."""
    plan_of = replace(EARLY, policy=PolicySpec(name=policy, thresholds=0.4))
    given = case(plan_of, (2, 2), (2, 2), rows=(TO_END, TO_END, AT_0, TO_END))
    assert generate(given).tpot_s_K[0] == second_s


def test_policies_that_decide_before_the_head_are_those_of_the_engine() -> None:
    assert {each.name for each in (ForeseenPolicy, SimilarPolicy)} == set(LATE)
    assert all(each.foresees is not None for each in (ForeseenPolicy, SimilarPolicy))


def test_a_batch_does_not_wait_for_a_finished_sequence() -> None:
    assert told(generate(case(ALONE, (1, 1), (1, 1), arrivals_s=(0.0, 1.0))))[1][1] == 4.0 - 1.0 + 4.0


def test_more_sequences_than_a_batch_holds_take_turns() -> None:
    small = plan(stage(1, split(0, 4, batch=2)))
    given = case(small, (1, 4), (1, 4), (1, 1), arrivals_s=(0.0, 0.5, 6.0))
    assert given.sequences is not None
    timed = replace(given, sequences=replace(given.sequences, timeout_s=100.0))
    limited, free = told(generate(timed)), told(generate(given))
    assert [each[:2] for each in limited] == [each[:2] for each in free]
    assert limited[2][1] < 24.0 - 6.0  # it does not wait for the end of the first


def test_steps_that_stay_or_overlap_are_refused() -> None:
    staying = plan(stage(1, replace(split(0, 4), after_answer="stay")))
    with pytest.raises(PlanError, match="neither stay"):
        case(staying, (1, 2))


@pytest.mark.parametrize(("probe", "behind"), [(True, {}), (False, {(0, False): 1})])
def test_a_probe_takes_the_time_of_every_ramp_and_skips_no_block(probe: bool, behind: Behind) -> None:
    table = case(EARLY, (1, 1)).problem.latency["cpu"]
    table = replace(table, ramp_s_EB=np.full((len(RAMPS), len(table.batches)), 0.5))
    only_0 = EARLY.stages[0].splits[0]
    seconds, pace = DecoderSeconds(table), Pace(table, RAMPS, 1.0)
    leaves_at_0 = array("h", [0])
    work = StepWork(
        *(only_0, leaves_at_0, pace, SplitCounts(only_0.budget)),
        seconds=seconds,
        ramps=RAMPS,
        num_blocks=4,
        fill=1.0,
        policy=None,
    )
    alone = StepSize(inputs=1, steps=1, prompt=0, context=0, behind=Counter())
    assert work.until_s(alone, RAMPS)[-1] - work.until_s(alone)[-1] == 0.5 * (len(RAMPS) - 1)
    pending = PendingInput(0, 0.0, 1.0)
    step = StepMember(sample_id="", payload=pending, tokens=1, context=0, behind=Counter())
    work.count(Batch(split=only_0, members=(step,), tokens=1, started_s=0.0, probe=probe), 1.0)
    assert step.behind == behind
