"""Sequences from their prompt to their end, whatever becomes of the replicas that they run on."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import pytest

from deployments.api.generation import CutShortError, Stream
from earlyexit.errors import (
    ContextLengthError,
    DeadlineError,
    ExecutionError,
    InputError,
    OverloadedError,
    StageUnavailableError,
)
from earlyexit.sequences.sequence import Chosen, Said
from tests.deployments.ingress.generation.generate_scene import (
    MAX_LENGTH,
    GenerateScene,
    expected,
    placed,
    tokens_of,
)
from tests.deployments.wire_fakes import turns

PROMPT = (3, 1, 4, 1, 5, 9, 2)


async def test_a_prompt_longer_than_a_chunk_is_shown_in_parts_and_what_follows_is_said() -> None:
    scene = GenerateScene()
    stream = scene.start(*PROMPT)
    assert await tokens_of(stream) == expected(PROMPT, 5)
    assert scene.replicas.log == ["r1 gets 1"] * 6  # two parts of the prompt, and no step after the last token
    assert (scene.is_empty, scene.alarms.num_set) == (True, 0)


async def test_sequences_run_side_by_side_and_those_that_come_together_are_sent_together() -> None:
    scene = GenerateScene()
    prompts = [(7, 8), (9,), (1, 2, 3)]
    streams = [scene.start(*prompt) for prompt in prompts]
    said = await asyncio.gather(*map(tokens_of, streams))
    assert said == [expected(prompt, 5) for prompt in prompts]
    assert scene.replicas.log == ["r1 gets 3"] * 5
    counts = scene.service.loop.counts
    assert (counts.begun, counts.ended, counts.prompt_tokens, counts.exits.total()) == (3, {"length": 3}, 6, 15)


async def test_a_token_is_read_before_the_next_one_is_asked_for() -> None:
    scene = GenerateScene()
    scene.replicas.holds = True
    streams = [scene.start(1), scene.start(2)]
    readers = [asyncio.create_task(_logged(stream, scene.replicas.log)) for stream in streams]
    await turns()
    scene.replicas.answer()
    await turns()
    assert scene.replicas.log == ["r1 gets 2", "read", "read", "r1 gets 2"]
    for each in readers:
        each.cancel()


async def _logged(stream: Stream, log: list[str]) -> None:
    await anext(stream)
    log.append("read")


# Replicas that go


async def test_a_sequence_that_is_lost_again_and_again_without_a_token_is_given_up() -> None:
    scene = GenerateScene()
    scene.replicas.holds = True
    stream = scene.start(1)
    await turns()
    for again in range(3):
        for name in sorted(scene.replicas.shown):
            scene.replicas.die(name)
        scene.replicas.start("r1")
        await turns()
        await scene.alarms.until(1.0 + again)
    with pytest.raises(StageUnavailableError, match="3 times without a token"):
        await anext(stream)
    assert scene.service.loop.counts.ended == {"stage_unavailable": 1}
    assert (scene.is_empty, scene.alarms.num_set) == (True, 0)


# Ends before the end


LIMITS = {
    "between tokens": ({"token_timeout_s": 2.0}, {}, 2.0, "the limit of 2 s for the next token"),
    "on the whole": ({}, {"timeout_s": 5.0}, 5.0, "the limit of 5 s for the whole answer"),
}


@pytest.mark.parametrize(("settings", "changes", "at_s", "limit"), LIMITS.values(), ids=LIMITS)
async def test_an_answer_that_reaches_a_limit_is_cut_there(
    settings: dict[str, Any], changes: dict[str, Any], at_s: float, limit: str
) -> None:
    scene = GenerateScene(**settings)
    stream = scene.start(1, max_tokens=20, **changes)
    said = [(await anext(stream)).chosen.token]
    scene.replicas.holds = True
    await turns()
    await scene.alarms.until(at_s)
    with pytest.raises(CutShortError, match=f"after 1 token and {at_s:.1f} s: the next one exceeds {limit}"):
        await anext(stream)
    assert said == expected((1,), 1)
    await scene.alarms.until(20.0)  # the call is hung up
    assert (scene.is_empty, scene.core.counts.drops) == (True, {"deadline": 1})
    assert scene.service.loop.counts.ended == {"cut_short": 1}


async def test_a_step_that_a_replica_drops_because_it_would_be_late_cuts_the_answer_too() -> None:
    scene = GenerateScene()
    stream = scene.start(1, max_tokens=20, timeout_s=8.0)
    said = [(await anext(stream)).chosen.token for _ in range(3)]
    scene.replicas.is_late = True
    with pytest.raises(CutShortError, match=r"after 3 tokens and 0\.0 s: the next one exceeds the limit of 8 s"):
        await tokens_of(stream)
    assert said == expected((1,), 3)
    scene.replicas.is_late = True
    with pytest.raises(DeadlineError, match=r"no token came within 0\.0 s: the first one exceeds the limit of 30 s"):
        await anext(scene.start(2))


async def test_an_answer_that_makes_no_token_ends_its_own_sequence_alone() -> None:
    scene = GenerateScene()
    scene.replicas.holds = True
    bad, good = scene.start(1), scene.start(2)
    await turns()
    scene.replicas.garbles = scene.replicas.open[0].call.sequences[0]
    scene.replicas.holds = False
    scene.replicas.answer()
    with pytest.raises(ExecutionError, match="makes no token"):
        await tokens_of(bad)
    assert await tokens_of(good) == expected((2,), 5)


# At the door


async def test_pages_that_are_full_refuse_a_new_sequence_at_its_first_token_and_make_a_running_one_wait() -> None:
    scene = GenerateScene()
    running = scene.start(1, max_tokens=6)
    await anext(running)
    scene.replicas.refuses = OverloadedError("no pages", retry_after_s=1.0)
    with pytest.raises(OverloadedError, match="no pages"):
        await anext(scene.start(2))
    assert set(scene.replicas.log[1:]) == {"r1 gets 1", "r2 gets 1"}, "every replica was asked"
    scene.follow(placed(epoch=2, device="V100"))
    await turns()
    scene.replicas.refuses = None
    await scene.alarms.until(0.1)
    assert running.num_said == 6
    assert scene.is_empty


async def test_a_new_sequence_that_finds_a_replica_full_is_taken_by_another_that_has_room() -> None:
    scene = GenerateScene()
    scene.replicas.refuses, scene.replicas.full = OverloadedError("no pages", retry_after_s=1.0), {"r1"}
    streams = [scene.start(*PROMPT), scene.start(2)]
    assert [await tokens_of(stream) for stream in streams] == [expected(PROMPT, 5), expected((2,), 5)]
    assert scene.replicas.log[:2] == ["r1 gets 2", "r2 gets 2"]
    assert (scene.service.loop.counts.lost, scene.is_empty, scene.alarms.num_set) == (0, True, 0)


async def test_what_means_nothing_is_refused_before_anything_runs() -> None:
    scene = GenerateScene()
    for prompt, changes, error in (
        ((), {}, InputError),
        ((1,) * MAX_LENGTH, {}, ContextLengthError),
        ((1,), {"max_tokens": 0}, InputError),
        ((1,), {"timeout_s": 0.0}, InputError),
        ((1,), {"timeout_s": 1e6}, InputError),
    ):
        with pytest.raises(error):
            scene.start(*prompt, **changes)
    assert (scene.is_empty, scene.alarms.num_set, scene.service.loop.counts.begun) == (True, 0, 0)


async def test_too_many_sequences_and_a_service_without_a_plan_are_refused_at_once() -> None:
    scene = GenerateScene(max_queued=1)
    scene.start(1)
    with pytest.raises(OverloadedError):
        scene.start(2)
    scene.dispatcher.suspend("nothing is left")
    with pytest.raises(StageUnavailableError):
        scene.start(3)
    assert scene.service.loop.counts.ended == {"overloaded": 1, "stage_unavailable": 1}


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
