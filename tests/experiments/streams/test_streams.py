from __future__ import annotations

import asyncio
import json
from math import inf

import httpx
import pytest

from experiments.generation.slos import Slos
from experiments.peers.search import Bounds, Search
from experiments.streams.__main__ import searched
from experiments.streams.client import Asked, Caller, Streamed


def answered(request: httpx.Request) -> httpx.Response:
    """As many pieces of text as asked for, then usage; whoever asks for none is refused."""
    asked = json.loads(request.content)
    if not asked["max_tokens"]:
        return httpx.Response(400, text="at least one token")
    pieces = [{"choices": [{"text": f"{k} "}]} for k in range(asked["max_tokens"])]
    last = {"choices": [], "usage": {"completion_tokens": asked["more"]}, "offramp": {"exits": {"4": 2}}}
    lines = [f"data: {json.dumps(each)}\n\n" for each in [*pieces, last]]
    return httpx.Response(200, text="".join([*lines, "data: [DONE]\n\n"]))


CALLER = Caller(
    url="http://nobody", model="m", more=lambda tokens: {"more": tokens + 1}, transport=httpx.MockTransport(answered)
)


def test_a_stream_is_read_to_its_usage() -> None:
    (streamed,), _ = asyncio.run(CALLER.at_once([Asked(prompt="a", tokens=3)], 1))
    assert (streamed.text, streamed.tokens, streamed.exits, streamed.error) == ("0 1 2 ", 4, {"4": 2}, None)
    assert 0 <= streamed.due_s <= streamed.sent_s
    assert 0 <= streamed.ttft_s < inf
    assert 0 <= streamed.tpot_s < inf


def test_who_is_refused_never_keeps_a_bound() -> None:
    (streamed,), _ = asyncio.run(CALLER.at_once([Asked(prompt="a", tokens=0)], 1))
    assert streamed.error == "400: at least one token"
    assert (streamed.ttft_s, streamed.tpot_s) == (inf, inf)


def test_arrivals_are_answered_in_their_order_and_prompts_come_again() -> None:
    asked = [Asked(prompt="a", tokens=1), Asked(prompt="b", tokens=2)]
    answers = asyncio.run(CALLER.at_rate(asked, 100.0, 0.1, seed=0))
    assert [each.tokens for each in answers] == [2 + k % 2 for k in range(len(answers))]
    assert [each.due_s for each in answers] == sorted(each.due_s for each in answers)
    assert len(answers) > 2


def kept(ttft_s: float, tpot_s: float) -> Streamed:
    return Streamed(due_s=1.0, sent_s=1.0, first_s=1.0 + ttft_s, last_s=1.0 + ttft_s + 2 * tpot_s, tokens=3)


@pytest.mark.parametrize(("capacity", "sustained"), [(3.0, 3.0), (0.5, 0.5), (100.0, 8.0)])
def test_what_is_sustained_is_searched_to_the_rate_from_which_too_few_keep_both_bounds(
    capacity: float, sustained: float
) -> None:
    seeds: list[int] = []

    async def at_rate(rate_per_s: float, seed: int) -> list[Streamed]:
        seeds.append(seed)
        late = rate_per_s > capacity
        return [kept(0.01, 0.1)] * 8 + [kept(0.01, 0.3 if late else 0.1), kept(0.2 if late else 0.01, 0.1)]

    bounds = Bounds(low_per_s=0.1, high_per_s=8.0, resolution=0.05)
    begun = Search(start_per_s=2.0, bounds=bounds)
    found, rates = asyncio.run(searched(begun, Slos(ttft_s=0.1, tpot_s=0.2), at_rate))
    assert found.best_per_s <= sustained <= found.best_per_s * 1.05
    assert seeds == list(range(len(rates)))


def test_who_failed_keeps_no_bound() -> None:
    failed = Streamed(due_s=0.0, sent_s=0.0, error="refused")
    assert Slos(ttft_s=1.0, tpot_s=1.0).kept([kept(0.5, 0.5), failed]) == 0.5
