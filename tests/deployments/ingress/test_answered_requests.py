"""Answers at the door: every entry of answered_requests.yaml, with what the model was asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployments.ingress.api.faces import FakeBackend, client_of
from tests.deployments.ingress.completions import generating
from tests.earlyexit.codecs.prompts import prompt_codec

GOLDEN = yaml.safe_load(Path(__file__).with_name("answered_requests.yaml").read_text(encoding="utf-8"))
Case = dict[str, Any]


def entries(section: str) -> pytest.MarkDecorator:
    """Parametrizes a test by a section of the table."""
    cases = GOLDEN[section]
    ids = [f"{k}-{each.get('post', each.get('get'))}" for k, each in enumerate(cases)]
    return pytest.mark.parametrize("case", cases, ids=ids)


def part_of(whole: Any, wanted: Any) -> Any:
    """Returns of a body what the table names of it."""
    if isinstance(wanted, Mapping) and isinstance(whole, Mapping):
        return {key: part_of(whole.get(key), each) for key, each in wanted.items()}
    if isinstance(wanted, list) and isinstance(whole, list) and len(wanted) == len(whole):
        return [part_of(one, other) for one, other in zip(whole, wanted, strict=True)]
    return whole


async def check(case: Case, client: Any, asked: list[Any]) -> None:
    method = "post" if "post" in case else "get"
    response = await client.request(method.upper(), case[method], json=case.get("json"), headers={"x-request-id": "r7"})
    assert response.status_code == 200, response.text
    wanted = case.get("answer", case.get("has"))
    assert (response.json() if "answer" in case else part_of(response.json(), wanted)) == wanted
    for field, value in case.get("asked", {}).items():
        found = getattr(asked[-1], field)
        assert (list(found) if isinstance(found, tuple) else found) == value, field


@entries("texts")
async def test_a_text_is_answered(case: Case) -> None:
    backend = FakeBackend()
    async with client_of(backend) as client:
        await check(case, client, backend.requests)


@entries("tokens")
async def test_a_prompt_is_answered(case: Case, tmp_path: Path) -> None:
    teller = generating.Teller(codec=prompt_codec(tmp_path))
    async with generating.client_of(teller) as client:
        await check(case, client, teller.asked)
        if "streams" in case:
            response = await client.post(case["post"], json=case["json"] | {"stream": True})
            assert generating.text_of(generating.events(response.text)) == case["streams"]
