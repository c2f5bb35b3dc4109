"""Triton's generate extension."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.deployments.ingress.completions.generating import ASKED, CUT_SHORT, V2, Teller, client_of, events, text_of
from tests.earlyexit.codecs.prompts import prompt_codec

HEAD = {"model_name": "tales", "model_version": "1", "id": "7"}


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(codec=prompt_codec(tmp_path))


async def asked(teller: Teller, path: str, body: dict[str, Any]) -> Any:
    async with client_of(teller) as client:
        return await client.post(path, json=body)


async def test_a_stream_brings_its_parts_and_at_last_why_it_ended(teller: Teller) -> None:
    response = await asked(teller, f"{V2}_stream", ASKED | {"id": "7"})
    *parts, last = events(response.text)
    assert text_of(parts) == "a mouse"
    assert parts[0] == {**HEAD, "text_output": "a"}
    counts = {"prompt_tokens": 5, "completion_tokens": 8, "exits": {"1": 4, "3": 4}}
    assert last == {**HEAD, "text_output": "", "finish_reason": "stop", **counts}


async def test_an_error_in_mid_stream_is_in_the_protocols_form(teller: Teller) -> None:
    teller.breaks_after = 2
    *parts, last = events((await asked(teller, f"{V2}_stream", ASKED)).text)
    assert (text_of(parts), list(last)) == ("a ", ["error"])


async def test_an_answer_that_a_limit_of_time_ends_is_told_as_far_as_it_came(teller: Teller) -> None:
    teller.cut_after = 4
    whole = (await asked(teller, V2, ASKED)).json()
    assert (whole["text_output"], whole["finish_reason"], whole["cut_short"]) == ("a mo", "length", CUT_SHORT)
    *parts, last = events((await asked(teller, f"{V2}_stream", ASKED)).text)
    assert (text_of(parts), last["finish_reason"], last["cut_short"]) == ("a mo", "length", CUT_SHORT)
