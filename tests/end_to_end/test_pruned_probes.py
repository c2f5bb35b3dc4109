"""Tests of probes in a cascade that prunes words, on replicas in this process. Callers notice no difference."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deployments.api.operations import InferRequest
from deployments.api.service import InferService
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions
from earlyexit.clock import MonotonicClock
from earlyexit.codecs import find_codec
from earlyexit.codecs.chain import ChainCodec
from earlyexit.network.boundary import Answer
from earlyexit.network.model import ChainNetwork
from earlyexit.network.store import load_network, read_card
from earlyexit.training.ramps import exit_outputs, importance_of
from optimizer.plans.plan import PlacedPlan, Plan
from profiles.stream import Observations, StreamShape, empty
from tests.deployments.service_here import built, connected
from tests.end_to_end.tiny_cascade import NETWORKS, RAMPS, TIMEOUT_S, TinyCascade, make_cascade

END = NETWORKS[0] - 1
ALPHA = 1.0
"""Words with less than the mean attention are pruned: about half of them in the tiny model."""
SHAPE = StreamShape(score="entropy", num_blocks=NETWORKS[-1], ramps=RAMPS)


@asynccontextmanager
async def served(
    cascade: TinyCascade, plan: Plan, probe_share: float
) -> AsyncIterator[tuple[InferService, IngressCore]]:
    """Runs every stage on its own replica."""
    card = read_card(cascade.folder)
    settings, placed = cascade.settings().model_copy(update={"plan": plan}), PlacedPlan(plan=plan)
    codec: Any = find_codec(card.codec, cascade.folder)
    rules = IngressOptions(max_queued=500, max_attempts=3, shape=SHAPE, probe_share=probe_share)
    replicas = await built(settings, placed, card.chain.starts)
    async with connected(placed, replicas, rules, codec=codec) as running:
        yield InferService(codec, running.dispatcher, settings, MonotonicClock()), running.core


def ends_of(cascade: TinyCascade) -> tuple[list[int], list[int]]:
    """Returns the large model's answers to every text without its pruned words, and to the whole text."""
    network = load_network(cascade.folder)
    codec = find_codec(read_card(cascade.folder).codec, cascade.folder)
    assert isinstance(network, ChainNetwork)
    assert isinstance(codec, ChainCodec)
    attention = importance_of(network.members[0], codec.of(0).encode(cascade.texts))
    pruned = [
        codec.pruned_for(1, 0, text, own_N, ALPHA).encoded for text, own_N in zip(cascade.texts, attention, strict=True)
    ]
    whole = codec.of(1).encode(cascade.texts)
    last = NETWORKS[1] - NETWORKS[0] - 1
    of_pruned, of_whole = (exit_outputs(network.members[1], each)[last].argmax(1).tolist() for each in (pruned, whole))
    return of_pruned, of_whole


async def all_seen(core: IngressCore, number: int) -> Observations:
    """Waits for all probes: whole texts still run after every caller has an answer."""
    parts = [empty(SHAPE)]
    async with asyncio.timeout(30):
        while sum(map(len, parts)) < number:
            await asyncio.sleep(0.001)
            seen = core.report(0.0, 0.0).probes
            parts += [] if seen is None else [seen]
    return Observations.join(SHAPE, parts)


async def answers_of(service: InferService, cascade: TinyCascade) -> list[Answer]:
    request = InferRequest(rows=cascade.texts, ids=("",) * len(cascade.texts), truncate=False, timeout_s=TIMEOUT_S)
    return list(await service.infer(request))


async def test_probes_run_with_and_without_pruning_and_get_the_same_answers(tmp_path: Path) -> None:
    cascade = make_cascade(tmp_path)
    plan = replace(cascade.cascade, prune={END: ALPHA})
    async with served(cascade, plan, 0.0) as (service, _):
        plain = await answers_of(service, cascade)
    async with served(cascade, plan, 1.0) as (service, core):
        probed = await answers_of(service, cascade)
        seen = await all_seen(core, len(cascade.texts))
    assert [(each.value, each.exit) for each in probed] == [(each.value, each.exit) for each in plain]
    of_pruned, of_whole = ends_of(cascade)
    assert seen.end_losses_N is not None
    lost = [float(pruned != whole) for pruned, whole in zip(of_pruned, of_whole, strict=True)]
    assert sorted(seen.end_losses_N.tolist()) == sorted(lost), "of every probe, whatever way it was answered"
    assert 0 < sum(lost) < len(lost), "pruning changes some answers and not all"
    wrong = [answer.value != whole for answer, whole in zip(probed, of_whole, strict=True)]
    assert core.observations.agreement == pytest.approx(1 - sum(wrong) / len(wrong))
