"""The `openai` package streams from a real decoder, over our HTTP server and replicas that are real but for Ray."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path

import openai

from deployments.api.generation import GenerateRequest, Stream
from earlyexit.sequences.text import TextStream
from tests.deployments.ingress.completions.generating import Teller, listening
from tests.deployments.ingress.generation.test_generate_with_decoders import MAX_TOKENS, Service, all_of, plan
from tests.earlyexit.codecs.prompts import prompt_codec
from tests.earlyexit.families.decoders import byte_tokenizer

PROMPTS = ((72, 101, 121), (5, 60, 7, 80, 9), (33,))


@dataclass
class Decoding(Teller):
    """Says what the service's decoder does."""

    service: Service = field(kw_only=True)

    async def generate(self, request: GenerateRequest) -> Stream:
        return self.service.service.start(request)


async def test_it_streams_what_the_decoder_says_and_a_stream_that_is_left_holds_no_pages(tmp_path: Path) -> None:
    service = Service(plan())
    await service.start()
    try:
        wanted = await asyncio.gather(*(all_of(service.begin(prompt)) for prompt in PROMPTS))
        decoding = Decoding(codec=prompt_codec(tmp_path), service=service)
        async with (
            listening(decoding) as port,
            openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0) as client,
        ):

            async def ask(prompt: tuple[int, ...]) -> tuple[str, list[int]]:
                text, exits = "", []
                async for chunk in await client.completions.create(
                    model="tales",
                    prompt=list(prompt),
                    max_tokens=MAX_TOKENS,
                    temperature=0,
                    stream=True,
                    extra_body={"exits": True},
                ):
                    text += chunk.choices[0].text
                    exits += (chunk.model_extra or {}).get("offramp", {}).get("token_exits", [])
                return text, exits

            said = await asyncio.gather(*map(ask, PROMPTS))
            assert [exits for _, exits in said] == [[exit_block for _, exit_block in each] for each in wanted]
            for prompt, (text, _), each in zip(PROMPTS, said, wanted, strict=True):
                stream = TextStream(byte_tokenizer(), prompt)
                assert text == "".join([*(stream.push(token) for token, _ in each), stream.finish()])
            left = await client.completions.create(
                model="tales", prompt=list(PROMPTS[0]), max_tokens=100, temperature=0, stream=True
            )
            await anext(left)
            await left.close()
            await service.all_free()
    finally:
        await service.stop()
