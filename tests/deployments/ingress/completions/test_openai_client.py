"""The `openai` package asks our server, in this process."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from tests.deployments.ingress.completions.generating import Teller, listening
from tests.earlyexit.codecs.prompts import prompt_codec

MESSAGES: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": "Tell"}]


async def test_it_reads_whole_answers_streams_models_and_errors(tmp_path: Path) -> None:
    teller = Teller(codec=prompt_codec(tmp_path))
    async with (
        listening(teller) as port,
        openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client,
    ):
        chat = await client.chat.completions.create(model="tales", messages=MESSAGES, logprobs=True, top_logprobs=1)
        text = await client.completions.create(model="tales", prompt="Once", max_tokens=50, logprobs=1)
        assert [chat.choices[0].message.content, text.choices[0].text] == ["a mouse"] * 2
        stream = await client.completions.create(model="tales", prompt="Once", max_tokens=50, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == "a mouse"
        assert [model.id async for model in client.models.list()] == ["tales"]
        with pytest.raises(openai.NotFoundError, match="unknown model 'gpt-4'"):
            await client.chat.completions.create(model="gpt-4", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="not served: 'n'"):
            await client.chat.completions.create(model="tales", messages=MESSAGES, n=2)
        teller.breaks_after = 2
        with pytest.raises(openai.APIError, match="the model failed"):
            async for _ in await client.chat.completions.create(model="tales", messages=MESSAGES, stream=True):
                pass
