"""What an ingress's dispatcher and core cost per input, beside an older commit: no HTTP, no codec, no network.

    python -m experiments.costs.dispatch REVISION [--rounds 5] [--inputs 2000]

Inputs of a single network go through two stages that answer at once; then, on this side alone, those of a chain cross
between two networks whose codecs cost nothing. Bytecodes that the interpreter runs are counted, which no busy machine
changes; processor time is measured in turns. The older commit is checked out below runs/ and run by this environment's
Python. Minutes: about 2.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from pathlib import Path

from experiments.beside import Side, checked_out
from experiments.peers.client import ROOT
from experiments.turns import Figures, in_turns, tell

SIZES = (1, 8, 32)
COUNTED = 64
"""Inputs, or calls where these are more, whose bytecodes are counted."""
SCRIPT = """
import asyncio, json, random, sys, time
import numpy as np
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.rules import Rules
from deployments.ingress.dispatch.dispatcher import Dispatcher
from deployments.messages import Chunk, GoingOn, Timing
from earlyexit.clock import MonotonicClock
from earlyexit.signature import Encoded
from earlyexit.split import Split
from earlyexit.wire import Answer, WirePiece
from optimizer.placement import initial_placement
from optimizer.plan import Plan, Stage

TIMING = Timing(queue_s=0.0, compute_s=0.0)
TOKENS = np.arange(8, dtype=np.int32)
HIDDEN = np.zeros((8, 32), dtype=np.float32)

class Stages:
    async def call(self, call, *, weight, batch, avoided, take, homes=None):
        await asyncio.sleep(0)
        piece = call.piece
        if call.assignment.stage.end == 12:
            answers = tuple((Answer(sample_id=each, value=0, score=1.0, exit=11), TIMING) for each in piece.sample_ids)
            take(Chunk(answers=answers))
            return
        size = len(piece.sample_ids)
        hidden = () if crosses else (np.concatenate([HIDDEN] * size),)
        states = np.zeros((size, 0), dtype=np.float32)
        piece = WirePiece(sample_ids=piece.sample_ids, next_block=6, lengths_B=piece.lengths_B, tensors=hidden,
                          state_BS=states)
        take(Chunk(going_on=GoingOn(piece=piece, timings=(TIMING,) * size)))

class Nothing:
    def __getattr__(self, name):
        return lambda *given: None

def encoded_of_chain():
    from earlyexit.codecs.chain import ChainCodec, ChainEncoded
    codec = ChainCodec.__new__(ChainCodec)
    codec._alike = (0, 1)
    codec.members = (Costless(), Costless())
    codec._inputs = (None, None)
    return codec, lambda: ChainEncoded(8, (TOKENS,), "a row", 0)

class Costless:
    def is_slow(self, rows):
        return False
    def encode(self, rows, *, truncate=False):
        return [Encoded(8, (TOKENS,))] * len(rows)

async def play(size, calls):
    networks = {"networks": (6, 12)} if crosses else {}
    stages = tuple(Stage(device="cpu", replicas=64, splits=(Split(first=first, end=first + 6, batch=size),))
                   for first in (0, 6))
    placed = initial_placement(Plan(stages=stages, **networks))
    ways = dict.fromkeys(placed.slots, Stages())
    rules = Rules(max_queued=100_000, calls_per_replica=2, max_attempts=1, slo_s=1e6)
    core = IngressCore("i", placed, ways, rules, random.Random(0))
    given, make = {}, lambda: Encoded(8, (TOKENS,))
    if crosses:
        from deployments.ingress.dispatch.entrance import ChainEntrance
        codec, make = encoded_of_chain()
        given = {"entrance": ChainEntrance("i", codec)}
    dispatcher = Dispatcher(core, MonotonicClock(), Nothing(), **given)
    left, done = size * calls, asyncio.Event()
    def settle(flight, outcome):
        nonlocal left
        assert isinstance(outcome, Answer), outcome
        left -= 1
        if not left:
            done.set()
    began_s = time.process_time()
    for _ in range(calls):
        dispatcher.submit([("x", make()) for _ in range(size)], 1e9, settle)
        await asyncio.sleep(0)
    await done.wait()
    return (time.process_time() - began_s) / calls / size

def bytecodes(size, calls):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace
    async def traced():
        sys.settrace(trace)
        await play(size, calls)
        sys.settrace(None)
    asyncio.run(traced())
    return count

crosses, inputs, counted = sys.argv[1] == "crosses", int(sys.argv[2]), int(sys.argv[3])
found = {}
for size in map(int, sys.argv[4:]):
    calls = max(1, counted // size)
    few, many = (bytecodes(size, number) for number in (4, 4 + calls))
    found[f"{size} a call, us per input"] = 1e6 * min(asyncio.run(play(size, inputs // size)) for _ in range(3))
    found[f"{size} a call, bytecodes per input"] = (many - few) / calls / size
print(json.dumps(found))
"""


def cost(side: Side, inputs: int, kind: str = "one") -> Figures:
    """One side's figures; raises CalledProcessError where it fails."""
    return side.figures(SCRIPT, kind, inputs, COUNTED, *SIZES)


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.costs.dispatch", description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inputs", type=int, default=2000)
    options = parser.parse_args()
    now = Side(name="now", root=Path(ROOT))
    sides = [Side(name=options.revision, root=checked_out(options.revision)), now]
    figures = {side.name: partial(cost, side, options.inputs) for side in sides}
    figures["now, crossing"] = partial(cost, now, options.inputs, "crosses")
    tell(f"an ingress's dispatcher, two stages, {options.rounds} rounds", in_turns(figures, options.rounds, warm_ups=0))


if __name__ == "__main__":
    main()
