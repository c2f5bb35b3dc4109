"""What a model that generates says of itself, and of requests that it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from offramp.cli.serve import example_of
from tests.deployments.ingress.completions.generating import ASKED, CHAT, NOW_S, TEXT, V2, Teller, client_of, tales
from tests.earlyexit.codecs.prompts import prompt_codec
from tests.model_cards import a_card

LONG = "a" * 200
TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", TEXT | {"prompt": LONG}),
    ("/v1/completions", TEXT | {"prompt": [5] * 128}),
    ("/v1/completions", TEXT | {"max_tokens": 128}),
    ("/v1/chat/completions", CHAT | {"messages": [{"role": "user", "content": LONG}]}),
    (V2, ASKED | {"text_input": LONG}),
    (V2, ASKED | {"max_tokens": 128}),
]


SOURCES = {"/v1/completions": "prompt", "/v1/chat/completions": "messages"}


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(codec=prompt_codec(tmp_path))


@pytest.mark.parametrize(("path", "body"), TOO_LONG)
async def test_what_is_longer_than_the_model_takes_has_one_status_and_code(
    teller: Teller, path: str, body: dict[str, Any]
) -> None:
    async with client_of(teller) as client:
        refused = await client.post(path, json=body)
    assert refused.status_code == 400
    if path != V2:
        error = refused.json()["error"]
        named = "max_tokens" if "max_tokens" in body and body["max_tokens"] == 128 else SOURCES[path]
        assert (error["code"], error["param"]) == ("context_length_exceeded", named)


async def test_an_unknown_path_is_not_said_to_be_elsewhere(teller: Teller) -> None:
    async with client_of(teller) as client:
        refused = await client.post("/v1/embeddings", json={})
        created = (await client.get("/v1/models")).json()["data"][0]["created"]
    assert (refused.status_code, "models that generate" in refused.text) == (404, False)
    assert created == NOW_S


@pytest.mark.parametrize("name", ["CompletionBody", "ChatBody", "GenerateBody"])
async def test_every_parameter_is_described_and_every_body_has_an_example(teller: Teller, name: str) -> None:
    async with client_of(teller) as client:
        schema = (await client.get("/openapi.json")).json()["components"]["schemas"][name]
    assert [field for field, each in schema["properties"].items() if not each.get("description")] == []
    assert schema["examples"]


def test_a_service_that_starts_names_the_command_of_its_model() -> None:
    assert example_of(tales()).startswith("offramp generate ")
    assert example_of(a_card()).startswith("offramp predict ")


async def test_a_wrong_field_is_named_without_the_alternatives_of_its_type(teller: Teller) -> None:
    async with client_of(teller) as client:
        error = (await client.post("/v1/completions", json=TEXT | {"prompt": 7})).json()["error"]
    assert error["param"] == "prompt"
    assert error["message"] == "prompt: Input should be a valid string or Input should be a valid array"


@pytest.mark.parametrize(
    ("path", "change", "param"),
    [
        ("/v1/completions", {"prompt": ""}, "prompt"),
        ("/v1/completions", {"prompt": ["a", "b"]}, "prompt"),
        ("/v1/completions", {"prompt": [5, 999]}, "prompt"),
        ("/v1/completions", {"n": 2}, "n"),
        ("/v1/completions", {"temperature": 3}, "temperature"),
        ("/v1/completions", {"top_p": 0}, "top_p"),
        ("/v1/completions", {"top_k": 0}, "top_k"),
        ("/v1/completions", {"echo": True, "logprobs": 1}, "logprobs"),
        ("/v1/completions", {"stream_options": {}}, "stream_options"),
        ("/v1/completions", {"model": "gpt-4"}, "model"),
        ("/v1/chat/completions", {"model": "tales:2"}, "model"),
        ("/v1/chat/completions", {"top_logprobs": 3}, "top_logprobs"),
        ("/v1/chat/completions", {"max_tokens": 4, "max_completion_tokens": 3}, "max_completion_tokens"),
        ("/v1/chat/completions", {"messages": [{"role": "tool", "content": "4"}]}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
async def test_a_refusal_after_parsing_names_its_field(
    teller: Teller, path: str, change: dict[str, Any], param: str
) -> None:
    async with client_of(teller) as client:
        refused = await client.post(path, json=(TEXT if path == "/v1/completions" else CHAT) | change)
    assert refused.json()["error"]["param"] == param


async def test_defaults_of_generation_can_be_read_by_machines(teller: Teller) -> None:
    async with client_of(teller) as client:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    defaults = {
        name: {field: each["default"] for field, each in schemas[name]["properties"].items() if "default" in each}
        for name in ("CompletionBody", "ChatBody", "GenerateParameters")
    }
    shared = {"top_p": 1.0, "ignore_eos": False, "exits": False}
    assert defaults == {
        "CompletionBody": shared | {"temperature": 1.0, "max_tokens": 16, "stream": False, "echo": False},
        "ChatBody": shared
        | {"temperature": 1.0, "max_tokens": 256, "stream": False, "logprobs": False, "top_logprobs": 0},
        "GenerateParameters": shared | {"temperature": 0.0, "max_tokens": 16},
    }
