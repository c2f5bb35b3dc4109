"""Answers that leave in the first stage do not wait for the second, however slow it is.

    python -m experiments.engine.early_answers MODEL --data DATA [--part test]

Two stages; in every other window of four seconds each batch of the second stage takes 200 ms more. Compared, within
one run, are the latencies of the inputs that left in the first stage. Minutes: about 2.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.dataset import read_labelled
from earlyexit.policies.base import Opinion, Verdict
from earlyexit.policies.threshold import EntropyPolicy
from earlyexit.split import Split
from earlyexit.store import read_card
from experiments.kit import show
from offramp.client.client import Client
from offramp.load.report import LoadReport
from offramp.load.run import LoadConfig, run_load
from optimizer.plan import Plan, PolicySpec, Stage

ENTROPY = 0.1
SLOWED_BY_S = 0.2
WINDOW_S = 4.0
MARGIN_S = 0.5
"""Left out on both sides of a change: what was slowed must drain."""


def is_slow(monotonic_s: float) -> bool:
    """Whether a moment lies in a slowed window; processes of one machine share the monotonic clock."""
    return int(monotonic_s // WINDOW_S) % 2 == 1


class SlowSecondStage(EntropyPolicy):
    """Entropy, but in slowed windows every ramp behind the first block takes its time."""

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        """As the entropy policy, at times later."""
        if ramp > 0 and is_slow(time.monotonic()):
            time.sleep(SLOWED_BY_S)
        return super().decide(ramp, opinion, state_BS, sample_ids)


slow_second_stage = SlowSecondStage(ENTROPY)


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.engine.early_answers", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part")
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=6000)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    report, started_s = _measure(options)
    rows, first_p99_ms = [], {}
    for slow in (False, True):
        first_ms, second_ms = _latencies_ms(report, started_s, slow=slow)
        first_p99_ms[slow] = float(np.percentile(first_ms, 99))
        name = "slowed windows" if slow else "other windows"
        rows.append(
            (name, len(first_ms), np.median(first_ms), first_p99_ms[slow], len(second_ms), np.median(second_ms))
        )
    columns = ("", "left in the first stage", "p50 ms", "p99 ms", "in the second", "p50 ms")
    added_ms = first_p99_ms[True] - first_p99_ms[False]
    caption = f"p99 of answers of the first stage: {added_ms:+.1f} ms, second stage {SLOWED_BY_S * 1000:.0f} ms slower"
    show("", columns, rows, caption=caption)


def _measure(options: Any) -> tuple[LoadReport, float]:
    """The report of the load, and when it began on the monotonic clock."""
    num_blocks = read_card(options.model).num_blocks
    first = Split(first=0, end=1, batch=16, ramps=(0,))
    second = Split(first=1, end=num_blocks, batch=16, ramps=(1,))
    stages = tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in (first, second))
    plan = Plan(stages=stages, policy=PolicySpec(name="own", own="experiments.engine.early_answers:slow_second_stage"))
    settings = ServeSettings(model=str(options.model.resolve()), plan=plan)
    texts = read_labelled(options.data, part=options.part).texts
    config = LoadConfig(
        url="", inputs=texts, num_requests=options.requests, rate_rps=options.rate, slo_s=1.0, seed=options.requests
    )
    with serving(settings, LocalCluster(port=options.port)) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=60)
        asyncio.run(run_load(replace(config, url=url, num_requests=300)))
        started_s = time.monotonic()
        report = asyncio.run(run_load(replace(config, url=url)))
    assert not report.errors, report.errors
    return report, started_s


def _latencies_ms(report: LoadReport, started_s: float, *, slow: bool) -> tuple[list[float], list[float]]:
    """Of the inputs of the slowed, or the other, windows: those that left in the first stage, and in the second."""
    left_ms: tuple[list[float], list[float]] = [], []
    for record in report.records:
        at_s = started_s + record.scheduled_s
        inside = MARGIN_S < at_s % WINDOW_S < WINDOW_S - MARGIN_S
        if inside and is_slow(at_s) == slow:
            left_ms[record.predictions[0].exit > 0].append(1000 * record.latency_s)
    return left_ms


if __name__ == "__main__":
    main()
