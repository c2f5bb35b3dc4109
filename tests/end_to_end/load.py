"""Clients that ask a service until a test is over, and keep what it answers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.end_to_end.one_ray import URL

PAUSE_S = 0.05
"""Between two requests of a client: replicas that start need the processors too."""
PATIENCE_S = 280.0
"""On a busy machine a replica takes most of a minute to come back; what is lost never does."""
Answers = list[tuple[int, dict[str, Any]]]
"""Each with the index of its text."""


@dataclass
class Load:
    """What the clients ask, and what they got, in the order in which it came."""

    texts: Sequence[str]
    clients: int
    per_request: int
    timeout_s: float
    answers: Answers = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def more(self, number: int) -> Answers:
        """The answers to what is asked from now on, so many at least."""
        before, until_s = len(self.answers) + self.clients * self.per_request, time.monotonic() + PATIENCE_S
        while len(self.answers) < before + number and time.monotonic() < until_s:
            assert self.refused == []
            time.sleep(PAUSE_S)
        assert len(self.answers) >= before + number
        return self.answers[before:]

    def ask(self, first: int) -> None:
        """One request after the other, the first of the text with this index."""
        with httpx.Client(base_url=URL, timeout=PATIENCE_S) as client:
            while not self.over.is_set():
                asked = [(first + step) % len(self.texts) for step in range(self.per_request)]
                body = {"inputs": [self.texts[index] for index in asked], "timeout_s": self.timeout_s}
                reply = client.post("/predict", json=body)
                if reply.status_code != 200:
                    self.refused.append(reply.text)
                    return
                self.answers += zip(asked, reply.json()["outputs"], strict=True)
                first += self.per_request + (self.per_request > 1)  # in other company each time
                self.over.wait(PAUSE_S)


@contextmanager
def under_load(texts: Sequence[str], *, clients: int, per_request: int = 1, timeout_s: float = 50.0) -> Iterator[Load]:
    """No request may be refused."""
    load = Load(texts, clients, per_request, timeout_s)
    threads = [threading.Thread(target=load.ask, args=(7 * client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.over.set()
        for thread in threads:
            thread.join()
    assert load.refused == []
