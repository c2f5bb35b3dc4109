"""Where a service's processor time goes, per input: process by process, and inside the ingress step by step."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

import psutil

from deployments.ingress.api.answers import predict_response
from deployments.ingress.api.parsing import parse_predict
from earlyexit.codecs import find_codec
from earlyexit.store import read_card
from earlyexit.tasks import find_task
from earlyexit.wire import Answer
from experiments.peers.processes import PeerProcess
from experiments.peers.workloads import Workload

PARTS = (("haproxy", "HAProxy"), (":ingress", "ingress"), (":split-", "stages"), (":controller", "controller"))
"""Words of a process' name or command, and what it is called here; whatever else there is, is Ray's."""
REST = "Ray itself"
STEP_REPEATS = 2000


def cpu_s_by_part(server: PeerProcess) -> dict[str, float]:
    """Processor seconds of the living processes since they began."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for process in server.processes():
        try:
            times = process.cpu_times()
            seconds[part_of(process)] += times.user + times.system
        except psutil.NoSuchProcess:
            continue
    return seconds


def part_of(process: psutil.Process) -> str:
    """Which part of a service a process is; raises NoSuchProcess where it has ended."""
    words = f"{process.name()} {' '.join(process.cmdline())}"
    return next((name for word, name in PARTS if word in words), REST)


def spent(before: Mapping[str, float], after: Mapping[str, float], num_inputs: int) -> dict[str, float]:
    """Seconds per input, by part."""
    return {part: (after[part] - before.get(part, 0.0)) / num_inputs for part in after}


def step_s(workload: Workload, bodies: Sequence[bytes]) -> dict[str, float]:
    """Seconds per request of what an ingress does itself, each step alone: parse, tokenize, answer."""
    card = read_card(workload.folder)
    codec, task = find_codec(card.codec, workload.folder), find_task(card.task)
    some = [bodies[k % len(bodies)] for k in range(STEP_REPEATS)]
    requests = [parse_predict(body, codec)[0] for body in some]
    answer = Answer(sample_id="0", value=0, score=0.9, exit=0)
    answers = [[answer] * len(request.rows) for request in requests]

    def tokenize() -> None:
        for request in requests:
            codec.encode(request.rows, truncate=True)

    def parse() -> None:
        for body in some:
            parse_predict(body, codec)

    def reply() -> None:
        for each in answers:
            predict_response(each, task, "id", many=len(each) > 1)

    return {
        name: _seconds(step) / STEP_REPEATS
        for name, step in (("parse", parse), ("tokenize", tokenize), ("answer", reply))
    }


def _seconds(step: Callable[[], None]) -> float:
    step()  # once cold
    started_s = time.process_time()
    step()
    return time.process_time() - started_s
