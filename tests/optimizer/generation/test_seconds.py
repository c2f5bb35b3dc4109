"""Seconds of a batch of steps that a reader can add up: a block takes 10 s, and 1 s for each token."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimizer.generation.seconds import DecoderSeconds, at_context
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from tests.optimizer.generation.sequences import GENERATION, asking, two_blocks
from tests.optimizer.generation.test_steps import one_split
from tests.optimizer.generation.test_steps import seconds as planned_s

SIZES = (1, 2, 4)
BLOCK_S = 10.0 + np.array([SIZES, SIZES], dtype=float)
STEPS = LatencyTable(batches=SIZES, block_s_NB=BLOCK_S, ramp_s_EB=np.array([[0.5, 0.6, 0.7]]), length=1)
PROMPTS = LatencyTable(batches=(1, 2), block_s_NB=np.array([[11.0, 12.0]] * 2), ramp_s_EB=np.zeros((1, 2)), length=4)


def rows(number: float) -> np.ndarray:
    return np.full(2, number)


def test_steps_prompts_and_the_head_take_what_was_measured() -> None:
    seconds = DecoderSeconds(STEPS, PROMPTS)
    assert seconds.blocks(rows(3)).tolist() == [13.0, 13.0]
    assert seconds.blocks(rows(1.5)).tolist() == [11.5, 11.5]
    assert seconds.blocks(np.array([1.0, 4.0])).tolist() == [11.0, 14.0]
    assert seconds.blocks(rows(0), 8).tolist() == [12.0, 12.0]
    assert seconds.blocks(rows(0), 6).tolist() == [11.5, 11.5]
    assert seconds.blocks(rows(0), 2).tolist() == [11.0, 11.0]
    assert DecoderSeconds(STEPS).blocks(rows(0), 2).tolist() == [12.0, 12.0]
    assert seconds.blocks(rows(2), 8).tolist() == [12.0 + 2.0] * 2
    free = replace(PROMPTS, block_s_NB=np.zeros((2, 2)))
    assert DecoderSeconds(STEPS, free).blocks(rows(2), 8).tolist() == [12.0, 12.0]  # nothing is taken off
    assert seconds.blocks(rows(8)).tolist() == [28.0, 28.0]
    assert seconds.blocks(rows(0), 16).tolist() == [24.0, 24.0]
    last = BLOCK_S + np.array([[0.0], [3.0]])
    seconds = DecoderSeconds(replace(STEPS, block_s_NB=last), PROMPTS, slowness=2.0)
    assert seconds.blocks(rows(1)).tolist() == [22.0, 22.0]
    assert (seconds.head(1), seconds.head(4), seconds.head(8)) == (6.0, 6.0, 12.0)
    assert seconds.ramp(0, 3) == pytest.approx(1.3)


def test_contexts_cost_by_their_tokens_of_which_the_cost_model_counts_the_mean() -> None:
    seconds = DecoderSeconds(replace(STEPS, context=10, context_s=0.25))
    assert seconds.blocks(rows(2), steps=2, context=24).tolist() == [13.0, 13.0]
    assert seconds.blocks(rows(2), steps=2, context=16).tolist() == [11.0, 11.0]
    longer = at_context(replace(STEPS, context=10, context_s=0.25), 14.0)
    assert longer.block_s_NB.tolist() == (BLOCK_S + np.array(SIZES)).tolist()
    assert at_context(STEPS, 14.0) is STEPS
    generation = replace(GENERATION, prompt=Lengths(mean=10), output=Lengths.weighted({2: 0.5, 6: 0.5}))
    assert generation.mean_context == 10 + (1 * 0 + 5 * 2) / 6  # of six steps one is the first, five after 0 to 4 more
    problem = asking(two_blocks(), prompt=Lengths(mean=10), output=Lengths(mean=5))
    table = replace(problem.latency["gpu"], context=1, context_s=1e-4)
    later = replace(problem, latency={"gpu": table})
    [before_s], [after_s] = (planned_s(each, one_split(4)) for each in (problem, later))
    assert after_s - before_s == pytest.approx(4 * 2 * 1e-4 * (10 + 1.5 - 1))  # of four steps in both blocks
