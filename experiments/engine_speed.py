"""The batch engine alone, against a plain loop: what it costs, and what ramps and splits gain.

    python -m experiments.engine_speed MODEL --data clinc150/data_full.json --part test

One thread, no Ray, no HTTP, tokens ready. Sides take turns within each round; medians over rounds.
Minutes: about 3 on one core.
"""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from deployments.stage.build import build_policy, warm_up
from earlyexit.backends import open_segments
from earlyexit.clock import MonotonicClock
from earlyexit.dataset import read_labelled
from earlyexit.model import EarlyExitModel
from earlyexit.network import SegmentRunner
from earlyexit.runner import TorchRunner
from earlyexit.signature import Encoded
from earlyexit.split import Split
from earlyexit.store import load_model
from earlyexit.tokenizer import TextTokenizer
from earlyexit.train import pack
from earlyexit.wire import entering
from experiments.gpu.plans import Plan
from experiments.gpu.side import Side as OneDevice
from experiments.gpu.side import members_of
from experiments.peers.stock import pad, pool_padded
from experiments.turns import Figures, in_turns, tell
from offramp.jobs.calibration import read_calibration
from optimizer.calibration_file import CalibrationCard

Side = Callable[[Sequence[Encoded]], None]


def plain_loop(model: EarlyExitModel, batch: int) -> Side:
    """The full model on batches in order of arrival, nothing else."""

    @torch.inference_mode()
    def run(encoded: Sequence[Encoded]) -> None:
        for start in range(0, len(encoded), batch):
            values, layout = pack(encoded[start : start + batch], model.device)
            hidden = model.run_blocks(0, model.num_blocks, values, layout)
            model.exit_outputs(model.num_blocks - 1, hidden, layout).argmax(-1).tolist()

    return run


def transformers_loop(model: EarlyExitModel, batch: int) -> Side:
    """The same checkpoint in `transformers`' own padded modules: what one would write without Offramp."""
    from transformers import AutoModel

    encoder = AutoModel.from_pretrained(str(model.info.provenance["backbone"])).eval()

    @torch.inference_mode()
    def run(encoded: Sequence[Encoded]) -> None:
        for start in range(0, len(encoded), batch):
            ids_BT, mask_BT = pad(encoded[start : start + batch])
            hidden_BTD = encoder(input_ids=ids_BT, attention_mask=mask_BT).last_hidden_state
            model.head.classify(pool_padded(hidden_BTD, mask_BT, "mean")).argmax(-1).tolist()

    return run


def engine(
    model: EarlyExitModel, splits: Sequence[Split], card: CalibrationCard, segments: SegmentRunner | None = None
) -> Side:
    """A device that has all inputs queued; every answer must come out."""
    runner, clock = TorchRunner(model, build_policy(card.policy_spec()), segments), MonotonicClock()
    runner.prepare(splits)
    times = warm_up(runner, splits, clock=clock)
    device = OneDevice(Plan(name="engine", splits=tuple(splits)), runner, clock, expected=None, times=times)

    def run(encoded: Sequence[Encoded]) -> None:
        wire = entering([str(k) for k in range(len(encoded))], encoded)
        device.saturate(members_of(runner.from_wire(wire)))

    return run


def sides(model: EarlyExitModel, card: CalibrationCard, batch: int, onnx: SegmentRunner | None) -> dict[str, Side]:
    """What is compared; the engine's plans name their splits by their bounds."""
    last = model.num_blocks
    ramps = tuple(sorted(card.thresholds))
    stock = [Split(first=0, end=last, batch=batch)]
    shrinking = [Split(first=0, end=last, batch=batch, ramps=ramps)]
    serial = _cut_at([0, 1, last], ramps, batch)
    every = _cut_at([0, *(ramp + 1 for ramp in ramps), last], ramps, batch)
    named = {
        "plain loop": plain_loop(model, batch),
        "transformers, plain loop": transformers_loop(model, batch),
        "engine, stock": engine(model, stock, card),
        "engine, early-exit (shrinking batches)": engine(model, shrinking, card),
        "engine, split after block 0": engine(model, serial, card),
        "engine, split after every ramp": engine(model, every, card),
    }
    if onnx is not None:
        named["engine, stock, onnx"] = engine(model, stock, card, onnx)
        named["engine, split after block 0, onnx"] = engine(model, serial, card, onnx)
    return named


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.engine_speed", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--inputs", type=int, default=1024)
    parser.add_argument("--onnx", action="store_true", help="also with ONNX Runtime")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, card = load_model(options.model), read_calibration(options.model)
    texts = read_labelled(options.data, part=options.part).texts
    encoded = TextTokenizer.load(options.model, model.max_length).encode(texts)
    order = np.random.default_rng(0).permutation(len(encoded))
    sample = [encoded[k] for k in order[: options.inputs]]
    onnx = open_segments("onnx", model, options.model, 1) if options.onnx else None
    named = sides(model, card, options.batch, onnx)
    for side in named.values():
        side(sample[:128])
    found = in_turns({name: partial(_rate, side, sample) for name, side in named.items()}, options.rounds, warm_ups=0)
    if options.json:
        rates = {name: figures["samples/s"] for name, figures in found.items()}
        print(json.dumps({"batch": options.batch, "inputs": len(sample), "samples_per_s": rates}))
        return
    tell(f"{len(sample)} inputs, batch {options.batch}, one thread, {options.rounds} rounds", found)


def _rate(side: Side, sample: Sequence[Encoded]) -> Figures:
    started_s = time.perf_counter()
    side(sample)
    return {"samples/s": len(sample) / (time.perf_counter() - started_s)}


def _cut_at(bounds: Sequence[int], ramps: Sequence[int], batch: int) -> list[Split]:
    return [
        Split(first=first, end=end, batch=batch, ramps=tuple(ramp for ramp in ramps if first <= ramp < end))
        for first, end in pairwise(bounds)
    ]


if __name__ == "__main__":
    main()
