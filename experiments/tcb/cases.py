"""The workloads of TCB's section 6, and what was taken where the paper leaves something open."""

from __future__ import annotations

import math
from typing import Final

import numpy as np

from earlyexit.order import OrderSpec
from experiments.tcb.cost import Cost, published_v100
from experiments.tcb.device import Side, Stream, serve
from simulator.decisions import IntArray
from simulator.lengths import truncated_normal
from simulator.scenario import FloatArray

LOW, HIGH, MEAN = 3, 100, 20
"""Tokens (section 6.2.1)."""
BATCH = 64
"""Inputs of TNB's batch, and rows of TCB's."""
ROW = 100
"""Tokens of TCB's rows. The paper does not say; what is longer than the longest input has no need."""
DEADLINES_S: Final = (1.0, 3.0)
"""Every request's time is drawn evenly between these. The paper does not say; a batch of 64 rows takes 0.2 to 0.6 s."""
SATURATED_PER_S = 350.0
"""Where the paper's TNB is saturated (figure 9): the device is made so slow that ours is, too."""
DRAWN = 12_800
"""Lengths; then they come again."""
SEED = 0
ARRIVAL, DAS, SHORTEST, DEADLINE = (
    OrderSpec(name="arrival"),
    OrderSpec(name="das", overdue_s=math.inf),
    OrderSpec(name="shortest", overdue_s=math.inf),
    OrderSpec(name="deadline", overdue_s=math.inf),
)
"""Eta and q of DAS are a half each: what the paper's theorem is told for. Nobody is overdue: the
paper has no such rule, its deadlines end every wait."""

ANY = 10_000
"""Inputs of a batch that is bounded by tokens."""

TNB = Side(scheme="padded", inputs=BATCH)
TTB = Side(scheme="grouped", inputs=ANY, tokens=BATCH * ROW)
"""Its dynamic program has the inputs of TCB's batch to choose from."""
TCB = Side(scheme="rows", inputs=ANY, tokens=BATCH * ROW, row=ROW)
SLOTTED_TCB = Side(scheme="slotted rows", inputs=ANY, tokens=BATCH * ROW, row=ROW)
PACKED = Side(scheme="packed", inputs=BATCH)
"""As many inputs as TNB's."""
PACKED_FULL = Side(scheme="packed", inputs=ANY, tokens=BATCH * ROW)
"""As many tokens as TCB's rows have places."""


def lengths(num: int, variance: float, seed: int = SEED) -> IntArray:
    """Of requests."""
    return truncated_normal(num, mean=MEAN, variance=variance, low=LOW, high=HIGH, seed=seed)


def stream(
    rate_per_s: float,
    num: int,
    drawn: IntArray,
    *,
    deadlines_s: tuple[float, float] = DEADLINES_S,
    seed: int = SEED,
) -> Stream:
    """Poisson arrivals, at any rate in the same order and with the same draws, so that chance does not move between."""
    rng = np.random.default_rng(seed)
    arrivals_s: FloatArray = np.cumsum(rng.exponential(1.0, num)) / rate_per_s
    return Stream(
        arrivals_s=arrivals_s,
        lengths=np.resize(drawn, num),
        deadlines_s=arrivals_s + rng.uniform(*deadlines_s, num),
    )


def saturated(drawn: IntArray) -> Stream:
    """Everything there at once, without deadlines: what is served per second is what the device can do."""
    zeros = np.zeros(len(drawn))
    return Stream(arrivals_s=zeros, lengths=drawn, deadlines_s=np.full(len(drawn), np.inf))


def capacity(side: Side, drawn: IntArray, cost: Cost, order: OrderSpec = ARRIVAL) -> float:
    """Requests per second where every batch is full."""
    served = serve(saturated(drawn), side, order, cost)
    return served.per_s(served.in_time_N)


def paper_device(effort_num: int = 6400) -> Cost:
    """The published V100, as many times slower as it takes for TNB to be saturated at the paper's rate."""
    published = published_v100()
    return published.stretched(capacity(TNB, lengths(effort_num, 20), published) / SATURATED_PER_S)
