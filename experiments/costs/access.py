"""What keys and rate limits cost an ingress: the HTTP layer alone, in this process, over no backend to speak of."""

from __future__ import annotations

import asyncio
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from starlette.routing import Router
from starlette.types import Scope

from deployments.access import AccessSettings
from deployments.ingress.access.gate import gate_of
from deployments.ingress.api.bodies import InferRequest
from deployments.ingress.api.http import build_app
from earlyexit.clock import MonotonicClock
from earlyexit.codecs.text import TextCodec
from earlyexit.tasks.label import LabelTask
from earlyexit.wire import Answer
from experiments.turns import Figures, Side

BODY = b'{"inputs": "how long does a cheesecake bake"}'
KEY = "key-0123456789abcdef"
OTHERS = ",".join(f"other-{index:016d}" for index in range(99))
ANSWER = [Answer(sample_id="", value=0, score=0.75, exit=1)]
GATES: Mapping[str, tuple[AccessSettings | None, str]] = {
    "nothing": (None, ""),
    "1 key": (AccessSettings(keys_env="K"), KEY),
    "100 keys": (AccessSettings(keys_env="K"), f"{OTHERS},{KEY}"),
    "1 key and a rate": (AccessSettings(keys_env="K", rate_per_s=1e9, burst=1e9), KEY),
}
"""What is on, and the keys."""


@contextmanager
def access(options: Namespace) -> Iterator[Mapping[str, Side]]:
    """A side per gate."""
    yield {name: partial(cost_us, app(*gate), options.requests) for name, gate in GATES.items()}


def app(settings: AccessSettings | None, keys: str) -> Router:
    """An ingress's HTTP layer, over a backend that answers at once."""

    async def infer(_: InferRequest) -> list[Answer]:
        return ANSWER

    async def nothing() -> dict[str, Any]:
        return {}

    backend: Any = SimpleNamespace(
        card=SimpleNamespace(name="nothing", max_length=8),
        task=LabelTask(("a", "b")),
        signature=SimpleNamespace(codec=TextCodec(8)),
        version="1",
        max_body_bytes=1_000_000,
        infer=infer,
        choose=lambda _: None,
        count_request=lambda *_: None,
        stats=nothing,
        plan=nothing,
    )
    return build_app(backend, gate_of(settings, MonotonicClock(), 1, {"K": keys}))


def cost_us(router: Router, num_requests: int) -> Figures:
    """Processor time per `POST /predict`."""
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

    async def ask() -> None:
        for _ in range(num_requests):
            scope: Scope = base | {"headers": headers}
            await router(scope, receive, send)

    began_s = time.process_time()
    asyncio.run(ask())
    return {"us of processor time per request": (time.process_time() - began_s) / num_requests * 1e6}
