"""The `openai` package asks our server, in this process."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from tests.deployments.ingress.completions.generating import Teller, listening
from tests.earlyexit.codecs.prompts import prompt_codec

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell"}]


@pytest.fixture
def teller(tmp_path: Path) -> Teller:
    return Teller(codec=prompt_codec(tmp_path), may_say=asyncio.Semaphore(0))


def client_of(port: int) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)


async def test_it_streams_and_has_the_first_chunk_before_the_second_token_is_computed(teller: Teller) -> None:
    assert teller.may_say is not None
    async with listening(teller) as port, client_of(port) as client:
        teller.may_say.release()
        stream = await client.chat.completions.create(
            model="tales", messages=MESSAGES, stream=True, stream_options={"include_usage": True}, temperature=0
        )
        chunks = [await anext(stream), await anext(stream)]
        assert teller.computed == 1
        assert [chunk.choices[0].delta.content for chunk in chunks] == ["", "a"]
        for _ in range(7):
            teller.may_say.release()
        chunks += [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "a mouse"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8
    assert (chunks[-2].model_extra or {})["offramp"] == {"exits": {"1": 4, "3": 4}}


async def test_it_reads_whole_answers_models_and_errors(teller: Teller) -> None:
    teller.may_say = None
    async with listening(teller) as port, client_of(port) as client:
        chat = await client.chat.completions.create(model="tales", messages=MESSAGES, logprobs=True, top_logprobs=1)
        text = await client.completions.create(model="tales", prompt="Once", max_tokens=50, logprobs=1)
        assert [chat.choices[0].message.content, text.choices[0].text] == ["a mouse"] * 2
        assert [model.id async for model in client.models.list()] == ["tales"]
        with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-4'"):
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="not served: 'n'"):
            await client.chat.completions.create(model="tales", messages=MESSAGES, n=2)
        teller.breaks_after = 2
        with pytest.raises(openai.APIError, match="the model failed"):
            async for _ in await client.chat.completions.create(model="tales", messages=MESSAGES, stream=True):
                pass


async def test_who_closes_its_stream_ends_the_sequence(teller: Teller) -> None:
    assert teller.may_say is not None
    async with listening(teller) as port, client_of(port) as client:
        teller.may_say.release()
        stream = await client.completions.create(model="tales", prompt="Once", stream=True)
        await anext(stream)
        await stream.close()
        async with asyncio.timeout(10):
            while not teller.aborted:  # noqa: ASYNC110 - a server and its caller take turns on one loop
                await asyncio.sleep(0)
    assert teller.computed == 1
