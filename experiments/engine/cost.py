"""What the batch engine itself costs per batch, beside an older commit: nothing is computed.

    python -m experiments.engine.cost REVISION [--rounds 5] [--batches 2000]

Inputs without tokens or deadlines are queued, chosen, finished and queued again for a second split. Bytecodes that the
interpreter runs are counted, which no busy machine changes; processor time is measured in turns. The older commit is
checked out below runs/ and run by this environment's Python. Minutes: about 1.
"""

from __future__ import annotations

from argparse import ArgumentParser
from functools import partial
from pathlib import Path

from experiments.beside import Side, checked_out
from experiments.peers.client import ROOT
from experiments.turns import Figures, in_turns, tell

SIZES = (1, 16, 64)
COUNTED = 100
"""Batches whose bytecodes are counted."""
SCRIPT = """
import json, sys, time
from earlyexit.engine import BatchEngine
from earlyexit.member import Member
from earlyexit.split import Split
from earlyexit.times import ObservedTimes

def play(size, batches):
    splits = [Split(first=0, end=2, batch=size), Split(first=2, end=4, batch=size)]
    engine = BatchEngine(splits, ObservedTimes())
    queued = [[Member(sample_id="x", payload=None) for _ in range(size)] for _ in range(batches)]
    began_s, now_s = time.process_time(), 0.0
    for members in queued:
        engine.submit(0, members, now_s)
        for _ in splits:
            batch = engine.choose(now_s).batch
            now_s += 1.0
            engine.finished(batch, first_s=0.5, total_s=1.0)
            if engine.hosts(batch.split.end):
                engine.submit(batch.split.end, batch.members, now_s)
    return (time.process_time() - began_s) / batches / len(splits)

def bytecodes(size, batches):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace
    sys.settrace(trace)
    play(size, batches)
    sys.settrace(None)
    return count

batches, counted = int(sys.argv[1]), int(sys.argv[2])
found = {}
for size in map(int, sys.argv[3:]):
    few, many = (bytecodes(size, number) for number in (10, 10 + counted))
    found[f"us per batch of {size}"] = 1e6 * min(play(size, batches) for _ in range(3))
    found[f"bytecodes per batch of {size}"] = (many - few) / counted / 2
print(json.dumps(found))
"""


def cost(side: Side, batches: int) -> Figures:
    """One side's figures; raises CalledProcessError where it fails."""
    return side.figures(SCRIPT, batches, COUNTED, *SIZES)


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.engine.cost", description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=2000)
    options = parser.parse_args()
    sides = [Side(name=options.revision, root=checked_out(options.revision)), Side(name="now", root=Path(ROOT))]
    tell(
        f"the engine alone, per batch and split, {options.rounds} rounds",
        in_turns({side.name: partial(cost, side, options.batches) for side in sides}, options.rounds, warm_ups=0),
    )


if __name__ == "__main__":
    main()
