"""Images over a convolutional hop: replicas die and plans change under load, and every image is answered once, rightly.

    OFFRAMP_DATA=... python -m experiments.live.hops [--hop-dtypes same,float16]

ResNet-20 on this machine's cores, nothing emulated: two stages, the second from block 3 on, so that 65.5 kB go on for
every image that has not left (32.8 in float16). Under a closed loop of single images a replica of each stage is killed
(-9), the cut moves, the model becomes one stage, and two again. Every answer is held against the uncut model's to that
image: label, exit and score. Half of the images leave before the first cut, half of the others behind the second. In
float16 the share of answers is told that are as the uncut model's, and how many left elsewhere. Without OFFRAMP_DATA
the network is random and the images noise. Writes runs/live/hops.json. Minutes: 2 for each type of hops, more on a busy
machine.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

import numpy as np

from deployments.settings import ServeSettings
from earlyexit.boundary import HopDtype
from earlyexit.clock import MonotonicClock
from earlyexit.wire import Answer
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.live.figures import LOST
from experiments.live.image_model import ImageModel, image_model
from experiments.live.meter import replica_pids
from experiments.live.service import Service, control_settings, served
from offramp.client.client import AsyncClient
from offramp.load.connections import connected
from offramp.load.generator import Generator
from offramp.load.report import RequestRecord
from offramp.load.workload import LoadConfig
from optimizer.plan import Plan
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.table import LatencyTable

CUT, MOVED = 3, 5
HALVING = CUT - 1, MOVED
"""Ramps that are on: on either side of the hop, wherever it is."""
NUM_IMAGES = 400
WORKERS = 6
TIMEOUT_S = 60.0
APPLY_S = 600.0
"""A replica starts in seconds, where cores are free."""
QUIET_S = 5.0
"""Between two events."""
PAUSE_S = 0.2
TOLERANCE = 1e-4
"""Of scores: batches round otherwise than single images."""
NEVER_S = 1e9
COLUMNS = (
    "hops",
    "sent",
    "answered",
    "lost",
    "twice",
    "wrong",
    "errors",
    "crossed",
    "other exits",
    "as uncut",
    "score at most",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A run, by what its answers had to be."""

    sent: int
    answered: int
    lost: int
    """Without an answer and without a word why."""
    twice: int
    wrong: int | None
    """Of hops as they are: another label, exit or score than the uncut model's."""
    errors: dict[str, int]
    crossed: int
    """Answers of images that some plan had hop."""
    other_exits: int
    """Answers of images that the uncut model lets out elsewhere."""
    as_uncut: float | None
    """Share of all answers with the uncut model's label; None where there are none."""
    score: float | None
    """Largest difference from the uncut model's, of answers from the same exit; None where there are none."""
    by_exit: dict[int, int]


def main() -> None:
    """Run both, print and write."""
    parser = ArgumentParser(prog="python -m experiments.live.hops", description=__doc__)
    parser.add_argument("--hop-dtypes", default="same,float16")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    options = parser.parse_args()
    model = image_model(NUM_IMAGES, halving=HALVING)
    right = model.answers()
    kind = "trained, CIFAR-10's images" if model.is_trained else "random weights, noise"
    print(f"{model.folder.name} ({kind}), {len(model.images)} images")
    found = {hop_dtype: run(options, model, right, hop_dtype) for hop_dtype in options.hop_dtypes.split(",")}
    show("", COLUMNS, [_row(hop_dtype, judged) for hop_dtype, (judged, _) in found.items()])
    figures = {name: {"judged": judged, "events": events} for name, (judged, events) in found.items()}
    print(f"written: {keep(figures, RUNS / 'live' / 'hops.json')}")


def run(
    options: Namespace, model: ImageModel, right: Sequence[Answer], hop_dtype: HopDtype
) -> tuple[Judged, list[dict[str, Any]]]:
    """A service of its own, from its start to its end; the events with their seconds."""
    plan = model.plan(CUT)
    with served(settings_of(model, plan, hop_dtype), plan, port=options.port, front=options.front) as service:
        records, events = asyncio.run(under_load(service, model))
    for event in events:
        print(f"   {hop_dtype}: {event}")
    return judge(model, records, right, hop_dtype), events


def settings_of(model: ImageModel, plan: Plan, hop_dtype: HopDtype) -> ServeSettings:
    """With a controller that looks and never plans."""
    assert plan.policy is not None
    control = control_settings(problem_of(model), plan.policy, state="hops", period_s=NEVER_S, starts_at_once=1)
    return ServeSettings(
        model=str(model.folder.resolve()),
        plan=plan,
        hop_dtype=hop_dtype,
        slots={"cpu": 3},
        control=control,
        default_timeout_s=TIMEOUT_S,
    )


def problem_of(model: ImageModel) -> PlanProblem:
    """What a controller must be told, though nobody plans by it."""
    blocks, ramps = model.model.num_blocks, tuple(sorted(model.thresholds))
    of_blocks, of_ramps = np.full((blocks, 2), 1e-3), np.full((len(ramps), 2), 1e-4)
    return PlanProblem(
        num_blocks=blocks,
        ramps=ramps,
        survival_N=(1.0,) * blocks,
        latency={"cpu": LatencyTable(batches=(1, 8), block_s_NB=of_blocks, ramp_s_EB=of_ramps)},
        devices={"cpu": Supply(count=5, usd_per_hour=0.0)},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(0.0,) * blocks,
        slo=Slo(latency_s=TIMEOUT_S),
        objective=MaximizeRate(),
    )


async def under_load(service: Service, model: ImageModel) -> tuple[list[RequestRecord], list[dict[str, Any]]]:
    """Requests back to back for as long as things happen."""
    records, over = list[RequestRecord](), asyncio.Event()
    async with AsyncClient(service.url, TIMEOUT_S) as client:
        metadata = await client.metadata()
    config = LoadConfig(
        url=service.url,
        inputs=model.images,
        num_requests=1,
        concurrency=WORKERS,
        timeout_s=TIMEOUT_S,
        slo_s=TIMEOUT_S,
    )

    def turns() -> Iterator[int]:
        for index in count():
            if over.is_set():
                return
            yield index

    async with connected(service.url) as post:
        generator = Generator(config=config, post=post, rng=random.Random(0), clock=MonotonicClock(), metadata=metadata)
        load = asyncio.create_task(generator.closed_loop(turns(), records.append, pause_s=PAUSE_S))
        try:
            events = await happen(service, model, records)
        finally:
            over.set()
            await load
    return records, events


async def happen(service: Service, model: ImageModel, records: Sequence[RequestRecord]) -> list[dict[str, Any]]:
    """One thing after the other; what each took, and how many answers came meanwhile."""
    done = []
    for name, event in happenings(service, model):
        await asyncio.sleep(QUIET_S)
        began_s, before = time.monotonic(), len(records)
        await event()
        took_s = round(time.monotonic() - began_s, 2)
        done.append({"event": name, "seconds": took_s, "requests_meanwhile": len(records) - before})
    await asyncio.sleep(QUIET_S)
    return done


def happenings(service: Service, model: ImageModel) -> list[tuple[str, Callable[[], Coroutine[Any, Any, None]]]]:
    """In their order: with two replicas in every stage, one of which is killed, the other has all the work."""

    async def kill(stage: int) -> None:
        slot = list((await service.current())["slots"])[stage]
        os.kill(replica_pids(service.app)[slot][0], signal.SIGKILL)

    async def follow(plan: Plan) -> None:
        await service.apply(plan, hold=True, timeout_s=APPLY_S)

    return [
        ("a replica of the first stage is killed", lambda: kill(0)),
        ("a replica of the second stage is killed", lambda: kill(1)),
        (f"the cut moves from block {CUT} to {MOVED}", lambda: follow(model.plan(MOVED))),
        ("one stage", lambda: follow(model.plan())),
        ("two stages again", lambda: follow(model.plan(CUT))),
    ]


def judge(model: ImageModel, records: Sequence[RequestRecord], right: Sequence[Answer], hop_dtype: HopDtype) -> Judged:
    """Hold every answer against the uncut model's."""
    names = model.model.task.spec()["label_names"]
    errors = Counter(record.error for record in records if record.error is not None)
    answers = [(record.predictions[0], right[record.input_indices[0]]) for record in records if record.error is None]
    same_exit = [(answer, wanted) for answer, wanted in answers if answer.exit == wanted.exit]
    labels = sum(answer.label == names[wanted.value] for answer, wanted in answers)
    score = max((abs(answer.score - wanted.score) for answer, wanted in same_exit), default=None)
    ids = [record.request_id for record in records]
    wrong = sum(
        answer.label != names[wanted.value]
        or answer.exit != wanted.exit
        or abs(answer.score - wanted.score) > TOLERANCE
        for answer, wanted in answers
    )
    return Judged(
        sent=len(records),
        answered=len(answers),
        lost=sum(errors[kind] for kind in LOST),
        twice=len(ids) - len(set(ids)),
        wrong=wrong if hop_dtype == "same" else None,
        errors=dict(errors),
        crossed=sum(answer.exit >= CUT for answer, _ in answers),
        other_exits=len(answers) - len(same_exit),
        as_uncut=labels / len(answers) if answers else None,
        score=score,
        by_exit=dict(sorted(Counter(answer.exit for answer, _ in answers).items())),
    )


def _row(hop_dtype: str, each: Judged) -> tuple[object, ...]:
    return (
        hop_dtype,
        str(each.sent),
        str(each.answered),
        str(each.lost),
        str(each.twice),
        "-" if each.wrong is None else str(each.wrong),
        ", ".join(f"{kind} {number}" for kind, number in each.errors.items()) or "none",
        str(each.crossed),
        str(each.other_exits),
        "-" if each.as_uncut is None else f"{each.as_uncut:.2%}",
        "-" if each.score is None else f"{each.score:.1e}",
    )


if __name__ == "__main__":
    main()
