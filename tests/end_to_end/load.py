"""Clients that send requests until a test ends, and keep the answers."""

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
"""Pause between two requests of a client, because starting replicas need processor time too."""
PATIENCE_S = 280.0
"""On a busy machine a replica takes most of a minute to restart. A lost answer never comes."""
Answers = list[tuple[int, dict[str, Any]]]
"""Answers with the index of their text."""


@dataclass
class Load:
    """The requests of the clients, and their answers in order of arrival."""

    texts: Sequence[str]
    clients: int
    per_request: int
    timeout_s: float
    answers: Answers = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def more(self, number: int) -> Answers:
        """Waits for at least this number of answers to later requests, and returns them."""
        before, until_s = len(self.answers) + self.clients * self.per_request, time.monotonic() + PATIENCE_S
        while len(self.answers) < before + number and time.monotonic() < until_s:
            assert self.refused == []
            time.sleep(PAUSE_S)
        assert len(self.answers) >= before + number
        return self.answers[before:]

    def send_requests(self, first: int) -> None:
        """Sends one request after the other, the first with the text of this index."""
        with httpx.Client(base_url=URL, timeout=PATIENCE_S) as client:
            while not self.over.is_set():
                indices = [(first + step) % len(self.texts) for step in range(self.per_request)]
                body = {"inputs": [self.texts[index] for index in indices], "timeout_s": self.timeout_s}
                reply = client.post("/predict", json=body)
                if reply.status_code != 200:
                    self.refused.append(reply.text)
                    return
                self.answers += zip(indices, reply.json()["outputs"], strict=True)
                first += self.per_request + (self.per_request > 1)  # in other batches each time
                self.over.wait(PAUSE_S)


@contextmanager
def under_load(texts: Sequence[str], *, clients: int, per_request: int = 1, timeout_s: float = 50.0) -> Iterator[Load]:
    """Sends load until the end of the block; no request may be refused."""
    load = Load(texts, clients, per_request, timeout_s)
    threads = [threading.Thread(target=load.send_requests, args=(7 * client,)) for client in range(clients)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.over.set()
        for thread in threads:
            thread.join()
    assert load.refused == []
