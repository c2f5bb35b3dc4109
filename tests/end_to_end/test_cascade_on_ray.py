"""A cascade behind a real Ray Serve application: its replicas are killed, its networks come and go, under load."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from optimizer.plan_file import plan_document
from tests.end_to_end.one_ray import URL, OneRay
from tests.end_to_end.tiny_cascade import NETWORKS, TIMEOUT_S, TinyCascade, make_cascade

pytestmark = pytest.mark.ray

CLIENTS = 4
PAUSE_S = 0.04
SOME = 30
"""Answers that show what a plan does."""
PATIENCE_S = 280.0
"""On a busy machine a replica takes most of a minute to come back; what is lost never does."""


@pytest.fixture(scope="module")
def cascade(tmp_path_factory: pytest.TempPathFactory) -> TinyCascade:
    return make_cascade(tmp_path_factory.mktemp("cascade"))


@dataclass
class Load:
    """Clients that ask one text after the other, and keep what they got."""

    cascade: TinyCascade
    stop: threading.Event = field(default_factory=threading.Event)
    answers: list[tuple[int, int, dict[str, Any]]] = field(default_factory=list)
    """Index, status and body, in the order in which they came."""

    def run(self, first: int) -> None:
        with httpx.Client(base_url=URL, timeout=PATIENCE_S) as client:
            turn = first
            while not self.stop.is_set():
                index = turn % len(self.cascade.texts)
                reply = client.post("/predict", json={"inputs": self.cascade.texts[index], "timeout_s": TIMEOUT_S})
                self.answers.append((index, reply.status_code, reply.json()))
                self.stop.wait(PAUSE_S)
                turn += 1

    def more(self, number: int = SOME) -> list[tuple[int, int, dict[str, Any]]]:
        """The answers to what is asked from now on, so many at least."""
        before, until_s = len(self.answers) + CLIENTS, time.monotonic() + PATIENCE_S
        while len(self.answers) < before + number and time.monotonic() < until_s:
            time.sleep(PAUSE_S)
        return self.answers[before:]


@contextmanager
def under_load(cascade: TinyCascade) -> Iterator[Load]:
    load = Load(cascade)
    threads = [threading.Thread(target=load.run, args=(7 * client,)) for client in range(CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        for thread in threads:
            thread.join()


def kill_all(http: httpx.Client) -> list[int]:
    """Every stage's replicas, kill -9, with what is inside."""
    pids = [replica["pid"] for replicas in http.get("/stats").json()["stages"] for replica in replicas]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return pids


def test_networks_die_come_and_go_and_nobody_is_lost_or_answered_wrongly(one_ray: OneRay, cascade: TinyCascade) -> None:
    settings = cascade.settings()
    one_ray.serve(settings)
    seen: dict[str, list[tuple[int, int, dict[str, Any]]]] = {}
    with httpx.Client(base_url=URL, timeout=PATIENCE_S) as http, under_load(cascade) as load:
        seen["both"] = load.more()
        for networks, plan in (
            ("alone", cascade.single),
            ("both, on one device", cascade.together),
            ("both again", cascade.cascade),
        ):
            assert one_ray.order("apply", {"app": settings.app, "plan": plan_document(plan)})["changed"]
            seen[networks] = load.more()
        killed = kill_all(http)
        seen["both, after their death"] = load.more()
        unmixed = len(load.answers)
        one_ray.order("apply", {"app": settings.app, "plan": plan_document(cascade.ensemble)})
        seen["mixed"] = load.more()
    assert {status for _, status, _ in load.answers} == {200}
    for index, _, answer in load.answers[:unmixed]:
        cascade.check(index, answer)
    for networks, answers in seen.items():
        assert len(answers) >= SOME
        for index, _, answer in answers:
            cascade.check(index, answer, networks.split(",")[0].split()[0])
    exits = {answer["exit"] for _, _, answer in seen["both"]}
    assert min(exits) < NETWORKS[0] <= max(exits), "some cross, some do not"
    assert len(killed) == 2
