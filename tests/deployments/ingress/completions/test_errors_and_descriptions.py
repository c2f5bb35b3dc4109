"""What a model that generates says of itself, and of requests that it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from offramp.commands.serve import example_of
from tests.deployments.ingress.completions.generating import Teller, client_of, tales
from tests.earlyexit.codecs.prompts import prompt_codec
from tests.model_cards import a_card


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(codec=prompt_codec(tmp_path))


@pytest.mark.parametrize("name", ["CompletionBody", "ChatBody", "GenerateBody"])
async def test_every_parameter_is_described_and_every_body_has_an_example(teller: Teller, name: str) -> None:
    async with client_of(teller) as client:
        schema = (await client.get("/openapi.json")).json()["components"]["schemas"][name]
    assert [field for field, each in schema["properties"].items() if not each.get("description")] == []
    assert schema["examples"]


def test_a_service_that_starts_names_the_command_of_its_model() -> None:
    assert example_of(tales()).startswith("offramp generate ")
    assert example_of(a_card()).startswith("offramp predict ")


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
