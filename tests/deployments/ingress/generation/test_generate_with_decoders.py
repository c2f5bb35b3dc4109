"""Streams of a real decoder, whose replicas are real but for Ray: connections, hosts, engines, stores."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest

from deployments.api.generation import CutShortError, GenerateRequest, GenerateService, Stream
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Rules
from deployments.ingress.dispatcher import Dispatcher
from deployments.ingress.link import ReplicaLinks
from deployments.replica.host import CallServer, StageHost
from deployments.settings import ServeSettings
from deployments.wire.directory import ReplicaDirectory
from earlyexit.clock import MonotonicClock
from earlyexit.errors import ContextLengthError, DeadlineError, InputError, OverloadedError, StageUnavailableError
from earlyexit.network.boundary import Split
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import EarlyExitModel
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.sequences.sequence import Chosen, Said
from earlyexit.tasks.token import TokenTask
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, PolicySpec, Stage
from profiles.stream import StreamShape
from tests.deployments.wire_fakes import LOOPBACK, soon
from tests.earlyexit.families.decoders import (
    NUM_BLOCKS,
    VOCABULARY,
    Handfuls,
    backbone_of,
    byte_tokenizer,
    decoder,
    hf_decoder,
    sequence,
)

SLOTS = ("split-cpu-0", "split-cpu-1")
NUM_PAGES, MAX_LENGTH, MAX_TOKENS = 64, 128, 12
THRESHOLD = 0.9
POLICY = PolicySpec(name="confidence", thresholds=THRESHOLD)


def a_decoder() -> EarlyExitModel:
    """The same at every call, over a store of its own."""
    return decoder(hf_decoder(), num_pages=NUM_PAGES)


class Replica:
    """A replica that lives in this process."""

    def __init__(self, number: int, slot: str, model: EarlyExitModel) -> None:
        self.name = f"{slot}#{number}"
        self.memory = backbone_of(model).memory
        settings = ServeSettings(model="none", plan=plan().plan)
        runner = TorchRunner(model, ConfidencePolicy(2.0), memory=self.memory)
        self.server = CallServer(asyncio.get_running_loop())
        self.host = StageHost(settings, "cpu", runner, MonotonicClock(), self.server.deliver)

    def die(self) -> None:
        """As a process does that is killed."""
        for connection in tuple(self.server._connections):
            connection.frames.abort()
        assert self.server._server is not None
        self.server._server.close()


def plan(cut: int | None = None, *, epoch: int = 1) -> PlacedPlan:
    """Both ramps on; the model in one stage, or in two. Each has two replicas."""
    whole = (Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=NUM_BLOCKS, batch=4, ramps=(2,)))
    if cut is None:
        parts: list[tuple[Split, ...]] = [whole]
    else:
        before, after = (tuple(ramp for ramp in (1, 2) if (ramp < cut) is first) for first in (True, False))
        parts = [
            (Split(first=0, end=cut, batch=4, ramps=before),),
            (Split(first=cut, end=NUM_BLOCKS, batch=4, ramps=after),),
        ]
    stages = tuple(Stage(device="cpu", replicas=2, splits=splits) for splits in parts)
    return PlacedPlan(plan=Plan(stages=stages, policy=POLICY, epoch=epoch))


class Service:
    """An ingress and its replicas."""

    def __init__(
        self,
        placed: PlacedPlan,
        new_model: Callable[[], EarlyExitModel] = a_decoder,
        start: int | None = None,
        probe_share: float = 0.0,
        **settings: Any,
    ) -> None:
        """`start`: what answers start with, of an encoder-decoder."""
        self.placed = placed
        self.settings = ServeSettings.model_validate(
            {"model": "none", "plan": placed.plan, "prompt_chunk": 8, "max_queued": 100} | settings
        )
        self.probe_share = probe_share
        self.task = TokenTask(VOCABULARY, start=start)
        self.board = ReplicaDirectory()
        self.replicas = {slot: [Replica(number, slot, new_model()) for number in range(2)] for slot in placed.slots}

    @property
    def num_lost(self) -> int:
        """Times that a sequence began anew."""
        return self.service.loop.counts.lost

    async def start(self) -> None:
        links = ReplicaLinks(self.placed, ["cpu"], phase=0.0)
        links.connect("cpu", self.board)
        addresses = {}
        for replica in (replica for replicas in self.replicas.values() for replica in replicas):
            replica.host.start()
            addresses[replica.name] = await replica.server.listen(replica.host, LOOPBACK)
        self.board.announce(addresses)
        shape = StreamShape(score="confidence", num_blocks=NUM_BLOCKS, ramps=(1, 2))
        rules = Rules(
            calls_per_replica=2,
            max_attempts=8,
            max_queued=self.settings.max_queued,
            admits=False,
            shape=shape,
            loss=self.task.loss,
            probe_share=self.probe_share,
        )
        core = IngressCore("i", self.placed, rules, random.Random(0))
        self.dispatcher = Dispatcher(core, links, MonotonicClock())
        self.service = GenerateService(
            byte_tokenizer(),
            self.task,
            MAX_LENGTH,
            self.dispatcher,
            self.settings,
            MonotonicClock(),
            rng=random.Random(0),
        )

    def begin(self, prompt: tuple[int, ...], **asked: Any) -> Stream:
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": MAX_TOKENS} | asked
        return self.service.start(GenerateRequest(**fields))

    async def all_free(self) -> None:
        """Every page of every replica is, or soon: replicas are told, and have threads of their own."""
        held = [each.memory for replicas in self.replicas.values() for each in replicas]
        for _ in range(2000):
            if not any(memory.use().pages for memory in held):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"pages are still held: {[memory.use() for memory in held]}")

    def die(self) -> None:
        """End every connection to a replica, and take no new one."""
        for replica in (replica for replicas in self.replicas.values() for replica in replicas):
            replica.die()

    async def stop(self) -> None:
        self.board.announce({})
        for replica in (replica for replicas in self.replicas.values() for replica in replicas):
            replica.host.stop()
            replica.die()
        await asyncio.sleep(0)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """By prompt, what a model alone says of it: tokens, and the blocks that they leave after."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1, 256) for _ in range(rng.randint(1, 20))) for _ in range(6)]
    run = Handfuls(
        model=decoder(hf_decoder()), policy=ConfidencePolicy(THRESHOLD), bounds=(0, 2, NUM_BLOCKS), ramps=(1, 2)
    )
    said = run.run({k: sequence(prompt, max_tokens=MAX_TOKENS) for k, prompt in enumerate(prompts, 1)})
    return {prompt: [(each.chosen.token, each.exit) for each in said[k]] for k, prompt in enumerate(prompts, 1)}


@asynccontextmanager
async def served(*given: Any, **options: Any) -> AsyncIterator[Service]:
    """A running service, made as `Service` is."""
    service = Service(*given, **options)
    await service.start()
    try:
        yield service
    finally:
        await service.stop()


@pytest.fixture(params=[None, 2, 3], ids=["one stage", "two stages, cut behind a ramp", "two stages, cut elsewhere"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with served(plan(request.param)) as service:
        yield service


async def all_of(stream: Stream) -> list[tuple[int, int]]:
    return [(said.chosen.token, said.exit) async for said in stream]


async def test_streams_say_what_the_model_says_alone_and_leave_nothing_behind(
    service: Service, expected: dict[tuple[int, ...], list[tuple[int, int]]]
) -> None:
    said = await soon(asyncio.gather(*(all_of(service.begin(prompt)) for prompt in expected)))
    assert said == list(expected.values())
    assert len({exit_block for each in said for _, exit_block in each}) == 3
    await service.all_free()
    assert service.num_lost == 0


async def one_dies_in_mid_stream(
    service: Service, expected: dict[tuple[int, ...], list[tuple[int, int]]], stage: int
) -> None:
    """The replica of a stage that has most pages, once every stream has a token: none is missing, none comes twice."""
    streams = [service.begin(prompt) for prompt in expected]
    begun = [(await soon(anext(stream))).chosen.token for stream in streams]
    replicas = service.replicas[service.placed.slots[stage]]
    max(replicas, key=lambda replica: replica.memory.use().pages).die()
    rest = await soon(asyncio.gather(*map(all_of, streams)))
    tokens = [[first, *(token for token, _ in more)] for first, more in zip(begun, rest, strict=True)]
    assert tokens == [[token for token, _ in each] for each in expected.values()]
    assert service.num_lost > 0
    await service.all_free()


@pytest.mark.parametrize("stage", [0, -1])
async def test_a_replica_that_dies_in_mid_stream_costs_no_token_and_repeats_none(
    service: Service, expected: dict[tuple[int, ...], list[tuple[int, int]]], stage: int
) -> None:
    await one_dies_in_mid_stream(service, expected, stage)


async def test_a_new_sequence_that_finds_a_replica_full_is_taken_by_another_that_has_room(
    expected: dict[tuple[int, ...], list[tuple[int, int]]],
) -> None:
    sizes = iter((8, NUM_PAGES))
    async with served(plan(), lambda: decoder(hf_decoder(), num_pages=next(sizes))) as service:
        said = await soon(asyncio.gather(*(all_of(service.begin(prompt)) for prompt in expected)))
        assert (said, service.num_lost) == (list(expected.values()), 0)


async def test_readers_who_leave_give_their_pages_back_in_mid_batch_too(
    service: Service, expected: dict[tuple[int, ...], list[tuple[int, int]]]
) -> None:
    streams = [service.begin(prompt) for prompt in expected]
    for stream in streams[:3]:
        await soon(anext(stream))
        stream.abort()
    said = await soon(asyncio.gather(*map(all_of, streams[3:])))
    assert said == list(expected.values())[3:]
    await service.all_free()


# Streams that end before their last token

LIMITS = {
    "between tokens": ({"token_timeout_s": 0.2}, {}, "0.2 s for the next token"),
    "on the whole": ({}, {"timeout_s": 0.3}, "0.3 s for the whole answer"),
}


@pytest.mark.parametrize(("settings", "asked", "limit"), LIMITS.values(), ids=LIMITS)
async def test_a_stream_that_reaches_a_limit_is_cut_there_and_says_which(
    settings: dict[str, float], asked: dict[str, float], limit: str
) -> None:
    async with served(plan(), **settings) as service:
        stream = service.begin((1, 2, 3), **asked)
        await soon(anext(stream))
        service.die()
        with pytest.raises(
            CutShortError, match=rf"after \d+ tokens? and 0\.\d s: the next one exceeds the limit of {limit}"
        ):
            await soon(all_of(stream))
        assert service.service.loop.counts.ended == {"cut_short": 1}
        assert service.dispatcher.core.num_unanswered == 0


async def test_without_a_first_token_within_its_limit_the_request_is_refused() -> None:
    async with served(plan(), default_timeout_s=0.2) as service:
        service.die()
        with pytest.raises(
            DeadlineError, match=r"no token came within 0\.2 s: the first one exceeds the limit of 0\.2 s"
        ):
            await soon(anext(service.begin((1,))))


async def test_what_cannot_be_started_is_refused_before_anything_runs() -> None:
    async with served(plan(), max_queued=1) as service:
        for prompt, asked, error in (
            ((), {}, InputError),
            ((1,) * MAX_LENGTH, {}, ContextLengthError),
            ((1,), {"max_tokens": 0}, InputError),
            ((1,), {"timeout_s": 0.0}, InputError),
            ((1,), {"timeout_s": 1e6}, InputError),
        ):
            with pytest.raises(error):
                service.begin(prompt, **asked)
        assert service.service.loop.counts.begun == 0
        service.begin((1,))
        with pytest.raises(OverloadedError):
            service.begin((2,))
        service.dispatcher.suspend("nothing is left")
        with pytest.raises(StageUnavailableError):
            service.begin((3,))
        assert service.service.loop.counts.ended == {"overloaded": 1, "stage_unavailable": 1}


async def test_a_stream_that_is_closed_before_its_end_aborts_once_and_drops_what_was_not_read() -> None:
    aborted: list[str] = []
    stream = Stream(1)
    stream.when_aborted = lambda: aborted.append("told")
    said = Said(chosen=Chosen(1, -0.5), text="a", ended=None, exit=1)
    for _ in range(2):
        stream.put(said)
    async with aclosing(stream) as reading:
        assert await anext(reading) is said
    stream.abort()
    stream.put(said)
    assert (aborted, [each async for each in stream]) == (["told"], [])
