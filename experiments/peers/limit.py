"""The compute-bound limit: how many inputs the batch engine alone answers, on all cores, nothing around it.

    python -m experiments.peers.limit '<json of LimitOptions>'

is one core's share: no Ray, no HTTP, tokens ready, everything queued at once. `compute_limit` runs one process per
worker at the same time and adds them up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from earlyexit.errors import OfframpError
from experiments.peers.client import ROOT, write_inputs
from experiments.peers.options import Dtype
from experiments.peers.workloads import Workload
from offramp.demo.plans import Processors
from optimizer.plan import Plan
from optimizer.plan_file import parse_plan, plan_document

WARM_UP_INPUTS = 64


class LimitOptions(BaseModel):
    """One worker's part."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    plan: dict[str, Any]
    texts: Path
    """One JSON line per input: `text`, and `id` where exits are recorded."""
    dtype: Dtype
    threads: int = Field(ge=1)
    seconds: float = Field(gt=0)


def compute_limit(workload: Workload, plan: Plan, dtype: Dtype, machine: Processors, *, seconds: float = 5.0) -> float:
    """Inputs per second of all workers together."""
    with tempfile.TemporaryDirectory() as folder:
        keys = workload.keys or tuple(map(str, range(len(workload.texts))))
        options = LimitOptions(
            model=workload.folder,
            plan=plan_document(plan),
            texts=write_inputs(Path(folder) / "texts.jsonl", workload.texts[: len(keys)], keys[: len(workload.texts)]),
            dtype=dtype,
            threads=machine.threads,
            seconds=seconds,
        )
        command = [sys.executable, "-m", "experiments.peers.limit", options.model_dump_json()]
        workers = [
            subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            for _ in range(machine.workers)
        ]
        return _together(workers)


def _together(workers: list[subprocess.Popen[str]]) -> float:
    """All are ready before any starts."""
    for worker in workers:
        assert worker.stdout is not None
        worker.stdout.readline()
    for worker in workers:
        assert worker.stdin is not None
        worker.stdin.write("go\n")
        worker.stdin.flush()
    rates = [worker.communicate()[0] for worker in workers]
    if any(worker.returncode for worker in workers):
        raise OfframpError("a worker of the compute limit failed; its own words stand above")
    return sum(map(float, rates))


def worker(options: LimitOptions) -> float:
    """Say that it is ready, wait for the word, run; inputs per second."""
    import torch

    from deployments.replica.build import build_policy
    from earlyexit.clock import MonotonicClock
    from earlyexit.codecs.tokenizer import TextTokenizer
    from earlyexit.engine.runner import TorchRunner
    from earlyexit.network.layers import reorder_linears
    from earlyexit.network.store import load_model
    from earlyexit.network.wire import entering
    from experiments.engine.side import Plan as Splits
    from experiments.engine.side import Side, members_of

    torch.set_num_threads(options.threads)
    model = load_model(options.model, dtype=getattr(torch, options.dtype))
    reorder_linears(model)
    plan = parse_plan(options.plan)
    runner = TorchRunner(model, build_policy(plan.policy))
    clock = MonotonicClock()
    side = Side(Splits(name="limit", splits=plan.splits), runner, clock)
    rows = [json.loads(line) for line in options.texts.read_text(encoding="utf-8").splitlines()]
    encoded = TextTokenizer.load(options.model, model.max_length).encode([row["text"] for row in rows], truncate=True)
    wire = entering([f"{row['id']}#{index}" for index, row in enumerate(rows)], encoded)
    side.saturate(members_of(runner.from_wire(wire))[:WARM_UP_INPUTS])
    print("ready", flush=True)
    sys.stdin.readline()
    num_inputs, took_s = 0, 0.0
    while took_s < options.seconds:
        some = members_of(runner.from_wire(wire))[: enough(num_inputs, took_s, options.seconds, len(rows))]
        took_s += side.saturate(some)
        num_inputs += len(some)
    return num_inputs / took_s


def enough(num_inputs: int, took_s: float, seconds: float, most: int) -> int:
    """Inputs for the time left; far more than was asked would be a waste, and far fewer no steady state."""
    if not num_inputs:
        return min(most, 4 * WARM_UP_INPUTS)
    return max(WARM_UP_INPUTS, min(most, int(num_inputs / took_s * (seconds - took_s))))


if __name__ == "__main__":
    print(worker(LimitOptions.model_validate_json(sys.argv[1])), flush=True)
