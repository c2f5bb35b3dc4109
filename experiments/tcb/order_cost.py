"""What choosing a batch costs: processor time of each order's pick, by how many wait, against the batch's own seconds.

    python -m experiments.tcb.order_cost

TCB's figure 16 has its DAS at 2 % of a batch at 400 requests/s, "which already saturate the GPU": a batch of 64 then
takes 64 / 400 s. Lengths are TCB's (3 to 100, mean 20, variance 100), so a batch holds 64 x 20 tokens. Waiting are
those who came while a batch ran (64), and many more, as under overload. The same against a batch of BERT-base on a
V100, which takes 40 times as many requests to saturate. The default order is held against what stood in its place
before there were orders, taking a slice, in turn. Takes half a minute.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from deployments.ingress.core.flights import Flight
from deployments.ingress.core.line import Line
from earlyexit.member import Member, Queue
from earlyexit.order import Order, OrderName, OrderSpec
from earlyexit.split import Budget, Split
from experiments.kit import show
from experiments.tcb.cost import Work, published_v100
from simulator.lengths import truncated_normal

NAMES: tuple[OrderName, ...] = ("deadline", "arrival", "shortest", "das")
BATCH, MEAN = 64, 20
RATE_PER_S = 400.0
WAITING = (64, 160, 400, 1000, 4000)
SLO_S = 20.0
TRIES = 60
TAKES = 2000
SPLIT = Split(first=0, end=1, batch=BATCH, tokens=BATCH * MEAN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one order, where so many wait."""

    order: OrderName
    waiting: int
    engine_s: float
    """Processor seconds of taking a batch out of an engine's queue."""
    ingress_s: float
    """And out of an ingress's line."""

    def share(self, batch_s: float) -> float:
        """Of a batch, both together."""
        return (self.engine_s + self.ingress_s) / batch_s


def members(number: int, seed: int) -> list[Member[None]]:
    """Who came at 400/s until now, the oldest first."""
    lengths = truncated_normal(number, mean=MEAN, variance=100, low=3, high=100, seed=seed)
    return [
        Member(
            sample_id="",
            payload=None,
            tokens=tokens,
            deadline_s=position / RATE_PER_S + SLO_S,
            since_s=position / RATE_PER_S,
        )
        for position, tokens in enumerate(lengths.tolist())
    ]


def measured(name: OrderName, waiting: int, tries: int = TRIES) -> Cost:
    """The median of fresh queues and lines."""
    order, now_s = OrderSpec(name=name).build(), waiting / RATE_PER_S
    engine_s, ingress_s = [], []
    for seed in range(tries):
        who = members(waiting, seed)
        engine_s.append(_engine_s(who, order, now_s))
        ingress_s.append(_ingress_s(who, order, now_s))
    return Cost(order=name, waiting=waiting, engine_s=median(engine_s), ingress_s=median(ingress_s))


def _engine_s(who: Sequence[Member[None]], order: Order, now_s: float) -> float:
    queue: Queue[None] = Queue(SPLIT)
    queue.members = list(who)
    return _processor_s(lambda: queue.take(order, now_s))


def _ingress_s(who: Sequence[Member[None]], order: Order, now_s: float) -> float:
    line: Line[None] = Line()
    for each in who:
        line.join([Flight(None, each.since_s, each.deadline_s, 0, each.tokens)])
    return _processor_s(lambda: line.leave(SPLIT.budget, order, now_s))


def _processor_s(do: Callable[[], object]) -> float:
    began_s = time.thread_time()
    do()
    return time.thread_time() - began_s


def default_over_before(rounds: int = 9, takes: int = TAKES) -> list[float]:
    """Seconds of the default's batches by inputs over those of a slice, as it was before, a ratio per round."""
    split, order = Split(first=0, end=1, batch=BATCH), OrderSpec().build()
    who = members(BATCH * takes, seed=0)

    def run(take: Callable[[Queue[None]], object]) -> float:
        queue: Queue[None] = Queue(split)
        queue.members = list(who[: 8 * BATCH])
        return _processor_s(lambda: _run(queue, take, who[:BATCH], takes))

    return [run(lambda queue: queue.take(order, 0.0)) / run(_slice) for _ in range(rounds)]


def _run(
    queue: Queue[None], take: Callable[[Queue[None]], object], next_ones: Sequence[Member[None]], takes: int
) -> None:
    for _ in range(takes):
        take(queue)
        queue.members += next_ones


def _slice(queue: Queue[None]) -> tuple[Member[None], ...]:
    """`Queue.take` as it was without orders."""
    counts, num_next = queue.counts, _num_next(queue.budget)
    taken = tuple(queue.members[:num_next])
    del queue.members[:num_next]
    num_tokens = sum([member.tokens for member in taken])
    counts.batches += 1
    counts.inputs += len(taken)
    counts.tokens += num_tokens
    return taken


def _num_next(budget: Budget) -> int:
    return budget.inputs


def main() -> None:
    """All orders, and the default against what was before."""
    gc.disable()
    saturating_s, v100_s = BATCH / RATE_PER_S, published_v100().seconds(Work(BATCH * MEAN, BATCH * MEAN * MEAN))
    costs = [measured(name, waiting) for waiting in WAITING for name in NAMES]
    rows = [
        (
            f"{cost.waiting}",
            cost.order,
            f"{cost.engine_s * 1e6:.0f}",
            f"{cost.ingress_s * 1e6:.0f}",
            f"{cost.share(saturating_s):.3%}",
            f"{cost.share(v100_s):.2%}",
        )
        for cost in costs
    ]
    columns = ("waiting", "order", "engine us", "ingress us", "of 160 ms", f"of {v100_s * 1e3:.1f} ms (BERT, V100)")
    show("processor time of choosing a batch of 64 x 20 tokens", columns, rows)
    ratios = default_over_before()
    each_s = measured("deadline", 64).engine_s
    print(f"the default over a slice, per batch: {median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) x")
    print(json.dumps({"default_us": round(each_s * 1e6, 1), "ratio": median(ratios)}), file=sys.stderr)


if __name__ == "__main__":
    np.seterr(all="raise")
    main()
