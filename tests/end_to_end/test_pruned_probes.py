"""A cascade that prunes words, on hosts in this process: probes go both ways, and callers are none the wiser."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deployments.api.parsing import InferRequest
from deployments.api.service import InferService
from deployments.ingress.build import encode_of
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Rules
from deployments.ingress.dispatcher import Dispatcher
from deployments.ingress.link import LinkTransport
from deployments.replica.build import build_runner, starting_policy
from deployments.replica.host import OpenCall, StageHost, chunks_by_call
from deployments.wire.messages import Chunk, StageCall
from earlyexit.clock import MonotonicClock
from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.engine.device import Release
from earlyexit.network.boundary import Answer
from earlyexit.network.chain_network import ChainNetwork, load_network
from earlyexit.network.store import read_card
from earlyexit.training.ramps import exit_outputs, importance_of
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan
from profiles.stream import Observations, StreamShape, empty
from tests.deployments.wire_fakes import FixedLinks
from tests.end_to_end.tiny_cascade import NETWORKS, RAMPS, TIMEOUT_S, TinyCascade, make_cascade

END = NETWORKS[0] - 1
ALPHA = 1.0
"""Words go that got less than the mean attention: of the tiny model, half of them."""


SHAPE = StreamShape(score="entropy", num_blocks=NETWORKS[-1], ramps=RAMPS)


class Hosted(LinkTransport):
    """A stage in this process, as a transport."""

    def __init__(self, cascade: TinyCascade, plan: Plan) -> None:
        super().__init__(phase=0.0)
        settings = cascade.settings().model_copy(update={"plan": plan})
        runner = build_runner(settings, "cpu", starting_policy(settings), clock=MonotonicClock())
        starts = read_card(cascade.folder).chain.starts
        self.host = StageHost(settings, "cpu", runner, MonotonicClock(), self._deliver, starts=starts)

    async def call(self, call: StageCall, *, take: Callable[[Chunk], None], **_: Any) -> None:
        loop, parts = asyncio.get_running_loop(), asyncio.Queue[Chunk]()

        def tell(part: Chunk) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, part)

        self.host.submit(call, OpenCall(len(call.piece.sample_ids), tell))
        left = len(call.piece.sample_ids)
        while left:
            part = await parts.get()
            take(part)
            left -= part.num_inputs

    def fail_waiting(self) -> None:
        """No call waits here for a replica."""

    def end(self, replica: str, sequence: int) -> None:
        raise AssertionError("nothing is generated")

    @staticmethod
    def _deliver(releases: list[Release[Any]]) -> None:
        for opened, chunk in chunks_by_call(releases):
            opened.take(chunk)


@contextmanager
def served(cascade: TinyCascade, plan: Plan, probe_share: float) -> Iterator[tuple[InferService, IngressCore]]:
    """Every stage on its own host."""
    placed, clock = PlacedPlan(plan=plan), MonotonicClock()
    hosts = {slot: Hosted(cascade, plan) for slot in placed.slots}
    for hosted in hosts.values():
        hosted.host.start()
    codec: Any = find_codec(read_card(cascade.folder).codec, cascade.folder)
    rules = Rules(max_queued=500, calls_per_replica=2, max_attempts=3, shape=SHAPE, probe_share=probe_share)
    core = IngressCore("i", placed, rules, random.Random(0))
    dispatcher = Dispatcher(core, FixedLinks(hosts), clock, codec=codec)
    try:
        yield InferService(codec, dispatcher, cascade.settings(), clock, encode=encode_of(codec, core)), core
    finally:
        for hosted in hosts.values():
            hosted.host.stop()


def ends_of(cascade: TinyCascade) -> tuple[list[int], list[int]]:
    """What the large model alone says of every text, without the words that go, and of the whole of it."""
    network = load_network(cascade.folder)
    codec = find_codec(read_card(cascade.folder).codec, cascade.folder)
    assert isinstance(network, ChainNetwork)
    assert isinstance(codec, ChainCodec)
    attention = importance_of(network.members[0], codec.of(0).encode(cascade.texts))
    pruned = [
        codec.pruned_for(1, 0, text, own_N.astype(np.float16).astype(np.float64), ALPHA).encoded
        for text, own_N in zip(cascade.texts, attention, strict=True)
    ]
    whole = codec.of(1).encode(cascade.texts)
    last = NETWORKS[1] - NETWORKS[0] - 1
    of_pruned, of_whole = (exit_outputs(network.members[1], each)[last].argmax(1).tolist() for each in (pruned, whole))
    return of_pruned, of_whole


async def all_seen(core: IngressCore, number: int) -> Observations:
    """Whole texts are still on their way when every caller has an answer."""
    parts = [empty(SHAPE)]
    async with asyncio.timeout(30):
        while sum(map(len, parts)) < number:
            await asyncio.sleep(0.001)
            seen = core.report(0.0, 0.0).probes
            parts += [] if seen is None else [seen]
    return Observations.join(SHAPE, parts)


async def asked(service: InferService, cascade: TinyCascade) -> list[Answer]:
    request = InferRequest(rows=cascade.texts, ids=("",) * len(cascade.texts), truncate=False, timeout_s=TIMEOUT_S)
    return list(await service.infer(request))


async def test_probes_go_both_ways_and_are_answered_as_others_are(tmp_path: Path) -> None:
    cascade = make_cascade(tmp_path)
    plan = replace(cascade.cascade, prune={END: ALPHA})
    with served(cascade, plan, 0.0) as (service, _):
        plain = await asked(service, cascade)
    with served(cascade, plan, 1.0) as (service, core):
        probed = await asked(service, cascade)
        seen = await all_seen(core, len(cascade.texts))
    assert [(each.value, each.exit) for each in probed] == [(each.value, each.exit) for each in plain]
    of_pruned, of_whole = ends_of(cascade)
    assert seen.end_losses_N is not None
    lost = [float(pruned != whole) for pruned, whole in zip(of_pruned, of_whole, strict=True)]
    assert sorted(seen.end_losses_N.tolist()) == sorted(lost), "of every probe, whatever way it was answered"
    assert 0 < sum(lost) < len(lost), "pruning changes some answers and not all"
    wrong = [answer.value != whole for answer, whole in zip(probed, of_whole, strict=True)]
    assert core.agreement == pytest.approx(1 - sum(wrong) / len(wrong))
