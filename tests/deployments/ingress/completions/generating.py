"""A fake ingress whose model generates a given text, one token per permit of the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

from deployments.api.access import Gate
from deployments.api.generation import CutShortError, GenerateRequest, Stream
from deployments.api.http import build_api
from deployments.api.operations import Signature
from deployments.api.server import HttpServer
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ExecutionError
from earlyexit.network.store import ModelCard
from earlyexit.sequences.sequence import TextStream, TokenSequence
from earlyexit.tasks.token import TokenTask
from tests.clock import ManualClock
from tests.deployments.ingress.api.faces import FakeBackend
from tests.deployments.ingress.server.places import running
from tests.earlyexit.codecs.prompts import END
from tests.model_cards import a_card

VOCABULARY = 259
OTHER = 48
"""The second most probable token of every answer, which is never sampled."""
CUT_SHORT = "the answer was cut short after 4 tokens and 30.0 s"
NOW_S = 1_800_000_000.0
TEXT = {"model": "tales", "prompt": "Once", "max_tokens": 50}
CHAT = {"model": "tales", "messages": [{"role": "user", "content": "Tell"}], "max_tokens": 50}
ASKED = {"text_input": "Once", "max_tokens": 50}
V2 = "/v2/models/tales/generate"


def tales(**changes: Any) -> ModelCard:
    task = {"name": "token", "vocab_size": VOCABULARY, "ends": [END]}
    return a_card(name="tales", codec={"name": "prompt", "max_length": 128}, task=task, num_blocks=4, **changes)


@dataclass
class Teller(FakeBackend):
    """Generates `answer` and an end, byte by byte. Even positions leave after block 1, odd ones after block 3."""

    codec: PromptCodec = field(kw_only=True)
    card: ModelCard = field(default_factory=tales)
    answer: bytes = b"a mouse"
    goes_on: bool = False
    """Whether it never generates the end."""
    breaks_after: int | None = None
    """Number of tokens after which the model fails."""
    cut_after: int | None = None
    """Number of tokens after which a time limit ends it."""
    may_say: asyncio.Semaphore | None = None
    """One permit per token."""
    asked: list[GenerateRequest] = field(default_factory=list)
    computed: int = 0
    aborted: list[str] = field(default_factory=list)
    streams: list[Stream] = field(default_factory=list)

    @property
    def signature(self) -> Signature:
        return Signature(self.codec, TokenTask(VOCABULARY, (END,)))

    async def generate(self, request: GenerateRequest) -> Stream:
        self._fail()
        self.asked.append(request)
        sequence = TokenSequence(
            request.prompt,
            TextStream(self.codec.tokenizer, request.prompt, request.stops),
            max_tokens=request.max_tokens,
            max_length=128,
            ends=() if request.ignores_ends else (END,),
            sampling=request.sampling,
            chunk=128,
        )
        stream = Stream(len(request.prompt))
        self.streams.append(stream)
        task = asyncio.get_running_loop().create_task(self._say(sequence, stream))

        def aborted() -> None:
            self.aborted.append(request.request_id)
            task.cancel()

        stream.on_abort = aborted
        return stream

    async def _say(self, sequence: TokenSequence, stream: Stream) -> None:
        sequence.begin(1)
        tokens = spelt(self.codec, self.answer)
        for place in range(10_000):
            if self.may_say is not None:
                await self.may_say.acquire()
            if place == self.breaks_after:
                stream.fail(ExecutionError("the model failed on this input: ValueError"))
                return
            if place == self.cut_after:
                stream.fail(CutShortError(CUT_SHORT, text=sequence.cut()))
                return
            token = tokens[place % len(tokens)] if self.goes_on or place < len(tokens) else END
            self.computed += 1
            answer_2k = np.array([[token, OTHER], [-0.25, -40.0]], dtype=np.float32)
            sequence.step()
            said = sequence.answered(answer_2k, 1 if place % 2 == 0 else 3)
            assert said is not None
            stream.put(said)
            if said.ended is not None:
                return


def spelt(codec: PromptCodec, text: bytes) -> list[int]:
    """Returns a codec with a token for every byte, including parts of characters."""
    byte_of = {char: byte for byte, char in bytes_to_unicode().items()}
    token_of = {byte_of[codec.tokenizer.id_to_token(token)]: token for token in range(256)}
    return [token_of[byte] for byte in text]


def client_of(teller: Teller, gate: Gate | None = None, **options: Any) -> httpx.AsyncClient:
    """Returns an HTTP client of the whole application, in this process."""
    app = build_api(teller, gate=gate, wall=ManualClock(NOW_S), **options)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@asynccontextmanager
async def listening(teller: Teller, gate: Gate | None = None, *, fast: bool = True) -> AsyncIterator[int]:
    """Starts our HTTP server, and yields its port; `fast`: without Serve's application."""
    api = build_api(teller, gate=gate, wall=ManualClock(NOW_S))
    server = HttpServer(api, serve_app=None if fast else api)
    async with running(server) as (port, _):
        yield port


def events(body: str) -> list[Any]:
    """Returns the JSON of every event, or its text if it is not JSON."""
    lines = [line.removeprefix("data: ") for line in body.split("\n\n") if line]
    return [json.loads(line) if line.startswith("{") else line for line in lines]


def text_of(chunks: list[Any]) -> str:
    """Returns the whole text of the chunks of any route."""
    choices = [choice for chunk in chunks if isinstance(chunk, dict) for choice in chunk.get("choices", [])]
    spoken = [choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices]
    return "".join([*spoken, *(each["text_output"] for each in chunks if "text_output" in each)])
