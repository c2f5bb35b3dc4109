"""What an encoder-decoder sustains with its own calibrated exits, beside the same engine without; arrivals do not wait.

    OFFRAMP_DATA=... python -m experiments.translation.sustained FOLDER [--thresholds '{"2": 0.9}'] [--sides stock]

One process, one thread, no HTTP, batches as they come (continuous batching on all sides), answers until they end.
Sequences come as a Poisson stream, the same for all sides but for its rate. What is sustained is the highest rate at
which 95 % keep both SLOs, found by the bisection that `experiments.peers` has, from a share of what stock makes of a
crowd that comes at once; SLOs are 5 times what stock takes of one sequence at a time, to the first token and per
further one. The clock is processor time, and time in which nobody is there is skipped, so other work on the machine
changes little. Thresholds are those of `offramp calibrate` unless said.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import numpy as np
import torch

from earlyexit.codecs import find_codec
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.engine import Batch
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.memory import Fill
from earlyexit.model import EarlyExitModel
from earlyexit.offline import NOBODY
from earlyexit.policies.foresight import ForeseenPolicy
from earlyexit.split import Split
from earlyexit.store import load_model
from experiments.generation.peers import Job, TokenTimes
from experiments.generation.slos import Slos
from experiments.generation.speed import Engine
from experiments.kit import ProcessorClock, show
from experiments.peers.search import Bounds, Search
from experiments.translation.multi30k import TEST, directed, pairs_of
from optimizer.calibration_file import CALIBRATION_FILE, read_calibration_file

ANSWER = 64
"""Tokens at most."""
KEPT = 0.95
NUM_PAGES = 2048
ALONE, LONG_S = 20, 60.0
"""Sequences that are made one at a time, and seconds from one to the next."""
BATCH = 32
STOCK = "stock"
START, GROWTH = 0.7, 1.25
"""Of what stock makes of a crowd, where a search begins; and its first step."""


@dataclass(frozen=True, slots=True)
class Tried:
    """What a side did at a rate, in seconds: medians, and of processor time per token."""

    rate: float
    kept: float
    ttft_s: float
    tpot_s: float
    spent_s: float


@dataclass(frozen=True, slots=True)
class Side:
    """An engine, and how it fills in."""

    engine: Engine
    clock: ProcessorClock
    fill: Fill

    def serve(self, jobs: Sequence[Job], due_s: Sequence[float]) -> list[TokenTimes]:
        """Every job begins when it is due, from now on."""
        self.engine.backbone.fill = self.fill
        self.engine.reset((), ANSWER)
        begun_s, arrived = self.clock.now_s(), 0
        while arrived < len(jobs) or self.engine.under_way:
            while arrived < len(jobs) and begun_s + due_s[arrived] <= self.clock.now_s():
                self.engine.begin(jobs[arrived], begun_s + due_s[arrived])
                arrived += 1
            batch = self.engine.device.start_next()
            if isinstance(batch, Batch):
                self.engine.device.requeue(self.engine.device.run(batch))
                continue
            wakes = [] if batch is None else [batch]
            self.clock.skip_to(min([*wakes, *(begun_s + each for each in due_s[arrived : arrived + 1])]))
        return self.engine.made


def sides_of(model: EarlyExitModel, thresholds: dict[int, float], cut: int, codec: PromptCodec) -> dict[str, Side]:
    """Stock first; exits with one batch to the end, and cut in two behind block `cut`, filled in either way."""
    last, ramps = model.num_blocks, tuple(sorted(thresholds))
    inner = tuple(ramp for ramp in ramps if ramp > cut)
    whole = [Split(first=0, end=last, batch=BATCH, ramps=ramps)]
    parts = [
        Split(first=0, end=cut + 1, batch=BATCH, ramps=tuple(ramp for ramp in ramps if ramp <= cut)),
        Split(first=cut + 1, end=last, batch=BATCH, ramps=inner),
    ]

    def side(splits: list[Split], fill: Fill, *, leave: bool) -> Side:
        clock = ProcessorClock()
        policy = ForeseenPolicy(thresholds) if leave else NOBODY
        return Side(Engine(model, splits, policy, codec.tokenizer, clock), clock, fill)

    found = {STOCK: side([Split(first=0, end=last, batch=BATCH)], "compute", leave=False)}
    for fill in get_args(Fill):
        found[f"early-exit, {fill}"] = side(whole, fill, leave=True)
        found[f"cut after {cut}, {fill}"] = side(parts, fill, leave=True)
    return found


def slos_of(stock: Side, jobs: Sequence[Job], scale: float) -> tuple[Slos, float]:
    """So many times what it takes of one at a time, and the sequences that it makes of a crowd per second."""
    alone = stock.serve(jobs[:ALONE], [LONG_S * k for k in range(ALONE)])
    begun_s = stock.clock.now_s()
    stock.serve(jobs, [0.0] * len(jobs))
    capacity = len(jobs) / (stock.clock.now_s() - begun_s)
    return Slos.of(alone, scale), capacity


def searched(side: Side, jobs: Sequence[Job], slos: Slos, search: Search) -> tuple[Search, list[Tried]]:
    """A side's sustained rate, and what it did at every rate that was tried."""
    gaps, tried = np.random.default_rng(0).exponential(size=len(jobs)), list[Tried]()
    while (rate := search.next_rate()) is not None:
        started_s = time.process_time()
        made = side.serve(jobs, (gaps.cumsum() / rate).tolist())
        spent_s = time.process_time() - started_s
        share, tokens = slos.kept(made), sum(len(each.said_s) for each in made)
        ttft_s, tpot_s = median(each.ttft_s for each in made), median(each.tpot_s for each in made)
        tried.append(Tried(rate, share, ttft_s, tpot_s, spent_s / tokens))
        search = search.learn(rate, "passed" if share >= KEPT else "failed")
    return search, tried


def jobs_of(codec: PromptCodec, count: int) -> list[Job]:
    """Sources of the test part."""
    texts = [source for source, _ in directed(pairs_of(TEST), "en-de")[:count]]
    return [Job(codec.tokens(text), ANSWER) for text in texts]


def main() -> None:
    """Every side at every rate, in turns; then a table."""
    parser = ArgumentParser(prog="python -m experiments.translation.sustained", description=__doc__)
    parser.add_argument("folder", type=Path, help="of `offramp train`, calibrated")
    parser.add_argument("--thresholds", type=json.loads, help="by ramp, as JSON; default: the calibration's")
    parser.add_argument("--cut", type=int, help="the block behind which batches are filled again; default: first ramp")
    parser.add_argument("--resolution", type=float, default=0.04, help="of the search; ratio less 1")
    parser.add_argument("--sides", nargs="+", default=[""], help="beginnings of names, behind stock")
    parser.add_argument("--sequences", type=int, default=200)
    parser.add_argument("--slo-scale", type=float, default=5.0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model(options.folder)
    codec = find_codec(model.info.codec, options.folder)
    assert isinstance(codec, PromptCodec)
    assert isinstance(model.backbone, DecoderBackbone)
    model.backbone.open_store(NUM_PAGES)
    given = options.thresholds or read_calibration_file(options.folder / CALIBRATION_FILE).thresholds
    thresholds = {int(ramp): float(each) for ramp, each in given.items()}
    cut = min(thresholds) if options.cut is None else options.cut
    sides = sides_of(model, thresholds, cut, codec)
    jobs = jobs_of(codec, options.sequences)
    for each in sides.values():
        each.serve(jobs[:BATCH], [0.0] * BATCH)
    slos, capacity = slos_of(sides[STOCK], jobs, options.slo_scale)
    wanted = {name: side for name, side in sides.items() if name == STOCK or name.startswith(tuple(options.sides))}
    bounds = Bounds(low_per_s=capacity / 20, high_per_s=4 * capacity, resolution=options.resolution)
    begun = Search(start_per_s=START * capacity, bounds=bounds, growth=GROWTH)
    found, rows = dict[str, Search](), list[tuple[object, ...]]()
    for name, side in wanted.items():
        found[name], tried = searched(side, jobs, slos, begun)
        rows += [
            (name, each.rate, f"{each.kept:.3f}", 1e3 * each.ttft_s, 1e3 * each.tpot_s, 1e3 * each.spent_s)
            for each in sorted(tried, key=lambda each: each.rate)
        ]
    show(
        f"{len(jobs)} sequences, thresholds {thresholds}",
        ("side", "sequences/s", "kept SLOs", "TTFT p50, ms", "TPOT p50, ms", "processor ms a token"),
        rows,
    )
    base = found[STOCK].best_per_s
    show(
        f"Sustained: {KEPT:.0%} within {1e3 * slos.ttft_s:.1f} ms and {1e3 * slos.tpot_s:.1f} ms a token",
        ("side", "sequences/s", "x stock", "search"),
        [
            (name, each.best_per_s, each.best_per_s / base if base else None, each.ending)
            for name, each in found.items()
        ],
    )


if __name__ == "__main__":
    main()
