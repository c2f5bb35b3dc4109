"""Answers that leave in the first stage do not wait for the second, however slow it is.

    python -m experiments.early_answers MODEL --data DATA [--part test]

Two stages; once as they are, once with 200 ms more for every batch of the second. Compared are the latencies of the
inputs that left in the first stage. Minutes: about 1.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from deployments.serve_control import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.dataset import read_labelled
from earlyexit.policies import EntropyPolicy, Verdict
from earlyexit.split import Split
from earlyexit.store import read_card
from offramp.client import Client
from offramp.load import LoadConfig, run_load
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import plan_document

ENTROPY = 0.1
SLOWED_BY_S = 0.2


class SlowSecondStage(EntropyPolicy):
    """Entropy, but every ramp behind the first block takes its time."""

    def decide(self, ramp: int, logits_BC: Tensor, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        """As the entropy policy, later."""
        if ramp > 0:
            time.sleep(SLOWED_BY_S)
        return super().decide(ramp, logits_BC, state_BS, sample_ids)


slow_second_stage = SlowSecondStage(ENTROPY)


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.early_answers", description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--part")
    parser.add_argument("--rate", type=float, default=60.0)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    slowed = PolicySpec(name="own", own="experiments.early_answers:slow_second_stage")
    sides = {"as it is": PolicySpec(name="entropy", thresholds=ENTROPY), "second stage slowed": slowed}
    p99_s = {}
    for side, policy in sides.items():
        first_s, later_s = _latencies(options, policy)
        p99_s[side] = float(np.percentile(first_s, 99))
        print(
            f"{side:<20} {len(first_s)} left in the first stage: p50 {np.median(first_s) * 1000:6.1f} ms, "
            f"p99 {p99_s[side] * 1000:6.1f} ms; {len(later_s)} in the second: p50 {np.median(later_s) * 1000:6.1f} ms"
        )
    added_s = p99_s["second stage slowed"] - p99_s["as it is"]
    print(
        f"p99 of the first stage's answers: {added_s * 1000:+.1f} ms, second stage {SLOWED_BY_S * 1000:.0f} ms slower"
    )


def _latencies(options: Any, policy: PolicySpec) -> tuple[list[float], list[float]]:
    """Seconds of the inputs that left in the first stage, and of the others."""
    num_blocks = read_card(options.model).num_blocks
    first = Split(first=0, end=1, batch=16, ramps=(0,))
    second = Split(first=1, end=num_blocks, batch=16, ramps=(1,))
    stages = tuple(Stage(device="cpu", replicas=1, splits=(split,)) for split in (first, second))
    plan = Plan(stages=stages, policy=policy)
    settings = ServeSettings(model=str(options.model.resolve()), plan=plan_document(plan))
    texts = read_labelled(options.data, part=options.part).texts
    with serving(settings, LocalCluster(port=options.port)) as url:
        with Client(url) as client:
            client.wait_until_ready(timeout_s=60)
        config = LoadConfig(
            url=url, texts=texts, num_requests=options.requests, rate_rps=options.rate, slo_s=1.0, warmup_requests=200
        )
        report = asyncio.run(run_load(config))
    assert not report.errors, report.errors
    left_s: dict[bool, list[float]] = {True: [], False: []}
    for record in report.records:
        left_s[record.predictions[0].exit == 0].append(record.latency_s)
    return left_s[True], left_s[False]


if __name__ == "__main__":
    main()
