"""Probes among a real decoder's streams: callers get the full model's text, and the controller the ramps' results."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest

from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.token import first_token
from earlyexit.training.tokens import Generated, GenerationOptions, generate
from profiles.stream import Observations
from tests.deployments.ingress.generation.test_generate_with_decoders import (
    MAX_TOKENS,
    THRESHOLD,
    Service,
    all_of,
    expected,
    plan,
    served,
)
from tests.deployments.wire_fakes import soon
from tests.earlyexit.families.decoders import NUM_BLOCKS, decoder, hf_decoder

__all__ = ["expected"]
LAST = NUM_BLOCKS - 1
Said = list[tuple[int, int]]
Row = tuple[float, ...]
"""Of a token: its exit under the plan, and for both ramps the score and whether its answer differs."""


@pytest.fixture(scope="module")
def alone(expected: dict[tuple[int, ...], Said]) -> dict[tuple[int, ...], Generated]:
    """Returns, by prompt, the full model's tokens with the results of every ramp, without a service."""
    asked = GenerationOptions(max_tokens=MAX_TOKENS, policy=ConfidencePolicy(THRESHOLD), observe=True)
    model = decoder(hf_decoder())
    return dict(zip(expected, generate(model, list(expected), asked), strict=True))


@pytest.fixture(params=[None, 2, 3], ids=["one stage", "two stages, cut behind a ramp", "two stages, cut elsewhere"])
async def service(request: pytest.FixtureRequest) -> AsyncIterator[Service]:
    async with served(plan(request.param), probe_share=1.0) as service:
        yield service


def rows_of(generated: Generated) -> list[Row]:
    """Returns the expected observations of a sequence under the same thresholds."""
    rows = []
    for look in generated.observed:
        exit_block = next((ramp for ramp in (1, 2) if look[ramp].score >= THRESHOLD), LAST)
        differs = [float(first_token(look[ramp].value) != first_token(look[LAST].value)) for ramp in (1, 2)]
        rows.append((float(exit_block), look[1].score, look[2].score, *differs))
    return rows


def seen_rows(seen: Observations | None) -> list[Row]:
    assert seen is not None
    assert seen.probe_N.all()
    assert not seen.stayed_N.any()
    return [tuple(row) for row in np.column_stack([seen.exits_N, seen.scores_NR, seen.losses_NR]).tolist()]


def assert_same(rows: list[Row], wanted: list[Row]) -> None:
    """Compares rows in any order and up to rounding, because sequences and batches vary."""
    np.testing.assert_allclose(sorted(rows), sorted(wanted), atol=1e-3)


def observed(service: Service) -> Observations | None:
    return service.dispatcher.core.report(0.0, 0.0).probes


async def test_probe_sequences_get_the_full_models_tokens(
    service: Service, alone: dict[tuple[int, ...], Generated]
) -> None:
    said = await soon(asyncio.gather(*(all_of(service.begin(prompt)) for prompt in alone)))
    assert said == [[(token, LAST) for token in each.answer] for each in alone.values()]
    wanted = [row for each in alone.values() for row in rows_of(each)]
    assert len({row[0] for row in wanted}) == 3
    assert_same(seen_rows(observed(service)), wanted)
    left = [row for row in wanted if row[0] != LAST]
    agreement = 1 - sum(row[2 + int(row[0])] for row in left) / len(wanted)
    assert service.dispatcher.core.observations.agreement == pytest.approx(agreement)
    await service.all_free()


async def test_probes_do_not_change_the_tokens_of_other_sequences(
    service: Service,
    expected: dict[tuple[int, ...], Said],
    alone: dict[tuple[int, ...], Generated],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    prompts, core = list(expected), service.dispatcher.core
    monkeypatch.setattr(core, "_rng", SimpleNamespace(random=cycle([0.0, 1.0]).__next__))  # every other is a probe
    monkeypatch.setattr(core, "options", replace(core.options, probe_share=0.5))
    said = await soon(asyncio.gather(*(all_of(service.begin(prompt)) for prompt in prompts)))
    full = [[(token, LAST) for token in alone[prompt].answer] for prompt in prompts]
    assert said == [full[k] if k % 2 == 0 else expected[prompt] for k, prompt in enumerate(prompts)]
    wanted = [row for prompt in prompts[::2] for row in rows_of(alone[prompt])]
    assert_same(seen_rows(observed(service)), wanted)
    assert service.service.loop.counts.probes == len(prompts[::2])


async def test_a_restarted_probe_sequence_remains_a_probe(
    service: Service, alone: dict[tuple[int, ...], Generated]
) -> None:
    streams = [service.begin(prompt) for prompt in alone]
    begun = [[(said.token, said.exit) for said in [await soon(anext(stream))]] for stream in streams]
    service.one_dies(0)
    rest = await soon(asyncio.gather(*map(all_of, streams)))
    full = [[(token, LAST) for token in each.answer] for each in alone.values()]
    assert [first + more for first, more in zip(begun, rest, strict=True)] == full
    assert service.num_lost > 0
    wanted = [row for each in alone.values() for row in rows_of(each)]
    assert_same(seen_rows(observed(service)), wanted)  # no token twice, none missing
    await service.all_free()
