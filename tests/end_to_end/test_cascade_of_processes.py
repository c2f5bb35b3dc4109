"""A cascade whose replicas are processes: kill -9 and changes of plans under load, and the offline chain's answers."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deployments.api.bodies import InferRequest
from deployments.api.service import InferService
from earlyexit.network.wire import Answer
from tests.end_to_end.cascade_processes import served
from tests.end_to_end.tiny_cascade import NETWORKS, TIMEOUT_S, TinyCascade, make_cascade

pytestmark = pytest.mark.slow

CLIENTS = 8
SOME = 60
"""Answers that show what a plan does."""


class Load:
    """Clients that ask one text after the other."""

    def __init__(self, service: InferService, cascade: TinyCascade) -> None:
        self.answers: list[tuple[int, Answer]] = []
        self._service, self._cascade = service, cascade
        self._clients = [asyncio.create_task(self._ask_for_ever(7 * client)) for client in range(CLIENTS)]

    async def more(self) -> list[tuple[int, Answer]]:
        """The answers to what is asked from now on, so many at least."""
        before = len(self.answers) + CLIENTS
        while len(self.answers) < before + SOME:
            await asyncio.wait(self._clients, timeout=0.01)
            assert not any(client.done() for client in self._clients), "nobody gets an error"
        return self.answers[before:]

    async def end(self) -> None:
        for client in self._clients:
            client.cancel()
        await asyncio.gather(*self._clients, return_exceptions=True)

    async def _ask_for_ever(self, turn: int) -> None:
        texts = self._cascade.texts
        while True:
            index = turn % len(texts)
            request = InferRequest(rows=(texts[index],), ids=("",), truncate=False, timeout_s=TIMEOUT_S)
            [answer] = await self._service.infer(request)
            self.answers.append((index, answer))
            turn += 1


def check(cascade: TinyCascade, index: int, answer: Answer, networks: str = "either") -> None:
    """By the path that it took."""
    if networks == "mixed":
        expected, off = cascade.mixed[index], 5e-4  # probabilities travel in half precision
    else:
        by_small = answer.exit < NETWORKS[0] or networks == "both"
        expected, off = cascade.both[index] if by_small else cascade.alone[index], 2e-5
    assert (answer.value, answer.exit) == (expected.value, expected.exit)
    assert answer.score == pytest.approx(expected.score, abs=off)


async def test_networks_die_come_and_go_and_nobody_is_lost_or_answered_wrongly(tmp_path: Path) -> None:
    cascade = make_cascade(tmp_path)
    seen: dict[str, list[tuple[int, Answer]]] = {}
    async with served(cascade.settings()) as service:
        load = Load(service.service, cascade)
        seen["both"] = await load.more()
        await service.processes.kill()
        seen["both, after their death"] = await load.more()
        plans = {
            "alone": cascade.single,
            "both, on one device": cascade.together,
            "alone again": cascade.single,
            "both again": cascade.cascade,
        }
        for epoch, (networks, plan) in enumerate(plans.items(), 1):
            service.follow(plan, epoch)
            seen[networks] = await load.more()
        await service.processes.kill()
        seen["both at last"] = await load.more()
        unmixed = len(load.answers)
        service.follow(cascade.ensemble, len(plans) + 1)
        seen["mixed"] = await load.more()
        await service.processes.kill()
        seen["mixed, after their death"] = await load.more()
        service.follow(cascade.single, len(plans) + 2)
        seen["alone at last"] = await load.more()
        crossed = service.dispatcher.core.counts.crossings[NETWORKS[0]]
        await load.end()
    for index, answer in load.answers[:unmixed]:
        check(cascade, index, answer)
    for networks, answers in seen.items():
        for index, answer in answers:
            check(cascade, index, answer, networks.split(",")[0].split()[0])
    assert crossed > SOME, "some crossed"
    assert {answer.exit for _, answer in seen["both"]} > {0, NETWORKS[-1] - 1}
