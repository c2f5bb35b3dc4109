"""How long a crossing takes an ingress: the live dispatcher and core with a chain's real codecs, without a network.

    python -m experiments.costs.crossings [--model runs/cascade/clinc150] [--rounds 200]

Survivors of a network come back, texts of CLINC150 or of a CSV file, and are on their way to the next one, encoded anew
for it: from the part of a reply until the next stage's connection has the call. Milliseconds per crossing by survivors
in it, and processor time per input. Where `is_slow` has it, texts are encoded beside the event loop. Minutes: under 1.
"""

from __future__ import annotations

import asyncio
import random
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from deployments.ingress.core.homes import Homes
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.rules import Rules
from deployments.ingress.dispatch.departure import LiveFlight, Query
from deployments.ingress.dispatch.dispatcher import Dispatcher
from deployments.ingress.dispatch.entrance import entrance_of
from deployments.ingress.transport.transport import Transport
from deployments.messages import Chunk, GoingOn, StageCall, Timing
from earlyexit.chain import Chain
from earlyexit.clock import MonotonicClock
from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.dataset import read_labelled
from earlyexit.errors import OfframpError
from earlyexit.split import Split
from earlyexit.store import read_card
from earlyexit.wire import Answer, WirePiece
from experiments.data import RUNS, require_data
from experiments.kit import keep, show
from optimizer.placement import initial_placement
from optimizer.plan import Plan, Stage

SIZES = (1, 4, 8, 16)
"""Survivors that cross together."""
TIMING = Timing(queue_s=0.0, compute_s=0.0)
DATA = "clinc150/data_full.json"


class Networks:
    """Stages of two networks: of the first all go on, the second answers all, and notes when it was called."""

    def __init__(self, chain: Chain) -> None:
        self.took_s: list[float] = []
        self._chain = chain
        self._left_s = 0.0

    async def call(
        self,
        call: StageCall,
        *,
        weight: int,
        batch: int,
        avoided: frozenset[str],
        take: Callable[[Chunk], None],
        homes: Homes | None = None,
    ) -> None:
        del weight, batch, avoided, homes
        piece, size = call.piece, len(call.piece.sample_ids)
        if piece.next_block:
            self.took_s.append(time.perf_counter() - self._left_s)
            last = self._chain.num_blocks - 1
            said = tuple((Answer(sample_id=each, value=0, score=1.0, exit=last), TIMING) for each in piece.sample_ids)
            take(Chunk(answers=said))
            return
        await asyncio.sleep(0)
        survivors = WirePiece(
            sample_ids=piece.sample_ids,
            next_block=self._chain.starts[1],
            lengths_B=piece.lengths_B,
            tensors=(),
            state_BS=np.zeros((size, 0), dtype=np.float32),
        )
        self._left_s = time.perf_counter()
        take(Chunk(going_on=GoingOn(piece=survivors, timings=(TIMING,) * size)))

    def end(self, replica: str, sequence: int) -> None:
        raise AssertionError("there are no sequences")


class CountsNothing:
    """Metrics that nobody reads."""

    def answers(self, exits: list[int]) -> None: ...
    def dropped(self, reason: str, num_inputs: int) -> None: ...
    def hop(self, slot: str, seconds: float) -> None: ...
    def retried(self, slot: str, num_inputs: int) -> None: ...


def told(answered: asyncio.Queue[Any], _: LiveFlight, outcome: Answer | OfframpError) -> None:
    """Pass an outcome on."""
    answered.put_nowait(outcome)


async def crossings(codec: ChainCodec, chain: Chain, texts: Sequence[str], size: int, rounds: int) -> list[float]:
    """Seconds of every crossing, one after the other."""
    stages = tuple(
        Stage(device="cpu", replicas=1, splits=(Split(first=start, end=end, batch=size),))
        for start, end in zip(chain.starts, chain.bounds, strict=True)
    )
    placed = initial_placement(Plan(stages=stages, networks=chain.networks))
    networks = Networks(chain)
    ways: dict[str, Transport] = dict.fromkeys(placed.slots, networks)
    core: IngressCore[Query, Transport] = IngressCore(
        "i", placed, ways, Rules(calls_per_replica=2, max_attempts=1), random.Random(0)
    )
    dispatcher = Dispatcher(core, MonotonicClock(), CountsNothing(), entrance=entrance_of("i", codec))
    for number in range(rounds):
        rows = [texts[(number * size + k) % len(texts)] for k in range(size)]
        encoded = codec.encode_for(rows, core.itinerary.used, truncate=True)
        answered = asyncio.Queue[Any]()
        inputs = [("", each) for each in encoded]
        for _ in dispatcher.submit(inputs, time.monotonic() + 60, partial(told, answered)):
            outcome = await answered.get()
            assert isinstance(outcome, Answer), outcome
    return networks.took_s


def figures(codec: ChainCodec, chain: Chain, texts: Sequence[str], rounds: int) -> list[dict[str, float]]:
    """By survivors in a crossing."""
    found = []
    for size in SIZES:
        began_s = time.process_time()
        took_s = asyncio.run(crossings(codec, chain, texts, size, rounds))
        cpu_s = (time.process_time() - began_s) / rounds / size
        p50_s, p99_s = np.percentile(took_s, (50, 99))
        found.append({"size": size, "p50_ms": 1e3 * p50_s, "p99_ms": 1e3 * p99_s, "whole_way_us": 1e6 * cpu_s})
    return found


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.costs.crossings", description=__doc__)
    parser.add_argument("--model", type=Path, default=RUNS / "cascade" / "clinc150")
    parser.add_argument("--csv", type=Path, help="texts of another data set")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    card = read_card(options.model)
    codec = find_codec(card.codec, options.model)
    assert isinstance(codec, ChainCodec), f"{options.model} is no chain"
    rows = read_labelled(require_data(DATA), part="test") if options.csv is None else read_labelled(options.csv)
    texts: list[str] = codec.from_columns(rows.columns)
    found = figures(codec, card.chain, texts, options.rounds)
    columns = ("survivors", "p50 ms", "p99 ms", "us of processor time an input, both networks")
    table = [
        (str(each["size"]), *(f"{each[name]:.2f}" for name in ("p50_ms", "p99_ms", "whole_way_us"))) for each in found
    ]
    length = sum(map(len, texts)) / len(texts)
    show(f"crossings at an ingress, texts of {length:.0f} characters", columns, table)
    print(f"written: {keep({'length': length, 'crossings': found}, RUNS / 'live' / 'crossing_times.json')}")


if __name__ == "__main__":
    main()
