"""What an ingress's own work costs: the live dispatcher and router, without HTTP, tokenizer and network."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import numpy as np

from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Rules
from deployments.ingress.core.routes import FillFirst, KVPlacements, fill_first
from deployments.ingress.crossing import LiveFlight, Query
from deployments.ingress.dispatcher import Dispatcher
from deployments.ingress.link import Transport
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import MonotonicClock
from earlyexit.errors import OfframpError
from earlyexit.network.wire import Answer, Encoded
from optimizer.placement import initial_placement
from optimizer.plan import stock_plan

ROUNDS = 5
TOKENS = Encoded(8, (np.arange(128, dtype=np.int32),))
"""Of an input; what an ingress copies once."""
REPLICA_COUNTS = (10, 100, 1000, 10_000)
BATCHES = (1, 8, 32)
"""Inputs in a call."""
LOOKS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingCost:
    """One choice of a replica."""

    replicas: int
    ranked_s: float
    """`fill_first`, which ranks all replicas."""
    kept_s: float
    """`FillFirst`, which keeps them by load; with the two changes of load that a call brings."""


def routing_costs() -> list[RoutingCost]:
    """Of every number of replicas, at loads as they are near full load."""
    return [_routing_cost(replicas) for replicas in REPLICA_COUNTS]


def dispatch_costs() -> dict[int, float]:
    """Seconds per input that the live dispatcher takes, by inputs per call: from `submit` to the settled answer."""
    return {batch: median(asyncio.run(_dispatch_s(batch)) for _ in range(ROUNDS)) for batch in BATCHES}


def _routing_cost(replicas: int) -> RoutingCost:
    rng = np.random.default_rng(0)
    loads = rng.integers(1, 16, replicas).tolist()
    kept = FillFirst()
    for index, load in enumerate(loads):
        kept.add(index)
        kept.load(index, load)
    ranked_s, kept_s = [], []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for _ in range(max(3, LOOKS * 10 // replicas)):
            fill_first(loads, 4, 8)
        ranked_s.append((time.perf_counter() - start) / max(3, LOOKS * 10 // replicas))
        start = time.perf_counter()
        for _ in range(LOOKS):
            index = kept.choose(4, 8)
            kept.load(index, 4)
            kept.load(index, -4)
        kept_s.append((time.perf_counter() - start) / LOOKS)
    return RoutingCost(replicas=replicas, ranked_s=median(ranked_s), kept_s=median(kept_s))


class CountsNothing:
    """Metrics that are not read."""

    def answers(self, exits: list[int]) -> None: ...
    def dropped(self, reason: str, num_inputs: int) -> None: ...
    def hop(self, slot: str, seconds: float) -> None: ...
    def retried(self, slot: str, num_inputs: int) -> None: ...


class _AnswersAtOnce:
    """A stage that knows every answer."""

    async def call(
        self,
        call: StageCall,
        *,
        weight: int,
        batch: int,
        avoided: frozenset[str],
        take: Callable[[Chunk], None],
        homes: KVPlacements | None = None,
    ) -> None:
        await asyncio.sleep(0)
        timing = Timing(queue_s=0.0, compute_s=0.0)
        take(
            Chunk(
                answers=tuple(
                    (Answer(sample_id=sample_id, value=0, score=1.0, exit=11), timing)
                    for sample_id in call.piece.sample_ids
                )
            )
        )

    def fail_waiting(self) -> None:
        """No call waits here for a replica."""

    def end(self, replica: str, sequence: int) -> None:
        raise AssertionError("there are no sequences")


async def _dispatch_s(batch: int) -> float:
    """Twenty thousand inputs, in requests that fill one call each."""
    placed = initial_placement(stock_plan(12, batch=batch, replicas=64))
    ways: dict[str, Transport] = dict.fromkeys(placed.slots, _AnswersAtOnce())
    rules = Rules(max_queued=100_000, calls_per_replica=2, max_attempts=1, slo_s=10.0)
    core: IngressCore[Query, Transport] = IngressCore("i", placed, ways, rules, random.Random(0))
    dispatcher = Dispatcher(core, MonotonicClock(), CountsNothing())
    left = num_inputs = 20_000 // batch * batch
    done = asyncio.Event()

    def settle(_: LiveFlight, outcome: Answer | OfframpError) -> None:
        nonlocal left
        assert isinstance(outcome, Answer), outcome
        left -= 1
        if not left:
            done.set()

    start = time.perf_counter()
    for first in range(0, num_inputs, batch):
        deadline_s = time.monotonic() + 60
        dispatcher.submit([(str(first + k), TOKENS) for k in range(batch)], deadline_s, settle)
        await asyncio.sleep(0)
    await done.wait()
    return (time.perf_counter() - start) / num_inputs
