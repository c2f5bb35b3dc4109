"""Compares the batch engine with a plain loop: its overhead, and the gain from ramps and splits.

    python -m experiments.engine.speed MODEL --data $OFFRAMP_DATA/clinc150/data_full.json --part test

Runs without Ray and HTTP, on encoded inputs. Variants take turns within each round, and figures are medians over
rounds. Samples/s vary with other load on the machine; processor time per answer does not. `--dtypes` runs several
types. `--backends` adds other backends than torch, in float32, and prints what `auto` chose. `--sides` selects variants
by the beginning of their names. Minutes: about 3 on one core.
"""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import get_args

import numpy as np
import torch

from deployments.replica.host import build_policy, warm_up
from earlyexit.backends import BACKENDS, computed_by, open_segments
from earlyexit.clock import MonotonicClock
from earlyexit.codecs import find_codec
from earlyexit.data.rows import read_labelled
from earlyexit.network.boundary import Encoded, FloatName, Split, entry_piece
from earlyexit.network.model import EarlyExitModel, SegmentRunner, TorchRunner
from earlyexit.network.store import load_model, read_card
from earlyexit.training.ramps import pack
from experiments.engine.side import Side as OneDevice
from experiments.engine.side import members_of
from experiments.turns import Figures, in_turns, print_figures
from offramp.commands.folders import read_calibration
from optimizer.calibration.calibration_file import CalibrationCard
from optimizer.plans.plan import early_exit_plan, serial_plan, stock_plan

Side = Callable[[Sequence[Encoded]], None]
BY_ALL_BACKENDS = ("engine, stock", "engine, split after block 0")
RATE, SPENT = "samples/s", "ms of processor time per answer"


def plain_loop(model: EarlyExitModel, batch: int) -> Side:
    """Returns a loop over the full model, on batches in order of arrival."""

    @torch.inference_mode()
    def run(encoded: Sequence[Encoded]) -> None:
        for start in range(0, len(encoded), batch):
            values, layout = pack(encoded[start : start + batch], model.device)
            hidden = model.run_blocks(0, model.num_blocks, values, layout)
            model.exit_outputs(model.num_blocks - 1, hidden, layout).argmax(-1).tolist()

    return run


def engine(
    model: EarlyExitModel, splits: Sequence[Split], card: CalibrationCard, segments: SegmentRunner | None = None
) -> Side:
    """Returns a run of a device with all inputs queued, which checks that every answer comes out."""
    runner, clock = TorchRunner(model, build_policy(card.policy_spec()), segments), MonotonicClock()
    runner.prepare(splits)
    device = OneDevice(splits, runner, clock, times=warm_up(runner, (splits,), clock=clock))

    def run(encoded: Sequence[Encoded]) -> None:
        wire = entry_piece([str(k) for k in range(len(encoded))], encoded)
        device.saturate(members_of(runner.from_wire(wire)))

    return run


def sides(model: EarlyExitModel, card: CalibrationCard, batch: int) -> dict[str, partial[Side]]:
    """Returns the compared variants by name; each is built when it is called."""
    last, ramps, policy = model.num_blocks, tuple(sorted(card.thresholds)), card.policy_spec()
    at_0, later = (0,) * (0 in ramps), tuple(ramp for ramp in ramps if ramp)
    halves = (Split(first=0, end=1, batch=batch, ramps=at_0), Split(first=1, end=last, batch=batch, ramps=later))
    early_exit, serial = (make(last, ramps, policy, batch=batch) for make in (early_exit_plan, serial_plan))
    return {
        "plain loop": partial(plain_loop, model, batch),
        "engine, stock": partial(engine, model, stock_plan(last, batch=batch).splits, card),
        "engine, early-exit (shrinking batches)": partial(engine, model, early_exit.splits, card),
        "engine, split after block 0": partial(engine, model, halves, card),
        "engine, split after every ramp": partial(engine, model, serial.splits, card),
    }


def main() -> None:
    """Measures and prints."""
    parser = ArgumentParser(prog="python -m experiments.engine.speed", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--dtypes", nargs="+", choices=get_args(FloatName), default=["float32"])
    parser.add_argument("--sides", nargs="+", default=[""], help="prefixes of the names of the compared variants")
    parser.add_argument("--backends", nargs="+", choices=sorted({*BACKENDS} - {"torch"}), default=[])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    card = read_calibration(options.model)
    texts = read_labelled(options.data, part=options.part).texts
    encoded = find_codec(read_card(options.model).codec, options.model).encode(texts, truncate=True)
    order = np.random.default_rng(0).permutation(len(encoded))
    sample = [encoded[k] for k in order[: options.inputs]]
    named = _named(options, card)
    for side in named.values():
        side(sample[:128])
    figures = in_turns({name: partial(_rate, side, sample) for name, side in named.items()}, options.rounds, warm_ups=0)
    title = f"{len(sample)} inputs, batch {options.batch}, threads {options.threads}, {options.rounds} rounds"
    print_figures(title, figures)


def _named(options: Namespace, card: CalibrationCard) -> dict[str, Side]:
    """Returns the requested variants in every dtype, with the model's layers as they are served."""
    named: dict[str, partial[Side]] = {}
    for dtype in options.dtypes:
        model = load_model(options.model, dtype=getattr(torch, dtype))
        open_segments("torch", model, options.model)
        of_dtype = sides(model, card, options.batch)
        named |= {name if len(options.dtypes) == 1 else f"{name}, {dtype}": side for name, side in of_dtype.items()}
    for backend, name in product(options.backends, BY_ALL_BACKENDS):
        named[f"{name}, {backend}"] = partial(_by_backend, options, card, backend, name)
    return {name: side() for name, side in named.items() if name.startswith(tuple(options.sides))}


def _by_backend(options: Namespace, card: CalibrationCard, backend: str, name: str) -> Side:
    """Returns a variant on its own model, because backends may replace modules of the model."""
    model = load_model(options.model)
    segments = open_segments(backend, model, options.model)
    side = sides(model, card, options.batch)[name](segments=segments)
    if (chosen := computed_by(segments)) is not None:
        print(f"{name}: {backend} took {chosen}", file=sys.stderr)
    return side


def _rate(side: Side, sample: Sequence[Encoded]) -> Figures:
    started_s, started_cpu_s = time.perf_counter(), time.process_time()
    side(sample)
    took_s, spent_s = time.perf_counter() - started_s, time.process_time() - started_cpu_s
    return {RATE: len(sample) / took_s, SPENT: 1e3 * spent_s / len(sample)}


if __name__ == "__main__":
    main()
