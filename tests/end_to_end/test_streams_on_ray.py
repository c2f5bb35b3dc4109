"""Tests of streams of a small decoder on a real Ray: token by token, through every front, and through kill -9.

One of the streams is a probe, which the controller observes.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from tokenizers import Tokenizer, decoders, models

from deployments.local_ray.ports import hold_listener
from deployments.settings import ControlSettings, ServeSettings
from earlyexit.network.boundary import Split
from earlyexit.network.store import save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.token import first_token
from earlyexit.training.tokens import Generated, GenerationOptions, generate
from optimizer.plans.plan import Plan, PolicySpec, Stage
from tests.earlyexit.families.decoders import NUM_BLOCKS, VOCABULARY, decoder, hf_decoder
from tests.end_to_end import by_permits
from tests.end_to_end.one_ray import HERE, URL, OneRay
from tests.end_to_end.tiny_service import NEVER_S, tiny_problem
from tests.free_port import free_port

pytestmark = pytest.mark.ray

HOST = "127.0.0.1"
MAX_LENGTH, MAX_TOKENS, NUM_PROMPTS = 256, 60, 4
FIRST_SYMBOL = 0x4E00
"""Every token is a character, so that a text shows its tokens."""
RAMPS = (by_permits.RAMP, 2)
OWN_POLICY = PolicySpec(name="own", own="by_permits:policy")
INGRESS_PORTS = range(30_000, 32_000)
"""Serve's ports of ingresses."""
PATIENCE_S = 60.0
LOOK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Tales:
    """A decoder in its folder, prompts, and its answer to each alone."""

    folder: Path
    prompts: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    exits: tuple[list[int], ...]
    probed: Generated
    """The full model's answer to the first prompt, with every ramp evaluated."""


@pytest.fixture(scope="module")
def tales(tmp_path_factory: pytest.TempPathFactory) -> Tales:
    folder, rng = tmp_path_factory.mktemp("tales"), random.Random(0)
    model = decoder(hf_decoder(max_position_embeddings=MAX_LENGTH))
    model.info = replace(model.info, codec={"name": "prompt", "max_length": MAX_LENGTH})
    save_model(model, folder)
    symbols = Tokenizer(models.WordLevel({chr(FIRST_SYMBOL + k): k for k in range(VOCABULARY)}))
    symbols.decoder = decoders.Fuse()
    symbols.save(str(folder / "tokenizer.json"))
    prompts = tuple(tuple(rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 20))) for _ in range(NUM_PROMPTS))
    policy = ConfidencePolicy(by_permits.THRESHOLD)
    alone = generate(model, prompts, GenerationOptions(max_tokens=MAX_TOKENS, policy=policy, ramps=RAMPS))
    assert {exit_block for each in alone for exit_block in each.exits} == {*RAMPS, NUM_BLOCKS - 1}
    looking = GenerationOptions(max_tokens=MAX_TOKENS, policy=ConfidencePolicy(by_permits.THRESHOLD), observe=True)
    [probed] = generate(model, prompts[:1], looking)
    return Tales(
        folder=folder,
        prompts=prompts,
        texts=tuple(map(text_of, alone)),
        exits=tuple(each.exits for each in alone),
        probed=probed,
    )


def text_of(generated: Generated) -> str:
    return "".join(chr(FIRST_SYMBOL + token) for token in generated.answer)


class Permits:
    """The number of batches that may still be decided; unlimited by default."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def give(self, number: int) -> None:
        self._path.write_bytes(bytes(number))

    def are_used(self) -> bool:
        return self._path.stat().st_size == 0

    def lift(self) -> None:
        self._path.unlink(missing_ok=True)


@pytest.fixture
def permits(one_ray: OneRay) -> Iterator[Permits]:
    permits = Permits(one_ray.permits)
    yield permits
    permits.lift()


def settings(tales: Tales, *stages: Stage, policy: PolicySpec = OWN_POLICY, **changes: Any) -> ServeSettings:
    plan = Plan(stages=stages, policy=policy)
    return ServeSettings(model=str(tales.folder), plan=plan, default_timeout_s=PATIENCE_S, kv_tokens=2048, **changes)


@dataclass(kw_only=True)
class Reader:
    """Requests a stream, and keeps its chunks."""

    url: str
    tales: Tales
    index: int
    text: str = ""
    exits: list[int] = field(default_factory=list)

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[Any]:
        import openai  # takes a second, in every process that collects tests

        async with openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="any", max_retries=0) as client:
            yield await client.completions.create(
                model="tiny",
                prompt=list(self.tales.prompts[self.index]),
                max_tokens=MAX_TOKENS,
                temperature=0,
                stream=True,
                extra_body={"exits": True},
            )

    async def read(self) -> None:
        async with self.asking() as chunks:
            await self.take_all(chunks)

    async def take_all(self, chunks: Any) -> None:
        async for chunk in chunks:
            self.take(chunk)

    def take(self, chunk: Any) -> None:
        self.text += chunk.choices[0].text
        self.exits += (chunk.model_extra or {}).get("offramp", {}).get("token_exits", [])

    def check(self) -> None:
        """Checks that no token is missing or repeated."""
        assert self.text == self.tales.texts[self.index]
        assert len(self.exits) == MAX_TOKENS


async def first_chunk_comes_alone(url: str, tales: Tales, permits: Permits) -> None:
    """Holds the second token back in the replica until the first arrives; then the reader disconnects."""
    reader = Reader(url=url, tales=tales, index=0)
    permits.give(1)
    async with reader.asking() as chunks:
        reader.take(await asyncio.wait_for(anext(chunks), PATIENCE_S))
        assert (reader.text, reader.exits) == (tales.texts[0][0], tales.exits[0][:1])
        assert permits.are_used()
        await chunks.close()
    permits.lift()


async def all_read(url: str, tales: Tales, permits: Permits, disturb: Callable[[], Any]) -> None:
    """Reads every stream to its end, and disturbs the service after a few tokens."""
    readers = [Reader(url=url, tales=tales, index=index) for index in range(NUM_PROMPTS)]
    permits.give(NUM_PROMPTS)
    reading = asyncio.gather(*(reader.read() for reader in readers))
    try:
        await once(lambda: permits.are_used() and any(reader.text for reader in readers))
        await disturb()
        permits.lift()
        await asyncio.wait_for(reading, PATIENCE_S)
    finally:
        reading.cancel()
    for reader in readers:
        reader.check()


async def kill_one(http: httpx.AsyncClient, stage: int) -> None:
    """Kills the replica of a stage with most sequences, by kill -9."""
    replicas = (await stages_of(http))[stage]
    killed = max(replicas, key=lambda replica: int(replica["memory"]["sequences"]))
    assert killed["memory"]["pages"] > 0
    os.kill(killed["pid"], signal.SIGKILL)


async def no_page_is_held(http: httpx.AsyncClient, *num_replicas: int) -> None:
    """Waits until no replica of a stage holds a page."""

    async def is_free() -> bool:
        stages = await stages_of(http)
        held = sum(replica["memory"]["pages"] for replicas in stages for replica in replicas)
        return held == 0 and tuple(map(len, stages)) == num_replicas

    until_s = time.monotonic() + PATIENCE_S
    while not await is_free():
        assert time.monotonic() < until_s, await stages_of(http)
        await asyncio.sleep(LOOK_S)


async def stages_of(http: httpx.AsyncClient) -> list[list[dict[str, Any]]]:
    stages: list[list[dict[str, Any]]] = (await http.get("/stats")).json()["stages"]
    return stages


async def once(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s
        await asyncio.sleep(LOOK_S)


@pytest.fixture(scope="module")
def one_stage(one_ray: OneRay, tales: Tales) -> Iterator[tuple[str, str]]:
    """Yields the URL of the ingress itself, without a proxy, and the URL of Serve's proxy."""
    splits = (Split(first=0, end=2, batch=4, ramps=RAMPS[:1]), Split(first=2, end=NUM_BLOCKS, batch=4, ramps=RAMPS[1:]))
    port = free_port()
    with hold_listener(HOST, port) as listener:
        stage = Stage(device="cpu", replicas=2, splits=splits)
        proxy = one_ray.serve(settings(tales, stage, app="tales", listener=listener))
        yield f"http://{HOST}:{port}", proxy


async def test_one_stage_streams_token_by_token(tales: Tales, permits: Permits, one_stage: tuple[str, str]) -> None:
    async with httpx.AsyncClient(base_url=one_stage[0], timeout=PATIENCE_S) as http:
        await no_page_is_held(http, 2)  # and no replica warms up, which would need permits too
        for url in one_stage:
            await first_chunk_comes_alone(url, tales, permits)
            await no_page_is_held(http, 2)


async def test_one_stage_loses_no_token_by_a_kill(tales: Tales, permits: Permits, one_stage: tuple[str, str]) -> None:
    url, _ = one_stage
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        await no_page_is_held(http, 2)
        await all_read(url, tales, permits, lambda: kill_one(http, 0))
        await no_page_is_held(http, 2)


@pytest.fixture
def two_stages(one_ray: OneRay, tales: Tales) -> None:
    """Serves two stages, with two ingresses."""
    stages = (
        Stage(device="cpu", replicas=1, splits=(Split(first=0, end=2, batch=4, ramps=RAMPS[:1]),)),
        Stage(device="cpu", replicas=1, splits=(Split(first=2, end=NUM_BLOCKS, batch=4, ramps=RAMPS[1:]),)),
    )
    one_ray.serve(settings(tales, *stages, app="tales", ingress_replicas=2))


@pytest.mark.usefixtures("two_stages")
async def test_two_stages_stream_through_haproxy_and_lose_no_token_by_a_kill(tales: Tales, permits: Permits) -> None:
    with behind_haproxy((await ingresses_of()).values()) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            await no_page_is_held(http, 1, 1)
            await first_chunk_comes_alone(url, tales, permits)
            await no_page_is_held(http, 1, 1)
            await all_read(url, tales, permits, lambda: kill_one(http, 1))
            await no_page_is_held(http, 1, 1)


@pytest.mark.usefixtures("two_stages")
async def test_a_killed_ingress_ends_its_own_stream_and_leaves_no_page_held(tales: Tales, permits: Permits) -> None:
    ingresses = await ingresses_of()
    with behind_haproxy(ingresses.values()) as url:
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
            await no_page_is_held(http, 1, 1)
            await an_ingress_is_killed(url, tales, permits, ingresses)
            await no_page_is_held(http, 1, 1)


async def an_ingress_is_killed(url: str, tales: Tales, permits: Permits, ingresses: dict[int, int]) -> None:
    """Kills an ingress during a stream, whose pages only the replica can free."""
    import openai

    reader = Reader(url=url, tales=tales, index=0)
    permits.give(2)
    async with reader.asking() as chunks:
        reader.take(await asyncio.wait_for(anext(chunks), PATIENCE_S))
        async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
            for pid, port in ingresses.items():
                stats = (await http.get(f"http://{HOST}:{port}/stats")).json()
                if stats["unanswered"]:
                    assert stats["stages"][0][0]["memory"]["pages"] > 0
                    os.kill(pid, signal.SIGKILL)
        with pytest.raises((openai.APIError, httpx.HTTPError)):
            await reader.take_all(chunks)
    permits.lift()
    assert tales.texts[0].startswith(reader.text)


async def ingresses_of() -> dict[int, int]:
    """Returns each ingress's port by process."""
    found: dict[int, int] = {}
    async with httpx.AsyncClient(base_url=URL, timeout=PATIENCE_S) as http:
        until_s = time.monotonic() + PATIENCE_S
        while len(found) < 2:
            assert time.monotonic() < until_s
            pid = (await http.get("/stats")).json()["ingress_pid"]
            listening = [each for each in psutil.Process(pid).net_connections("tcp") if each.status == "LISTEN"]
            [found[pid]] = [each.laddr.port for each in listening if each.laddr.port in INGRESS_PORTS]
    return found


@contextmanager
def behind_haproxy(ports: Iterable[int]) -> Iterator[str]:
    """Runs HAProxy as Serve configures it; yields its URL."""
    command = [sys.executable, str(HERE / "haproxy_before.py"), *map(str, ports)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1])}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as haproxy:
        try:
            assert haproxy.stdout is not None
            yield f"http://{HOST}:{int(haproxy.stdout.readline())}"
        finally:
            haproxy.communicate()


async def test_the_controller_observes_the_ramps_of_a_probe_sequence(one_ray: OneRay, tales: Tales) -> None:
    """The caller gets the full model's text."""
    policy = PolicySpec(name="confidence", thresholds=dict.fromkeys(RAMPS, by_permits.THRESHOLD))
    one_stage = Stage(device="cpu", replicas=1, splits=(Split(first=0, end=NUM_BLOCKS, batch=4, ramps=RAMPS),))
    control = ControlSettings(
        problem=tiny_problem(RAMPS, [1.0] * NUM_BLOCKS),
        policy=policy,
        state=str(tales.folder / "state.sqlite"),
        period_s=NEVER_S,
        watch_s=0.5,
    )
    served = {"app": "probed", "control": control, "probe_share": 1.0}
    url = one_ray.serve(settings(tales, one_stage, policy=policy, **served))
    reader = Reader(url=url, tales=tales, index=0)
    await asyncio.wait_for(reader.read(), PATIENCE_S)
    assert (reader.text, reader.exits) == (text_of(tales.probed), [NUM_BLOCKS - 1] * MAX_TOKENS)
    assert reader.text != tales.texts[0]
    async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as http:
        until_s = time.monotonic() + PATIENCE_S
        while (observed := (await http.get("/plan")).json()["observed"])["inputs_seen"] < MAX_TOKENS:
            assert time.monotonic() < until_s, observed
            await asyncio.sleep(LOOK_S)
    assert observed["inputs_seen"] == MAX_TOKENS
    assert observed["agreement"] == pytest.approx(agreement_of(tales.probed))


def agreement_of(probed: Generated) -> float:
    """Returns the share of tokens for which the plan's ramps would give the full model's token or no exit."""
    agreeing = 0
    for look in probed.observed:
        leaves = [ramp for ramp in RAMPS if look[ramp].score >= by_permits.THRESHOLD]
        at = leaves[0] if leaves else NUM_BLOCKS - 1
        agreeing += first_token(look[at].value) == first_token(look[NUM_BLOCKS - 1].value)
    return agreeing / len(probed.observed)
