"""A small model behind a real Ray Serve application with a controller: its plan changes under load.

At last to and from one that bounds batches by tokens, under which replicas die.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import pytest

from earlyexit.network.split import Split
from optimizer.plan import Plan, Stage
from optimizer.plan_file import parse_plan, plan_document
from tests.end_to_end.one_ray import METRICS_PORT, URL, OneRay
from tests.end_to_end.tiny_service import MAX_LENGTH, Tiny, controlled_service, two_stages
from tests.metrics_page import check_series, documented_series, once_on_page

pytestmark = pytest.mark.ray

PROBES_S = 60.0
METRICS_S = 120.0
GENERATING = (
    "ray_offramp_sequences",
    "ray_offramp_kv_pages",
    "ray_offramp_prompt_tokens",
    "ray_offramp_generated_tokens",
    "ray_offramp_ttft",
    "ray_offramp_tpot",
)
"""Metrics of models that generate."""
OTHERS_SHOW = (
    "ray_offramp_retries",
    "ray_offramp_version",
    "ray_offramp_alarm_evidence",
    "ray_offramp_batch_token_fill",
    "ray_offramp_crossing",
    "ray_offramp_words",
    "ray_offramp_pruned_words",
    "ray_offramp_pruned_agreement",
    *GENERATING,
)
"""Metrics that other services of these tests have, and what tuned ones, chains, and batches that tokens bound, have
beside."""
AGAIN_S = 0.05
"""Between two requests of a client: replicas that start need the processors too."""
TOKENS = 10
"""Less than the longest text has, so that some run alone."""
NUM_CLIENTS = 6
PER_REQUEST = 5
MORE_S = 240.0


@dataclass
class Load:
    """One client that asks until it is told to stop, and keeps what it got."""

    tiny: Tiny
    stop: threading.Event = field(default_factory=threading.Event)
    statuses: list[int] = field(default_factory=list)
    answers: list[tuple[int, dict[str, Any]]] = field(default_factory=list)

    def run(self) -> None:
        with httpx.Client(base_url=URL, timeout=20.0) as client:
            turn = 0
            while not self.stop.is_set():
                index = turn % len(self.tiny.texts)
                reply = client.post("/predict", json={"inputs": self.tiny.texts[index]})
                self.statuses.append(reply.status_code)
                self.answers.append((index, reply.json()))
                self.stop.wait(AGAIN_S)
                turn += 1


@contextmanager
def under_load(tiny: Tiny) -> Iterator[Load]:
    load = Load(tiny)
    thread = threading.Thread(target=load.run)
    thread.start()
    try:
        yield load
    finally:
        load.stop.set()
        thread.join()


def plans(first: Plan) -> list[Plan]:
    """The same ramps throughout, so every input must get the same answer under each.

    Inputs stay, over a hop, then stop: in one stage that is cut elsewhere, on two replicas, and where they began.
    """
    cut_elsewhere = (Split(first=0, end=1, batch=2, ramps=(0,)), Split(first=1, end=4, batch=8, ramps=(1, 2)))
    one_stage = (Stage(device="cpu", replicas=2, splits=cut_elsewhere),)
    there, cut = (
        replace(first, stages=stages, predicted={"rate_per_s": 100.0}) for stages in (first.stages, one_stage)
    )
    return [there.with_after_answer("stay"), cut, there]


def test_plans_change_under_load_and_every_answer_stays_what_it_was(one_ray: OneRay, tiny: Tiny) -> None:
    settings, first = controlled_service(tiny), two_stages(tiny.thresholds)
    url = one_ray.serve(settings)
    with httpx.Client(base_url=url, timeout=20.0) as http, under_load(tiny) as load:
        before, asked_before = len(load.answers), num_asked(http.get("/plan/history").json())
        for plan in plans(first):
            verdict = one_ray.order("apply", {"app": settings.app, "plan": plan_document(plan)})
            assert verdict["changed"]
            now = http.get("/plan").json()
            assert now["epoch"] == now["followed_epoch"] == verdict["epoch"]
            assert len(load.answers) > before, "answers came during the change"
            before = len(load.answers)
        described, history = once_probes_are_seen(http), http.get("/plan/history").json()
        assert http.post("/predict", json={"inputs": "pay", "timeout_s": 1e-6}).status_code == 504
        # No replica has died, and there is one version.
        wanted = {name for name in documented_series() if not name.startswith(OTHERS_SHOW)}
        page = once_on_page(METRICS_PORT, wanted, METRICS_S, application=settings.app)
    assert set(load.statuses) == {200}
    check_series(page, wanted)
    for index, answer in load.answers:
        tiny.check(index, answer)
    assert [stage["replicas"] for stage in described["plan"]["chains"][0]["stages"]] == [1, 1]
    assert described["observed"]["drops"] == {}
    assert described["observed"]["inputs_seen"] > 0
    assert 0.0 <= described["observed"]["agreement"] <= 1.0
    assert num_asked(history) - asked_before == len(plans(first))


def num_asked(history: list[dict[str, Any]]) -> int:
    """Plans that somebody asked for."""
    return len([row for row in history if row["reason"] == "asked"])


def once_probes_are_seen(http: httpx.Client) -> dict[str, Any]:
    """What the service says of its plan, when the controller has looked at it under load."""
    until_s = time.monotonic() + PROBES_S
    while True:
        described: dict[str, Any] = http.get("/plan").json()
        if described["observed"]["inputs_seen"] or time.monotonic() > until_s:
            return described
        time.sleep(0.2)


def by_tokens(plan: Plan) -> Plan:
    stages = tuple(
        replace(stage, splits=tuple(replace(split, tokens=TOKENS) for split in stage.splits)) for stage in plan.stages
    )
    return replace(plan, stages=stages, predicted={"rate_per_s": 1000.0, "tokens_per_input": 6.0})


@dataclass
class Crowd:
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
            await asyncio.sleep(AGAIN_S)
            first += PER_REQUEST + 1

    async def more(self, count: int) -> None:
        """Wait until so many more were answered."""
        until = self.answered + count
        async with asyncio.timeout(MORE_S):
            while self.answered < until and not self.refused:
                await self.news.wait()
                self.news.clear()


@asynccontextmanager
async def a_crowd(client: httpx.AsyncClient, tiny: Tiny) -> AsyncIterator[Crowd]:
    load = Crowd(tiny)
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
    url = one_ray.serve(settings)
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client, a_crowd(client, tiny) as load:
        await asyncio.to_thread(one_ray.order, "apply", {"app": settings.app, "plan": plan_document(plan)})
        await load.more(200)
        before = await stages_of(client)
        for plan_now in (two_stages(tiny.thresholds), plan):
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
        of_lengths = {name for name in documented_series() if "token" in name or "oldest" in name}
        wanted = {name for name in of_lengths if not name.startswith(GENERATING)}
        page = await asyncio.to_thread(once_on_page, METRICS_PORT, wanted, METRICS_S, settings.app)
    assert load.refused == []
    assert too_long.status_code == 422, too_long.text
    check_series(page, wanted)
    check_fill(before)
    assert [split["tokens"] for stage in described["plan"]["chains"][0]["stages"] for split in stage["splits"]] == [
        TOKENS
    ] * 3
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
