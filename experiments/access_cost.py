"""What keys and rate limits cost an ingress: the HTTP layer alone, in this process, over a backend that costs nothing.

    python -m experiments.access_cost [--requests 20000]

Prints microseconds of processor time per request, medians of rounds that take turns. Seconds: about 30.
"""

from __future__ import annotations

import asyncio
import time
from argparse import ArgumentParser
from collections.abc import MutableMapping
from statistics import median
from typing import Any

from starlette.routing import Router
from starlette.types import Scope

from deployments.access import AccessSettings
from deployments.ingress.access.gate import gate_of
from deployments.ingress.api.bodies import InferRequest
from deployments.ingress.api.http import build_app
from deployments.ingress.api.signature import Signature
from deployments.ingress.dashboard.feed import Viewer
from earlyexit.clock import MonotonicClock
from earlyexit.codecs.text import TextCodec
from earlyexit.store import ModelCard
from earlyexit.tasks import find_task
from earlyexit.wire import Answer

BODY = b'{"inputs": "how long does a cheesecake bake"}'
KEY = "key-0123456789abcdef"
ANSWER = [Answer(sample_id="", value=0, score=0.75, exit=1)]
CARD = ModelCard(
    name="nothing",
    family="bert",
    backbone={},
    codec={"name": "text", "max_length": 8},
    task={"name": "label", "label_names": ["a", "b"]},
    boundaries=((),),
    ramp_style="light",
    pooling="mean",
    head_style="light",
    head_pooling="mean",
    ramps=(),
    num_blocks=1,
    provenance={},
)


class NoBackend:
    """Answers at once."""

    card = CARD
    task = find_task(CARD.task)
    signature = Signature(TextCodec(CARD.max_length), task)
    version = "1"
    max_body_bytes = 1_000_000

    @property
    def versions(self) -> NoBackend:
        """It knows of its own."""
        return self

    async def names(self) -> list[str]:
        """Ours alone."""
        return [self.version]

    def choose(self, request_id: str) -> None:
        """Nobody else."""

    async def infer(self, request: InferRequest) -> list[Answer]:
        """Nothing is computed."""
        return ANSWER

    def is_ready(self) -> bool:
        """Always."""
        return True

    async def stats(self) -> dict[str, Any]:
        """None."""
        return {}

    async def plan(self) -> dict[str, Any]:
        """None."""
        return {}

    async def plan_history(self, limit: int) -> list[dict[str, Any]]:
        """None."""
        return []

    def watch(self) -> Viewer:
        """Nobody looks."""
        raise NotImplementedError

    def count_request(self, route: str, status: int) -> None:
        """Not counted."""


def apps() -> dict[str, Router]:
    """By what is on."""
    rate = 1e9
    return {
        "nothing": app(None, ""),
        "1 key": app(AccessSettings(keys_env="K"), KEY),
        "100 keys": app(AccessSettings(keys_env="K"), ",".join([*(f"other-{i:016d}" for i in range(99)), KEY])),
        "1 key and a rate": app(AccessSettings(keys_env="K", rate_per_s=rate, burst=rate), KEY),
    }


def app(access: AccessSettings | None, keys: str) -> Router:
    """An ingress's HTTP layer."""
    return build_app(NoBackend(), gate_of(access, MonotonicClock(), 1, {"K": keys}))


async def cost_us(router: Router, num_requests: int) -> float:
    """Microseconds of processor time per `POST /predict`."""
    headers = [
        (b"host", b"127.0.0.1"),
        (b"content-length", str(len(BODY)).encode()),
        (b"content-type", b"application/json"),
        (b"authorization", f"Bearer {KEY}".encode()),
    ]
    base = {"type": "http", "method": "POST", "path": "/predict", "root_path": "", "query_string": b""}
    message = {"type": "http.request", "body": BODY, "more_body": False}

    async def receive() -> MutableMapping[str, Any]:
        return message

    async def send(sent: MutableMapping[str, Any]) -> None:
        assert sent.get("status", 200) == 200

    began_s = time.process_time()
    for _ in range(num_requests):
        scope: Scope = base | {"headers": headers}
        await router(scope, receive, send)
    return (time.process_time() - began_s) / num_requests * 1e6


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.access_cost", description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    found = apps()
    rounds = [
        {name: asyncio.run(cost_us(each, options.requests)) for name, each in found.items()}
        for _ in range(options.rounds)
    ]
    for name in found:
        print(f"{name:18} {median(each[name] for each in rounds):6.1f} us of processor time per request")


if __name__ == "__main__":
    main()
