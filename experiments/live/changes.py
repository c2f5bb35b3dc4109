"""Changes a live service between plans of one chain and of several, and kills replicas of every chain, under load.

    python -m experiments.live.changes [--steps best:1,best:3,kill,best:1,kill,best:2,kill,best:3] [--seconds 300]

EMULATED accelerators as in `experiments.live.validation`. A step is a plan, or "kill", which kills the first replica of
every chain's first stage and ends when all replicas are back. Deadlines are minutes away, so every request must be
answered, once, as the records of its inputs say under a plan that was in force meanwhile. Writes
runs/live/changes.json. Minutes: 6.
"""

from __future__ import annotations

import asyncio
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import httpx

from deployments.local_ray.cluster import LocalCluster
from experiments.data import RUNS
from experiments.kit import print_table, write_json
from experiments.live.validation import Bench, Driven, bench, drive, is_right, options_of, possible_answers
from offramp.demo.turns import apply, manual_control, served
from offramp.load.generator import RequestRecord
from offramp.load.sustained import percentile
from optimizer.plans.plan import Plan

KILL = "kill"
PAUSE_S = 10.0
"""Pause before each step and after the last, in seconds."""
PATIENCE_S = 60.0
"""A quarter of the timeout of a request, in seconds."""
LOOK_S = 0.5
UPDATE_S = 3.0
"""Longer than `GET /metrics` needs to be up to date, in seconds."""
COUNTED = ("inputs", "answers", "drops")
"""The counts of the ingress that are checked."""


class Step(NamedTuple):
    """A change of the service, the plan in force afterwards, and its begin and end in seconds of the load."""

    name: str
    plan: Plan
    begin_s: float
    end_s: float


async def run(setup: Bench, url: str, plans: Mapping[str, Plan], names: Sequence[str]) -> dict[str, Any]:
    """Sends the load, performs the steps, and returns the outcomes of the requests."""
    rate_per_s = setup.options.share * min(plan.predicted["rate_per_s"] for plan in plans.values())
    began_s = time.monotonic()
    load = asyncio.create_task(drive(setup, url, rate_per_s, setup.options.seconds, slo_s=PATIENCE_S))
    steps = [Step(names[0], plans[names[0]], 0.0, 0.0)]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S, trust_env=False) as client:
        for name in names[1:]:
            await asyncio.sleep(PAUSE_S)
            begin_s, plan = time.monotonic() - began_s, plans.get(name, steps[-1].plan)
            await (kill(client, plan) if name == KILL else apply(plan))
            steps.append(Step(name, plan, begin_s, time.monotonic() - began_s))
            print(f"{name}: {begin_s:.1f} to {steps[-1].end_s:.1f} s", flush=True)
        await asyncio.sleep(PAUSE_S)
        assert time.monotonic() - began_s < setup.options.seconds, "the load ended before the last step: more --seconds"
        driven = await load
        await asyncio.sleep(UPDATE_S)
        page = (await client.get("/metrics")).text
    counted = {each: sum(map(float, re.findall(rf"^offramp_{each}_total{{.*}} (.+)$", page, re.M))) for each in COUNTED}
    return {"counted": counted, **outcomes(setup, driven, steps)}


async def kill(client: httpx.AsyncClient, plan: Plan) -> None:
    """Kills a replica of every chain, and waits until all are back."""
    firsts = accumulate((len(each.stages) for each in plan.chains[:-1]), initial=0)
    stages = (await client.get("/stats")).raise_for_status().json()["stages"]
    killed = {stages[first][0]["pid"] for first in firsts}
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    pids: list[list[int]] = []
    while [*map(len, pids)] != [stage.replicas for stage in plan.stages] or not killed.isdisjoint(chain(*pids)):
        await asyncio.sleep(LOOK_S)
        reply = await client.get("/stats")
        pids = [[each["pid"] for each in of] for of in reply.json()["stages"]] if reply.is_success else []


def outcomes(setup: Bench, driven: Driven, steps: Sequence[Step]) -> dict[str, Any]:
    """Returns the outcomes of the requests, in total and for the requests that were due during each step."""
    answers_of = [possible_answers(setup.records, step.plan) for step in steps]

    def is_answered(record: RequestRecord) -> bool:
        """Returns whether the answer follows one of the plans that were in force while the request ran."""
        sample_ids, ends_s = driven.sample_ids(record), [*(step.end_s for step in steps[1:]), math.inf]
        there = [
            each
            for each, step, end_s in zip(answers_of, steps, ends_s, strict=True)
            if step.begin_s <= record.done_s and record.sent_s <= end_s
        ]
        either = {key: set(chain(*(of[key] for of in there))) for key in sample_ids}
        return record.error is None and is_right(sample_ids, record, either)

    rows = []
    for step, end_s in zip(steps, [*(step.begin_s for step in steps[1:]), math.inf], strict=True):
        due = [record for record in driven.records if step.begin_s <= record.scheduled_s < end_s]
        latencies_s = [record.latency_s for record in due if record.error is None]
        took = step.name, len(step.plan.chains), step.end_s - step.begin_s
        in_slo = sum(latency_s <= setup.slo_s for latency_s in latencies_s) / max(1, len(due))
        rows.append((*took, len(due), sum(map(is_answered, due)), in_slo, percentile(latencies_s, 99)))
    columns = ("step", "chains", "took_s", "requests", "answered rightly", "in the SLO", "p99_s")
    print_table("plans change and replicas die", columns, rows)
    errors = Counter(record.error for record in driven.records if record.error is not None)
    return {"columns": columns, "rows": rows, "errors": errors, "machine": driven.machine}


def main() -> None:
    """Serves, changes, prints and writes."""
    parser = options_of("experiments.live.changes", __doc__, devices="V100=1,P100=1,K80=2", slo_s=0.5)
    parser.add_argument("--steps", default="best:1,best:3,kill,best:1,kill,best:2,kill,best:3", help="plans and kills")
    parser.add_argument("--share", type=float, default=0.5, help="load as a share of the slowest plan's predicted rate")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of load")
    setup = bench(parser.parse_args())
    names = setup.options.steps.split(",")
    plans = {name: setup.best(name) for name in names if name != KILL}
    control = manual_control(setup.problem, setup.policy, RUNS / "live" / "changes.sqlite")
    control = control.model_copy(update={"watch_s": PATIENCE_S})  # otherwise a stage that is empty for 30 s is given up
    settings = setup.settings(plans[names[0]]).model_copy(update={"slo_s": None, "control": control})
    with served(settings, plans[names[0]], LocalCluster(port=setup.options.port)) as url:
        result = asyncio.run(run(setup, url, plans, names))
    print(f"errors: {result['errors']}, counted by the ingress: {result['counted']}, CPU {result['machine']:.0%}")
    print(f"written: {write_json(result, RUNS / 'live' / 'changes.json')}")


if __name__ == "__main__":
    main()
