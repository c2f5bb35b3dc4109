"""Streams of an encoder-decoder through real replicas: sources hop whole, and come again where a replica dies."""

from __future__ import annotations

import asyncio
import random

import pytest

from earlyexit.network.model import EarlyExitModel
from earlyexit.policies.threshold import ConfidencePolicy
from tests.deployments.ingress.generation.test_generate_with_decoders import (
    MAX_TOKENS,
    NUM_PAGES,
    THRESHOLD,
    all_of,
    one_dies_in_mid_stream,
    plan,
    served,
)
from tests.deployments.wire_fakes import soon
from tests.earlyexit.families.decoders import NUM_BLOCKS, Handfuls, sequence
from tests.earlyexit.families.encoder_decoders import PAD, hf_seq2seq, seq2seq

KIND = "t5 gated"


def an_encoder_decoder() -> EarlyExitModel:
    """The same at every call, over a store of its own."""
    return seq2seq(hf_seq2seq(KIND), num_pages=NUM_PAGES)


@pytest.fixture(scope="module")
def expected() -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """By source, what a model alone says of it: tokens, and the blocks that they leave after."""
    rng = random.Random(0)
    sources = [tuple(rng.randrange(1, 256) for _ in range(rng.randint(1, 20))) for _ in range(6)]
    run = Handfuls(
        model=an_encoder_decoder(), policy=ConfidencePolicy(THRESHOLD), bounds=(0, 2, NUM_BLOCKS), ramps=(1, 2)
    )
    asked = {k: sequence(source, max_tokens=MAX_TOKENS, start=PAD[KIND]) for k, source in enumerate(sources, 1)}
    said = run.run(asked)
    return {source: [(each.chosen.token, each.exit) for each in said[k]] for k, source in enumerate(sources, 1)}


@pytest.mark.parametrize("cut", [None, 2, 3])
async def test_streams_say_what_the_model_says_alone_also_where_a_replica_dies(
    expected: dict[tuple[int, ...], list[tuple[int, int]]], cut: int | None
) -> None:
    async with served(plan(cut), an_encoder_decoder, PAD[KIND]) as service:
        said = await soon(asyncio.gather(*(all_of(service.begin(source)) for source in expected)))
        assert said == list(expected.values())
        assert len({exit_block for each in said for _, exit_block in each}) > 1
        await service.all_free()
        await one_dies_in_mid_stream(service, expected, -1)
