"""What an ingress does itself for a request, each step alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from deployments.ingress.api.answers import predict_response
from deployments.ingress.api.parsing import parse_predict
from earlyexit.codecs import find_codec
from earlyexit.store import read_card
from earlyexit.tasks import find_task
from earlyexit.wire import Answer
from experiments.peers.workloads import Workload

REPEATS = 2000


def step_s(workload: Workload, bodies: Sequence[bytes]) -> dict[str, float]:
    """Seconds of processor time per request: parse, tokenize, answer."""
    card = read_card(workload.folder)
    codec, task = find_codec(card.codec, workload.folder), find_task(card.task)
    some = [bodies[k % len(bodies)] for k in range(REPEATS)]
    requests = [parse_predict(body, codec)[0] for body in some]
    answer = Answer(sample_id="0", value=0, score=0.9, exit=0)
    steps: dict[str, Callable[[int], object]] = {
        "parse": lambda k: parse_predict(some[k], codec),
        "tokenize": lambda k: codec.encode(requests[k].rows, truncate=True),
        "answer": lambda k: predict_response(
            [answer] * len(requests[k].rows), task, "id", many=len(requests[k].rows) > 1
        ),
    }
    return {name: _seconds(step) / REPEATS for name, step in steps.items()}


def _seconds(step: Callable[[int], object]) -> float:
    took_s = 0.0
    for _ in range(2):  # the first is cold
        started_s = time.process_time()
        for k in range(REPEATS):
            step(k)
        took_s = time.process_time() - started_s
    return took_s
