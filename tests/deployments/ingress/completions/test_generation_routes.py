"""OpenAI's routes and Triton's generate extension: answers and streams as clients read them, errors, descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earlyexit.errors import DeadlineError, OverloadedError
from earlyexit.sequences.sequence import Sampling
from offramp.commands.serve import example_of
from tests.deployments.ingress.completions.generating import (
    ASKED,
    CHAT,
    CUT_SHORT,
    TEXT,
    V2,
    Teller,
    client_of,
    events,
    listening,
    tales,
    text_of,
)
from tests.earlyexit.codecs.prompts import prompt_codec
from tests.model_cards import a_card

ROUTES = [("/v1/completions", TEXT), ("/v1/chat/completions", CHAT)]
BOTH = pytest.mark.parametrize(("path", "body"), ROUTES, ids=["text", "chat"])
NAMED = {"x-request-id": "r7"}


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(codec=prompt_codec(tmp_path))


async def asked(teller: Teller, path: str, body: dict[str, Any], **headers: str) -> Any:
    async with client_of(teller) as client:
        return await client.post(path, json=body, headers={**NAMED, **headers})


@BOTH
@pytest.mark.parametrize(
    "answer", [b"a mouse", "naïve 🐭 mouse".encode(), b"half \xf0\x9f"], ids=["ascii", "wide", "half"]
)
async def test_streamed_text_equals_the_whole_answer(
    teller: Teller, path: str, body: dict[str, Any], answer: bytes
) -> None:
    teller.answer = answer
    for stop in (None, ["use"], ["e"], ["zz", "ous"]):
        whole = (await asked(teller, path, body | {"stop": stop})).json()["choices"][0]
        response = await asked(teller, path, body | {"stop": stop, "stream": True})
        headers = response.headers
        assert headers["content-type"].startswith("text/event-stream")
        assert {"content-encoding", "content-length"}.isdisjoint(headers)
        # A proxy must not keep events back.
        assert (headers["x-accel-buffering"], "no-transform" in headers["cache-control"]) == ("no", True)
        chunks = events(response.text)
        assert text_of(chunks) == (whole["text"] if "text" in whole else whole["message"]["content"])
        assert chunks[-1] == "[DONE]"
        assert chunks[-2]["choices"][0]["finish_reason"] == whole["finish_reason"]
        assert "\ufffd" not in text_of(chunks)


@BOTH
async def test_chunks_have_openais_format_with_the_exits_of_tokens(
    teller: Teller, path: str, body: dict[str, Any]
) -> None:
    teller.answer = "a 🐭!".encode()
    response = await asked(teller, path, body | {"stream": True, "stream_options": {"include_usage": True}})
    *chunks, usage, done = events(response.text)
    assert done == "[DONE]"
    assert len({(each["id"], each["created"], each["model"], each["object"]) for each in [*chunks, usage]}) == 1
    *begun, last = chunks
    assert [each["choices"][0]["finish_reason"] for each in begun] == [None] * len(begun)
    assert last["choices"][0]["finish_reason"] == "stop"
    assert last["choices"][0].get("delta", {}) == {}  # the last chunk of an answer has no text
    assert last["choices"][0].get("text", "") == ""
    assert last["offramp"] == {"exits": {"1": 4, "3": 4}}
    assert [each["usage"] for each in chunks] == [None] * len(chunks)
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    spoken = [each["choices"][0] for each in begun]
    if "chat" in path:
        assert spoken[0]["delta"] == {"role": "assistant", "content": ""}
        spoken = spoken[1:]
    assert [each.get("text") or each["delta"]["content"] for each in spoken] == ["a", " ", "🐭", "!"]
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = events((await asked(teller, path, body | {"stream": True, "stream_options": options})).text)[:-1]
    assert [each["usage"]["completion_tokens"] for each in counted][-6:] == [1, 2, 6, 7, 8, 8]
    long_id = {"x-request-id": "r" * 5000}
    unasked = events((await asked(teller, path, body | {"stream": True}, **long_id)).text)
    assert {each["id"].partition("-")[2] for each in unasked[:-1]} == {"r" * 128}
    assert all("usage" not in each and each["choices"] for each in unasked[:-1])
    teller.answer = "a🐭".encode()
    whole = (await asked(teller, path, body | {"exits": True})).json()
    assert whole["offramp"] == {"exits": {"1": 3, "3": 3}, "token_exits": [1, 3, 1, 3, 1, 3]}
    chunks = events((await asked(teller, path, body | {"exits": True, "stream": True})).text)[:-1]
    told = [each["offramp"]["token_exits"] for each in chunks if "offramp" in each]
    assert told == [[1], [3, 1, 3, 1], [3]]  # the mouse has four bytes; the end has no text


async def test_a_stream_has_the_logprobs_of_its_tokens(teller: Teller) -> None:
    for stop in (None, ["se?"]):  # it holds the last tokens back until the end, which is reported in no case
        chat = await asked(teller, "/v1/chat/completions", CHAT | {"logprobs": True, "stream": True, "stop": stop})
        pieces = [each["choices"][0]["logprobs"] for each in events(chat.text)[:-1]]
        assert [token["token"] for each in pieces if each for token in each["content"]] == list("a mouse")
    teller.answer = "aé🐭b".encode()  # of which é has two tokens, and the mouse four
    for options in ({}, {"stream": True}, {"stop": "éx"}, {"stream": True, "stop": "é🐭bx"}):
        text = (await asked(teller, "/v1/completions", TEXT | {"logprobs": 0, **options})).text
        told = [each["choices"][0]["logprobs"] for each in events(text) if each != "[DONE]"]
        assert [offset for each in told if each for offset in each["text_offset"]] == [0, 1, 1, 2, 2, 2, 2, 3]
    # Also of a token without text, and of the first of two tokens with the same text.
    teller.answer, body = b"Q\xf0", TEXT | {"logprobs": 2, "max_tokens": 2}
    whole = (await asked(teller, "/v1/completions", body)).json()["choices"][0]["logprobs"]
    assert (whole["tokens"], whole["top_logprobs"][0]) == (["Q", "\ufffd"], {"Q": -0.25})
    *_, last, _ = events((await asked(teller, "/v1/completions", body | {"stream": True})).text)
    assert last["choices"][0]["logprobs"]["tokens"] == ["\ufffd"]


async def test_sampling_parameters_are_passed_on(teller: Teller) -> None:
    drawn = {"temperature": 0.5, "top_p": 0.9, "seed": -1}
    for top_k, expected in ((5, 5), (0, None), (-1, None)):
        await asked(teller, "/v1/completions", TEXT | drawn | {"top_k": top_k})
        assert teller.asked[-1].sampling == Sampling(temperature=0.5, top_p=0.9, top_k=expected, seed=2**63 - 1)
    await asked(teller, "/v1/completions", TEXT | drawn | {"n": 3})
    seeds = {each.sampling.seed: (each.waits, each.num_answers) for each in teller.asked[-3:]}
    assert seeds == {2**63 - 1: (False, 3), 0: (True, 2), 1: (True, 1)}


async def test_defaults_are_those_of_openai(teller: Teller) -> None:
    await asked(teller, "/v1/completions", {"model": "tales", "prompt": "Once"})
    chat = {"model": "tales", "messages": CHAT["messages"]}
    await asked(teller, "/v1/chat/completions", chat)
    await asked(teller, "/v1/chat/completions", chat | {"max_completion_tokens": 9})
    assert [request.max_tokens for request in teller.asked] == [16, 127, 9]  # 127: the model's length
    assert {request.sampling.temperature for request in teller.asked} == {1.0}
    assert len({request.sampling.seed for request in teller.asked}) == 3


@BOTH
@pytest.mark.parametrize(
    ("failure", "status"),
    [(OverloadedError("no pages are left", retry_after_s=2.5), 503), (DeadlineError("too late"), 504)],
)
async def test_an_error_before_the_first_token_has_a_status(
    teller: Teller, path: str, body: dict[str, Any], failure: Exception, status: int
) -> None:
    teller.failure = failure
    refused = await asked(teller, path, body | {"stream": True})
    assert refused.status_code == status
    assert refused.json()["error"]["message"] == str(failure)
    assert refused.headers.get("retry-after") == ("3" if status == 503 else None)
    teller.failure, teller.breaks_after = None, 0
    broken = await asked(teller, path, body | {"stream": True})
    assert (broken.status_code, broken.json()["error"]["code"]) == (500, "execution")


@BOTH
async def test_a_later_error_is_an_event(teller: Teller, path: str, body: dict[str, Any]) -> None:
    teller.breaks_after = 3
    response = await asked(teller, path, body | {"stream": True})
    *chunks, error, done = events(response.text)
    assert (response.status_code, text_of(chunks), done) == (200, "a m", "[DONE]")
    assert error["error"]["type"] == "server_error"
    assert (await asked(teller, path, body)).status_code == 500
    assert teller.counted == [(path, 500), (path, 500)]  # the broken stream too, although it has sent 200


@BOTH
async def test_an_answer_cut_short_by_a_time_limit_has_its_text_so_far(
    teller: Teller, path: str, body: dict[str, Any]
) -> None:
    teller.cut_after = 4
    whole = (await asked(teller, path, body := body | {"stop": ["mouse"]})).json()  # "mo" is held back until the end
    choice = whole["choices"][0]
    assert (choice.get("text") or choice["message"]["content"], choice["finish_reason"]) == ("a mo", "length")
    assert whole["offramp"] == {"exits": {"1": 2, "3": 2}, "cut_short": CUT_SHORT}
    assert whole["usage"]["completion_tokens"] == 4
    *chunks, last, _ = events((await asked(teller, path, body | {"stream": True})).text)
    assert (text_of(chunks), last["choices"][0]["finish_reason"]) == ("a mo", "length")
    assert last["offramp"] == whole["offramp"]


async def test_several_prompts_are_refused_together(teller: Teller) -> None:
    for prompt, message in ((["a"] * 257, "257 times 1 answers; at most 256"), (["Once", ""], "the prompt is empty")):
        response = await asked(teller, "/v1/completions", TEXT | {"prompt": prompt})
        assert (response.status_code, message in response.json()["error"]["message"]) == (400, True)
    assert (len(teller.asked), teller.aborted) == (2, ["r7"])


# Triton's generate extension

HEAD = {"model_name": "tales", "model_version": "1", "id": "7"}


async def test_generate_sends_parts_and_then_the_finish_reason_or_an_error_or_a_time_limit(teller: Teller) -> None:
    response = await asked(teller, f"{V2}_stream", ASKED | {"id": "7"})
    *parts, last = events(response.text)
    assert text_of(parts) == "a mouse"
    assert parts[0] == {**HEAD, "text_output": "a"}
    counts = {"prompt_tokens": 5, "completion_tokens": 8, "exits": {"1": 4, "3": 4}}
    assert last == {**HEAD, "text_output": "", "finish_reason": "stop", **counts}
    teller.breaks_after = 2
    *parts, last = events((await asked(teller, f"{V2}_stream", ASKED)).text)
    assert (text_of(parts), list(last)) == ("a ", ["error"])
    teller.breaks_after, teller.cut_after = None, 4
    whole = (await asked(teller, V2, ASKED)).json()
    assert (whole["text_output"], whole["finish_reason"], whole["cut_short"]) == ("a mo", "length", CUT_SHORT)
    *parts, last = events((await asked(teller, f"{V2}_stream", ASKED)).text)
    assert (text_of(parts), last["finish_reason"], last["cut_short"]) == ("a mo", "length", CUT_SHORT)


async def test_the_openai_package_reads_whole_answers_streams_models_and_errors(teller: Teller) -> None:
    import openai  # takes a second, in every process that collects tests

    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell"}]
    async with (
        listening(teller) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(model="tales", messages=messages, logprobs=True, top_logprobs=1)
        text = await client.completions.create(model="tales", prompt="Once", max_tokens=50, logprobs=1)
        assert [chat.choices[0].message.content, text.choices[0].text] == ["a mouse"] * 2
        stream = await client.completions.create(model="tales", prompt=["Once", "Up"], max_tokens=50, stream=True)
        parts = [chunk.choices[0] async for chunk in stream]
        assert ["".join(each.text for each in parts if each.index == index) for index in (0, 1)] == ["a mouse"] * 2
        assert [model.id async for model in client.models.list()] == ["tales"]
        with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-4'"):
            await client.chat.completions.create(model="gpt-4", messages=messages)
        with pytest.raises(openai.BadRequestError, match="not supported: 'frequency_penalty'"):
            await client.chat.completions.create(model="tales", messages=messages, frequency_penalty=1)
        teller.breaks_after = 2
        with pytest.raises(openai.APIError, match="the model failed"):
            async for _ in await client.chat.completions.create(model="tales", messages=messages, stream=True):
                pass


def test_a_service_that_starts_names_the_command_of_its_model() -> None:
    assert example_of(tales()).startswith("offramp generate ")
    assert example_of(a_card()).startswith("offramp predict ")


async def test_openapi_describes_every_parameter_and_has_the_defaults(teller: Teller) -> None:
    async with client_of(teller) as client:
        schemas = (await client.get("/openapi.json")).json()["components"]["schemas"]
    for body in (schemas[name] for name in ("CompletionBody", "ChatBody", "GenerateBody")):
        assert body["examples"]
        assert [field for field, each in body["properties"].items() if not each.get("description")] == []
    defaults = {
        name: {field: each["default"] for field, each in schemas[name]["properties"].items() if "default" in each}
        for name in ("CompletionBody", "ChatBody", "GenerateParameters")
    }
    shared = {"top_p": 1.0, "ignore_eos": False, "exits": False}
    assert defaults == {
        "CompletionBody": shared | {"temperature": 1.0, "max_tokens": 16, "stream": False, "n": 1, "echo": False},
        "ChatBody": shared
        | {"temperature": 1.0, "max_tokens": 256, "stream": False, "n": 1, "logprobs": False, "top_logprobs": 0},
        "GenerateParameters": shared | {"temperature": 0.0, "max_tokens": 16},
    }
