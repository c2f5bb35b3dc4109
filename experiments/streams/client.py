"""Streams of OpenAI's `/v1/completions`, sent at a rate or so many at once, and when their text came."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import httpx
import numpy as np

OPEN = httpx.codes.OK
DATA, DONE = "data: ", "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """A prompt, and how many tokens its answer has."""

    prompt: str
    tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Streamed:
    """What came of one sequence, and when: seconds since the load began."""

    due_s: float
    sent_s: float
    first_s: float | None = None
    """First text; None where none came."""
    last_s: float | None = None
    tokens: int = 0
    """As the server says, else pieces of text."""
    error: str | None = None
    text: str = ""
    exits: Mapping[str, int] = field(default_factory=dict)
    """Tokens by the block that they left after, where the server says."""

    @property
    def ttft_s(self) -> float:
        """To the first text, from when it was due; infinite where it failed."""
        return float("inf") if self.error is not None or self.first_s is None else self.first_s - self.due_s

    @property
    def tpot_s(self) -> float:
        """Per token behind the first."""
        if self.error is not None or self.first_s is None or self.last_s is None:
            return float("inf")
        return (self.last_s - self.first_s) / max(1, self.tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who sends, where, and what beside prompt and length."""

    url: str
    model: str
    more: Callable[[int], Mapping[str, Any]]
    """By the tokens of an answer."""
    timeout_s: float = 60.0
    transport: httpx.AsyncBaseTransport | None = None
    """None: the network."""

    async def at_rate(self, asked: Sequence[Asked], rate_per_s: float, seconds: float, seed: int) -> list[Streamed]:
        """Poisson arrivals for so long, each answered to its end."""
        rng = np.random.default_rng(seed)
        due_s = np.cumsum(rng.exponential(1 / rate_per_s, size=int(4 * rate_per_s * seconds) + 10))
        async with self._http() as http, asyncio.TaskGroup() as group:
            start_s, tasks = time.perf_counter(), []
            for at_s, each in zip(due_s[due_s < seconds].tolist(), cycle(asked)):
                await asyncio.sleep(max(0.0, start_s + at_s - time.perf_counter()))
                tasks.append(group.create_task(self._one(http, each, start_s, at_s)))
        return [task.result() for task in tasks]

    async def at_once(self, asked: Sequence[Asked], concurrency: int) -> tuple[list[Streamed], float]:
        """All of them, so many under way; and the seconds that this took."""
        waiting, found = iter(asked), list[Streamed]()
        start_s = time.perf_counter()
        async with self._http() as http, asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(self._worker(http, waiting, start_s, found))
        return found, time.perf_counter() - start_s

    def _http(self) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None)
        return httpx.AsyncClient(base_url=self.url, timeout=self.timeout_s, limits=limits, transport=self.transport)

    async def _worker(
        self, http: httpx.AsyncClient, waiting: Iterator[Asked], start_s: float, found: list[Streamed]
    ) -> None:
        for each in waiting:
            streamed = await self._one(http, each, start_s, time.perf_counter() - start_s)
            found.append(streamed)

    async def _one(self, http: httpx.AsyncClient, asked: Asked, start_s: float, due_s: float) -> Streamed:
        body = {
            "model": self.model,
            "prompt": asked.prompt,
            "max_tokens": asked.tokens,
            "temperature": 0,
            "stream": True,
            **self.more(asked.tokens),
        }
        sent_s, came_s = time.perf_counter() - start_s, list[float]()
        texts, tokens, error = list[str](), 0, None
        exits: Mapping[str, int] = {}
        try:
            async with http.stream("POST", "/v1/completions", json=body) as reply:
                if reply.status_code != OPEN:
                    error = f"{reply.status_code}: {(await reply.aread()).decode()[:200]}"
                async for line in reply.aiter_lines():
                    event = _event(line)
                    if event is None:
                        continue
                    error = str(event["error"]) if "error" in event else error
                    text = "".join(choice.get("text") or "" for choice in event.get("choices", ()))
                    if text:
                        came_s.append(time.perf_counter() - start_s)
                        texts.append(text)
                    exits = event.get("offramp", {}).get("exits", exits)
                    tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
        except httpx.HTTPError as raised:
            error = f"{type(raised).__name__}: {raised}"
        first_s, last_s = (came_s[0], came_s[-1]) if came_s else (None, None)
        return Streamed(
            due_s=due_s,
            sent_s=sent_s,
            first_s=first_s,
            last_s=last_s,
            tokens=tokens or len(came_s),
            error=error or (None if came_s else "no text came"),
            text="".join(texts),
            exits=exits,
        )


def _event(line: str) -> dict[str, Any] | None:
    """What a line of a stream says; None of one that says nothing."""
    if not line.startswith(DATA) or line[len(DATA) :].strip() == DONE:
        return None
    event: dict[str, Any] = json.loads(line[len(DATA) :])
    return event
