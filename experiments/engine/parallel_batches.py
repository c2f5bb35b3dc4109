"""Batches that overlap, with real computing: the engine alone, two threads where `overlap_below` lets them.

    OFFRAMP_DATA=... python -m experiments.engine.parallel_batches MODEL [--rounds 7]

MODEL is a calibrated model folder of small images (`runs/pame/cifar10`, which `python -m
experiments.trained.joint_cifar10` makes). Every side runs the same test images with all exits active and everything
queued at once: one batch at a time; the next one beside fewer than 2, 4, 6 and 8 inputs; one at a time with two threads
inside torch, which is what a second thread must beat; and two splits, the survivors of the first half fused into full
batches. No Ray, no HTTP. Sides take turns within each round; figures are ratios within rounds. Latencies are from when
an input's first batch began. Minutes: about 5 on two idle cores.
"""

from __future__ import annotations

import threading
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch

from deployments.stage.build import build_policy
from earlyexit.clock import MonotonicClock
from earlyexit.codecs import find_codec
from earlyexit.dataset import read_labelled
from earlyexit.device import Device
from earlyexit.device_thread import DeviceThread
from earlyexit.engine import Batch, BatchEngine
from earlyexit.model import EarlyExitModel
from earlyexit.piece import Piece
from earlyexit.release import Release, Step, Told
from earlyexit.runner import TorchRunner
from earlyexit.signature import Encoded
from earlyexit.split import Split
from earlyexit.store import load_model
from earlyexit.times import ObservedTimes
from earlyexit.wire import entering
from experiments.data import require_data
from experiments.gpu.side import members_of
from experiments.pame.models import require_model
from experiments.trained.cifar10 import TEST
from experiments.turns import Figures, in_turns, tell
from offramp.jobs.calibration import read_calibration
from optimizer.calibration_file import CalibrationCard

THRESHOLDS = (2, 4, 6, 8)
LONGEST_S = 600.0
"""Of one run; more is a hang."""


@dataclass
class Run:
    """Collects the answers of one run, and when inputs first began."""

    expected: int
    began_s: dict[str, float] = field(default_factory=dict)
    latency_s: dict[str, float] = field(default_factory=dict)
    done: threading.Event = field(default_factory=threading.Event)

    def deliver(self, releases: list[Release[Piece]]) -> None:
        """From the device's threads, one at a time."""
        now_s = time.monotonic()
        for release in releases:
            assert isinstance(release, Told), release
            sample_id = release.answer.sample_id
            assert sample_id not in self.latency_s, f"{sample_id} was answered twice"
            self.latency_s[sample_id] = now_s - self.began_s[sample_id]
        if len(self.latency_s) == self.expected:
            self.done.set()


class Noting(TorchRunner):
    """Notes when inputs begin."""

    run_of: Run

    def run(self, batch: Batch[Piece]) -> Iterator[Step[Piece]]:
        """As another."""
        for member in batch.members:
            self.run_of.began_s.setdefault(member.sample_id, batch.started_s)
        return super().run(batch)


def serve(
    model: EarlyExitModel, card: CalibrationCard, splits: Sequence[Split], encoded: Sequence[Encoded], threads: int
) -> Run:
    """Queue all, and wait until the last is answered."""
    torch.set_num_threads(threads)
    runner, clock, run = Noting(model, build_policy(card.policy_spec())), MonotonicClock(), Run(len(encoded))
    runner.run_of = run
    engine: BatchEngine[Piece] = BatchEngine((), ObservedTimes())
    thread = DeviceThread(Device(engine, runner, clock, run.deliver))
    thread.follow(splits, "work-conserving", build_policy(card.policy_spec()))
    members = members_of(runner.from_wire(entering([str(k) for k in range(len(encoded))], encoded)))
    thread.submit(0, members)
    thread.start()
    assert run.done.wait(LONGEST_S), "the device hangs"
    thread.stop()
    return run


def measure(stock_s: float, serve_all: Callable[[], Run]) -> Figures:
    """One side's figures; `stock_s`: of a batch without exits."""
    started_s = time.perf_counter()
    run = serve_all()
    latency_s_N = np.array(list(run.latency_s.values()))
    return {
        "images/s": len(latency_s_N) / (time.perf_counter() - started_s),
        "mean latency (ms)": 1e3 * float(latency_s_N.mean()),
        "later than without exits (%)": 100 * float((latency_s_N > stock_s).mean()) + 1e-3,
    }


def plans(num_blocks: int, ramps: tuple[int, ...], batch: int) -> Mapping[str, tuple[list[Split], int]]:
    """Splits and torch's threads, by side."""
    middle = ramps[len(ramps) // 2]

    def whole(below: int | None) -> list[Split]:
        return [Split(first=0, end=num_blocks, batch=batch, ramps=ramps, overlap_below=below)]

    early, late = tuple(r for r in ramps if r <= middle), tuple(r for r in ramps if r > middle)
    fused = [
        Split(first=0, end=middle + 1, batch=batch, ramps=early),
        Split(first=middle + 1, end=num_blocks, batch=batch, ramps=late),
    ]
    return {
        "one at a time": (whole(None), 1),
        **{f"beside fewer than {below}": (whole(below), 1) for below in THRESHOLDS},
        "one at a time, 2 threads in torch": (whole(None), 2),
        f"fused after block {middle}": (fused, 1),
        "without exits": ([Split(first=0, end=num_blocks, batch=batch)], 1),
    }


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.engine.parallel_batches", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--inputs", type=int, default=512)
    options = parser.parse_args()
    require_model(options.model, "calibration.json")
    model, card = load_model(options.model), read_calibration(options.model)
    rows = read_labelled(require_data(TEST))
    encoded = rows.encode(find_codec(model.info.codec, options.model))[: options.inputs]
    ramps = tuple(sorted(card.thresholds))
    sides = plans(model.num_blocks, ramps, options.batch)
    splits, threads = sides["without exits"]
    stock_s = float(np.median(list(serve(model, card, splits, encoded, threads).latency_s.values())))
    found = in_turns(
        {
            name: partial(measure, stock_s, partial(serve, model, card, splits, encoded, threads))
            for name, (splits, threads) in sides.items()
        },
        options.rounds,
    )
    tell(f"{len(encoded)} images, batch {options.batch}, a batch without exits {1e3 * stock_s:.1f} ms", found)


if __name__ == "__main__":
    main()
