"""Streams of a real decoder, and of an encoder-decoder, through real replicas: connections, hosts, engines, stores."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakSet

import pytest
from starlette.requests import ClientDisconnect

from deployments.api.generation import CutShortError, GenerateRequest, GenerateService, Stream
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions
from deployments.ingress.dispatcher import Dispatcher
from deployments.settings import ServeSettings
from earlyexit.clock import MonotonicClock
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, DeadlineError, InputError, OverloadedError, StageUnavailableError
from earlyexit.network.boundary import Split
from earlyexit.network.model import EarlyExitModel, TorchRunner
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.token import TokenTask
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from profiles.stream import StreamShape
from tests.deployments.service_here import Replica, Running, connected
from tests.deployments.wire_fakes import FixedLinks, soon, until
from tests.earlyexit.codecs.prompts import byte_tokenizer
from tests.earlyexit.families.decoders import (
    NUM_BLOCKS,
    PAGE_TOKENS,
    VOCABULARY,
    Handfuls,
    backbone_of,
    decoder,
    hf_decoder,
    sequence,
)
from tests.earlyexit.families.encoder_decoders import PAD, hf_seq2seq, seq2seq

NUM_PAGES, MAX_LENGTH, MAX_TOKENS = 64, 128, 12
CODEC = PromptCodec(MAX_LENGTH)
CODEC.tokenizer = byte_tokenizer()
THRESHOLD = 0.9
POLICY = PolicySpec(name="confidence", thresholds=THRESHOLD)
KIND = "t5 gated"
"""The kind of encoder-decoder."""
Expected = dict[tuple[int, ...], list[tuple[int, int]]]


def plan(cut: int | None = None, *, epoch: int = 1, replicas: int = 2) -> PlacedPlan:
    """Returns a plan with both ramps active, in one stage or two."""
    whole = (Split(first=0, end=2, batch=4, ramps=(1,)), Split(first=2, end=NUM_BLOCKS, batch=4, ramps=(2,)))
    if cut is None:
        parts: list[tuple[Split, ...]] = [whole]
    else:
        before, after = (tuple(ramp for ramp in (1, 2) if (ramp < cut) is first) for first in (True, False))
        parts = [
            (Split(first=0, end=cut, batch=4, ramps=before),),
            (Split(first=cut, end=NUM_BLOCKS, batch=4, ramps=after),),
        ]
    stages = tuple(Stage(device="cpu", replicas=replicas, splits=splits) for splits in parts)
    return PlacedPlan(plan=Plan(stages=stages, policy=POLICY, epoch=epoch))


class Service:
    """An ingress and its replicas."""

    def __init__(self, placed: PlacedPlan, new_model: Callable[[], EarlyExitModel]) -> None:
        self.placed = placed
        self.replicas = {
            slot: [self._replica(f"{slot}#{k}", new_model()) for k in range(stage.replicas)]
            for slot, stage in placed.stage_of.items()
        }

    @property
    def all_replicas(self) -> list[Replica]:
        return [replica for replicas in self.replicas.values() for replica in replicas]

    @property
    def num_lost(self) -> int:
        """The number of restarts of sequences."""
        return self.service.loop.counts.lost

    def begin_service(self, running: Running, task: TokenTask, settings: ServeSettings) -> None:
        self.dispatcher = running.dispatcher
        clock, rng = MonotonicClock(), random.Random(0)
        self.service = GenerateService(CODEC, task, running.dispatcher, settings, clock, rng=rng)

    def begin(self, prompt: tuple[int, ...], **asked: Any) -> Stream:
        fields: dict[str, Any] = {"prompt": prompt, "max_tokens": MAX_TOKENS} | asked
        return self.service.start(GenerateRequest(**fields))

    async def all_free(self) -> None:
        """Waits until every page of every replica is free; replicas free them in their own threads."""
        for _ in range(2000):
            if not any(replica.pages for replica in self.all_replicas):
                return
            await asyncio.sleep(0.005)
        raise AssertionError(f"pages are still held: {[replica.pages for replica in self.all_replicas]}")

    def die(self) -> None:
        """Ends all replicas like killed processes."""
        for replica in self.all_replicas:
            replica.die()

    def one_dies(self, stage: int) -> None:
        """Ends the replica of a stage that has most pages."""
        replicas = self.replicas[list(self.placed.stage_of)[stage]]
        max(replicas, key=lambda replica: replica.pages).die()

    def _replica(self, name: str, model: EarlyExitModel) -> Replica:
        settings = ServeSettings(model="none", plan=self.placed.plan)
        runner = TorchRunner(model, ConfidencePolicy(2.0), memory=backbone_of(model).memory)
        return Replica(name, settings, "cpu", runner)


@pytest.fixture(scope="module")
def expected() -> Expected:
    return alone(decoder(hf_decoder()))


def alone(model: EarlyExitModel, start: int | None = None) -> Expected:
    """Returns, by prompt, the tokens of the model alone and the blocks after which they left."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(1, 256) for _ in range(rng.randint(1, 20))) for _ in range(6)]
    run = Handfuls(model=model, policy=ConfidencePolicy(THRESHOLD), bounds=(0, 2, NUM_BLOCKS), ramps=(1, 2))
    said = run.run({k: sequence(prompt, max_tokens=MAX_TOKENS, start=start) for k, prompt in enumerate(prompts, 1)})
    return {prompt: [(each.token, each.exit) for each in said[k]] for k, prompt in enumerate(prompts, 1)}


@asynccontextmanager
async def served(
    placed: PlacedPlan,
    new_model: Callable[[], EarlyExitModel] = lambda: decoder(hf_decoder(), num_pages=NUM_PAGES),
    start: int | None = None,
    probe_share: float = 0.0,
    **changes: Any,
) -> AsyncIterator[Service]:
    """Runs a service. `start`: the start token of an encoder-decoder; `changes`: of its settings."""
    fields = {"model": "none", "plan": placed.plan, "prompt_chunk": 8, "max_queued": 100} | changes
    settings, task = ServeSettings.model_validate(fields), TokenTask(VOCABULARY, start=start)
    service = Service(placed, new_model)
    rules = IngressOptions(
        max_queued=settings.max_queued,
        admits=False,
        shape=StreamShape(score="confidence", num_blocks=NUM_BLOCKS, ramps=(1, 2)),
        loss=task.loss,
        probe_share=probe_share,
    )
    async with connected(placed, service.all_replicas, rules) as running:
        service.begin_service(running, task, settings)
        yield service


@pytest.fixture(params=[None, 2, 3], ids=["one stage", "two stages, cut behind a ramp", "two stages, cut elsewhere"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with served(plan(request.param)) as service:
        yield service


async def all_of(stream: Stream) -> list[tuple[int, int]]:
    return [(said.token, said.exit) async for said in stream]


async def test_concurrent_streams_generate_the_same_text_as_the_model_alone(
    service: Service, expected: dict[tuple[int, ...], list[tuple[int, int]]]
) -> None:
    said = await soon(asyncio.gather(*(all_of(service.begin(prompt)) for prompt in expected)))
    assert said == list(expected.values())
    assert len({exit_block for each in said for _, exit_block in each}) == 3
    await service.all_free()
    assert service.num_lost == 0


async def test_sequences_are_admitted_by_the_newest_plan() -> None:
    old, new = (
        replace(placed, plan=replace(placed.plan, predicted={"rate_per_s": rate_per_s}))
        for placed, rate_per_s in ((plan(epoch=1), 2.0), (plan(epoch=2), 1000.0))
    )
    core = IngressCore("i", old, IngressOptions(tpot_slo_s=1.0), random.Random(0))
    settings, clock = ServeSettings(model="none", plan=old.plan), MonotonicClock()
    dispatcher = Dispatcher(core, FixedLinks({}), clock)
    service = GenerateService(CODEC, TokenTask(VOCABULARY), dispatcher, settings, clock)
    for placed in (new, old):
        dispatcher.follow(placed)
        service.loop.follow(core.placed.plan)
    for _ in range(5):
        service.start(GenerateRequest(prompt=(1,), max_tokens=1))
    assert service.loop.num_running == 5


async def one_dies_in_mid_stream(service: Service, expected: Expected, stage: int) -> None:
    """Ends a replica of the stage once every stream has a token, and checks that each token comes exactly once."""
    streams = [service.begin(prompt) for prompt in expected]
    begun = [(await soon(anext(stream))).token for stream in streams]
    service.one_dies(stage)
    rest = await soon(asyncio.gather(*map(all_of, streams)))
    tokens = [[first, *(token for token, _ in more)] for first, more in zip(begun, rest, strict=True)]
    assert tokens == [[token for token, _ in each] for each in expected.values()]
    assert service.num_lost > 0
    await service.all_free()


@pytest.mark.parametrize("stage", [0, -1])
async def test_a_stream_whose_replica_dies_has_every_token_once(
    service: Service, expected: Expected, stage: int
) -> None:
    await one_dies_in_mid_stream(service, expected, stage)


def an_encoder_decoder() -> EarlyExitModel:
    return seq2seq(hf_seq2seq(KIND), num_pages=NUM_PAGES)


@pytest.fixture(scope="module")
def of_sources() -> Expected:
    return alone(an_encoder_decoder(), PAD[KIND])


@pytest.mark.parametrize("cut", [None, 2, 3])
async def test_streams_of_an_encoder_decoder_survive_the_loss_of_a_replica(
    of_sources: Expected, cut: int | None
) -> None:
    """Sources are sent as a whole, and again if a replica dies."""
    async with served(plan(cut), an_encoder_decoder, PAD[KIND]) as service:
        said = await soon(asyncio.gather(*(all_of(service.begin(source)) for source in of_sources)))
        assert said == list(of_sources.values())
        assert len({exit_block for each in said for _, exit_block in each}) > 1
        await service.all_free()
        await one_dies_in_mid_stream(service, of_sources, -1)


async def test_a_sequence_tries_another_replica_if_the_first_is_full(expected: Expected) -> None:
    sizes = iter((8, NUM_PAGES, NUM_PAGES))
    async with served(plan(replicas=3), lambda: decoder(hf_decoder(), num_pages=next(sizes))) as service:
        said = await soon(asyncio.gather(*(all_of(service.begin(prompt)) for prompt in expected)))
        assert (said, service.num_lost) == (list(expected.values()), 0)
        await service.all_free()
        stream = service.begin(next(iter(expected)))
        begun = await soon(anext(stream))
        service.one_dies(0)
        full: Any = next(replica for replica in service.all_replicas if not replica.pages)
        full.runner.memory.kv.enter(999, NUM_PAGES * PAGE_TOKENS)
        assert [(begun.token, begun.exit), *await soon(all_of(stream))] == said[0]
        assert service.num_lost == 1


@pytest.mark.parametrize(("sizes", "waits", "num"), [((64, 64, 8, 8), False, 3), ((8, 8, 64, 64), True, 6)])
async def test_streams_wait_for_room_if_they_have_early_tokens_or_are_later_answers(
    expected: Expected, sizes: tuple[int, ...], waits: bool, num: int
) -> None:
    of_replica = iter(sizes)
    async with served(plan(3), lambda: decoder(hf_decoder(), num_pages=next(of_replica))) as service:
        streams = [all_of(service.begin(prompt, waits=waits)) for prompt in expected]
        said = await soon(asyncio.gather(*streams, return_exceptions=True))
        assert said[:num] == list(expected.values())[:num]  # some of the others are refused
        assert service.num_lost == 0


async def test_freed_pages_go_to_the_sequence_that_waits_longest() -> None:
    async with served(plan(replicas=1), lambda: decoder(hf_decoder(), num_pages=6)) as service:
        kv: Any = service.all_replicas[0].runner.memory.kv  # type: ignore[union-attr]
        kv.enter(999, 6 * PAGE_TOKENS)
        ended, oldest, later = (service.begin((1, 2, 3), max_tokens=20, waits=True) for _ in range(3))
        waiting = service.service._waiting
        await until(lambda: len(waiting) == 3 and min(each.state.attempts for each in waiting) > 3)  # pauses are long
        kv.free(999)
        ended.abort()
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await soon(anext(service.begin((1, 2, 3), max_tokens=20)))
        assert not later._queue.qsize()
        assert len(await soon(all_of(oldest))) == 20
        assert len(await soon(all_of(later))) == 20


async def test_ended_sequences_leave_no_pages_and_no_garbage(service: Service, expected: Expected) -> None:
    gc.disable()  # streams in reference cycles would stay
    streams = [service.begin(prompt) for prompt in expected]
    alive = WeakSet(streams)
    for stream in streams[:3]:
        await soon(anext(stream))
        stream.abort()
        stream.abort()
    with pytest.raises(ClientDisconnect):
        await anext(stream)
    assert await soon(asyncio.gather(*map(all_of, streams[3:]))) == list(expected.values())[3:]
    await service.all_free()
    del stream, streams
    await until(lambda: not service.dispatcher._sent)
    service.dispatcher.wake()  # forgets the timers
    gc.enable()
    assert not alive


# Streams that end before their last token

LIMITS = {
    "between tokens": ({"token_timeout_s": 0.2}, {}, "0.2 s for the next token"),
    "on the whole": ({}, {"timeout_s": 0.3}, "0.3 s for the whole answer"),
}


@pytest.mark.parametrize(("settings", "asked", "limit"), LIMITS.values(), ids=LIMITS)
async def test_a_stream_that_reaches_a_time_limit_names_it(
    settings: dict[str, Any], asked: dict[str, float], limit: str
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
        with pytest.raises(DeadlineError, match=r"no token came within the limit of 0\.2 s for the first token"):
            await soon(anext(service.begin((1,))))


async def test_invalid_sequences_are_refused_before_anything_runs() -> None:
    async with served(plan(), max_queued=1) as service:
        for prompt, asked, error in (
            ((), {}, InputError),
            ((1,) * MAX_LENGTH, {}, ContextLengthError),
            ((1,), {"max_tokens": 0}, InputError),
            ((1,), {"timeout_s": 0.0}, InputError),
            ((1,), {"timeout_s": 1e6}, InputError),
            ((1,), {"num_answers": 2}, InputError),
        ):
            with pytest.raises(error):
                service.begin(prompt, **asked)
        assert service.service.loop.num_running == 0
        service.begin((1,))
        with pytest.raises(OverloadedError):
            service.begin((2,))
        service.dispatcher.suspend("nothing is left")
        with pytest.raises(StageUnavailableError):
            service.begin((3,))
        assert service.service.loop.counts.ended == {"input": 1, "overloaded": 1, "stage_unavailable": 1}
