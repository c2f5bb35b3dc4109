"""A service whose plan bounds batches by tokens: inputs of all lengths, a replica's death, and changes to and fro."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from optimizer.plan import Plan
from optimizer.plan_file import parse_plan, plan_document
from tests.end_to_end.one_ray import METRICS_PORT, OneRay
from tests.end_to_end.tiny_service import MAX_LENGTH, Tiny, controlled_service, two_stages
from tests.metrics_page import check_series, documented_series, once_on_page

pytestmark = pytest.mark.ray

TOKENS = 10
"""Less than the longest text has, so that some run alone."""
NUM_CLIENTS = 6
PER_REQUEST = 5
METRICS_S = 40.0


def by_tokens(plan: Plan) -> Plan:
    stages = tuple(
        replace(stage, splits=tuple(replace(split, tokens=TOKENS) for split in stage.splits)) for stage in plan.stages
    )
    return replace(plan, stages=stages, predicted={"rate_per_s": 1000.0, "tokens_per_input": 6.0})


@dataclass
class Load:
    """Clients that ask for several texts at a time, and hold every answer against the uncut model's."""

    tiny: Tiny
    answered: int = 0
    refused: list[str] = field(default_factory=list)
    news: asyncio.Event = field(default_factory=asyncio.Event)

    async def ask(self, client: httpx.AsyncClient, first: int) -> None:
        count = len(self.tiny.texts)
        while True:
            asked = [(first + step) % count for step in range(PER_REQUEST)]
            body = {"inputs": [self.tiny.texts[index] for index in asked], "timeout_s": 50.0}
            reply = await client.post("/predict", json=body)
            if reply.status_code != 200:
                self.refused.append(reply.text)
                self.news.set()
                return
            for index, answer in zip(asked, reply.json()["outputs"], strict=True):
                self.tiny.check(index, answer)
            self.answered += PER_REQUEST
            self.news.set()
            first += PER_REQUEST + 1

    async def more(self, count: int) -> None:
        """Wait until so many more were answered."""
        until = self.answered + count
        async with asyncio.timeout(50.0):
            while self.answered < until and not self.refused:
                await self.news.wait()
                self.news.clear()


@asynccontextmanager
async def under_load(client: httpx.AsyncClient, tiny: Tiny) -> AsyncIterator[Load]:
    load = Load(tiny)
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(load.ask(client, first * 3)) for first in range(NUM_CLIENTS)]
        yield load
        for task in tasks:
            task.cancel()


async def test_inputs_of_all_lengths_are_answered_rightly_through_deaths_and_changes_of_what_bounds_batches(
    one_ray: OneRay, tiny: Tiny
) -> None:
    assert max(len(text.split()) for text in tiny.texts) > TOKENS
    settings = controlled_service(tiny)
    plan = by_tokens(two_stages(tiny.thresholds))
    url = one_ray.serve(settings.model_copy(update={"plan": plan}))
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client, under_load(client, tiny) as load:
        # A controller takes up what was in force in an earlier service of its name.
        await asyncio.to_thread(one_ray.order, "apply", {"app": settings.app, "plan": plan_document(plan)})
        await load.more(200)
        before = await stages_of(client)
        for plan_now in (two_stages(tiny.thresholds), plan, two_stages(tiny.thresholds), plan):
            document = plan_document(plan_now)
            assert parse_plan(document).splits == plan_now.splits
            verdict = await asyncio.to_thread(one_ray.order, "apply", {"app": settings.app, "plan": document})
            assert verdict["changed"]
            await load.more(100)
        [[first], [second]] = await stages_of(client)
        for replica in (first, second):
            os.kill(replica["pid"], signal.SIGKILL)
            await load.more(100)
        described = (await client.get("/plan")).json()
        too_long = await client.post("/predict", json={"inputs": " ".join(["pay"] * (MAX_LENGTH + 5))})
        wanted = {name for name in documented_series() if "token" in name or "oldest" in name}
        page = await asyncio.to_thread(once_on_page, METRICS_PORT, wanted, METRICS_S, settings.app)
    assert load.refused == []
    assert too_long.status_code == 422, too_long.text
    check_series(page, wanted)
    check_fill(before)
    assert [split["tokens"] for stage in described["plan"]["stages"] for split in stage["splits"]] == [TOKENS] * 3
    assert all(row["tokens"] == TOKENS for row in described["fill"])


def check_fill(stages: list[list[dict[str, Any]]]) -> None:
    """Batches hold up to ten tokens, or one input of up to eleven."""
    for [replica] in stages:
        for split in replica["splits"]:
            assert split["inputs"] <= split["tokens"] <= split["batches"] * (MAX_LENGTH - 1)
            assert split["token_fill"] == pytest.approx(split["tokens"] / split["batches"] / TOKENS)
    [first] = stages[0][0]["splits"]
    assert first["inputs"] > first["batches"], "short ones ran together"


async def stages_of(client: httpx.AsyncClient) -> list[list[dict[str, Any]]]:
    stages: list[list[dict[str, Any]]] = (await client.get("/stats")).json()["stages"]
    return stages
