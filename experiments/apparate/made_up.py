"""Streams drawn at random, for quick runs and tests: ramps that are surer where they are right, until inputs drift."""

from __future__ import annotations

import numpy as np

from experiments.apparate.recording import KINDS, Stream
from profiles.records import ExitRecords
from profiles.table import LatencyTable

NUM_INPUTS = 1800
NUM_BLOCKS = 6
RAMPS = tuple(range(NUM_BLOCKS - 1))
PERIOD = 450
"""Inputs until it is harder, or easier, again."""


def stream(name: str, seed: int = 0, num_inputs: int = NUM_INPUTS, *, hardest: float = 0.6) -> Stream:
    """Inputs whose difficulty, from 0 to 1, lies below 0.3 in one period and reaches up to `hardest` in the next.

    A ramp is right more often the deeper it sits and the easier the input is. It is sure where it is right, and on
    inputs harder than any at the beginning it is sure of wrong answers too.
    """
    rng = np.random.default_rng(seed)
    reach_N = np.where(np.arange(num_inputs) // PERIOD % 2 == 0, 0.3, hardest)
    difficulty_N = rng.uniform(0, 1, num_inputs) * reach_N
    depth_R = (np.array(RAMPS) + 1) / NUM_BLOCKS
    right_NR = rng.uniform(0, 1, (num_inputs, len(RAMPS))) < 1 - difficulty_N[:, None] * (1 - 0.8 * depth_R)
    blind_NR = (difficulty_N[:, None] > 0.3) & (rng.uniform(0, 1, right_NR.shape) < 0.5)
    sure_NR = np.where(right_NR | blind_NR, rng.beta(8, 1, right_NR.shape), rng.beta(3, 3, right_NR.shape))
    records = ExitRecords(
        score="confidence",
        num_blocks=NUM_BLOCKS,
        ramps=RAMPS,
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=sure_NR.astype(np.float32),
        losses_NR=(~right_NR).astype(np.float64),
    )
    return Stream(name=name, kind=KINDS[name], records=records)


def streams() -> list[Stream]:
    """Two, by the names of real ones: one of images, one of texts."""
    return [stream(name, seed) for seed, name in enumerate(("weather", "gradual"))]


def table() -> LatencyTable:
    """Blocks that take as long as each other, and ramps that take a hundredth of the model."""
    batches = (1, 2, 4, 8)
    block_s = [[0.002 + 0.0005 * batch for batch in batches]] * NUM_BLOCKS
    ramp_s = [[0.00015] * len(batches)] * len(RAMPS)
    return LatencyTable.of_rows(batches, block_s, ramp_s)
