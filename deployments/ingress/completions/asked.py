"""From the bodies of requests to what is generated; pure, but for seeds that nobody named."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.ingress.api.completion_bodies import ChatBody, CompletionBody, DrawnBody, GenerateBody
from deployments.ingress.generation.request import GenerateRequest
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, InputError
from earlyexit.generation.sampling import LARGEST_SEED, Sampling

COMPLETION_TOKENS = 16
"""OpenAI's default of `/v1/completions`."""
CHAT_TOKENS = 256
"""Ours of messages, where OpenAI's is all that a model's length leaves: keys and values are reserved beforehand."""
OPENAI_TEMPERATURE, V2_TEMPERATURE = 1.0, 0.0
"""Where a request says none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is generated, and how its caller wants it told."""

    request: GenerateRequest
    streams: bool = False
    include_usage: bool = False
    num_likeliest: int | None = None
    """Tokens to name at every place beside the one that was chosen; None where no probabilities are asked for."""
    exits: bool = False
    """Whether of every token is told where it left."""
    echo: str = ""
    """What is said before the answer."""


def asked_completion(body: CompletionBody, codec: PromptCodec, vocab_size: int, request_id: str) -> Asked:
    """Raises InputError."""
    body.check_served()
    prompt = _one_prompt(body.prompt)
    tokens = _tokens(prompt, codec) if isinstance(prompt, str) else _checked(prompt, vocab_size)
    _check_echo(body, prompt)
    return Asked(
        request=_request(
            body, tokens, codec, (body.max_tokens, COMPLETION_TOKENS), OPENAI_TEMPERATURE, request_id=request_id
        ),
        streams=bool(body.stream),
        include_usage=_usage(body),
        num_likeliest=body.logprobs,
        exits=bool(body.exits),
        echo=prompt if body.echo and isinstance(prompt, str) else "",
    )


def asked_chat(body: ChatBody, codec: PromptCodec, request_id: str) -> Asked:
    """Raises InputError."""
    body.check_served()
    if body.top_logprobs and not body.logprobs:
        raise InputError("top_logprobs: only with logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise InputError("max_tokens and max_completion_tokens are one parameter, and say different things")
    max_tokens = body.max_completion_tokens or body.max_tokens
    tokens = codec.chat([message.as_text() for message in body.messages])
    return Asked(
        request=_request(body, tokens, codec, (max_tokens, CHAT_TOKENS), OPENAI_TEMPERATURE, request_id=request_id),
        streams=bool(body.stream),
        include_usage=_usage(body),
        num_likeliest=(body.top_logprobs or 0) if body.logprobs else None,
        exits=bool(body.exits),
    )


def asked_generate(body: GenerateBody, codec: PromptCodec, request_id: str, *, streams: bool) -> Asked:
    """Raises InputError."""
    drawn = body.drawn()
    tokens = _tokens(body.text_input, codec)
    lengths = drawn.max_tokens, COMPLETION_TOKENS
    request = _request(drawn, tokens, codec, lengths, V2_TEMPERATURE, request_id=request_id)
    return Asked(request=request, streams=streams, exits=bool(drawn.exits))


def _request(
    body: DrawnBody,
    tokens: Sequence[int],
    codec: PromptCodec,
    lengths: tuple[int | None, int],
    temperature: float,
    *,
    request_id: str,
) -> GenerateRequest:
    """`lengths`: the most tokens that were asked for, and the default, which is cut where the model is shorter."""
    if not tokens:
        raise InputError("the prompt is empty; a token at least is needed")
    max_tokens = lengths[0] or min(lengths[1], codec.max_length - 1)
    if max_tokens >= codec.max_length:
        raise ContextLengthError(
            f"max_tokens is {max_tokens}; this model takes {codec.max_length} tokens with the prompt"
        )
    stops = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return GenerateRequest(
        prompt=tuple(tokens),
        max_tokens=max_tokens,
        stops=stops,
        sampling=Sampling(
            temperature=temperature if body.temperature is None else body.temperature,
            top_p=1.0 if body.top_p is None else body.top_p,
            top_k=body.top_k,
            seed=random.getrandbits(63) if body.seed is None else body.seed & LARGEST_SEED,
        ),
        ignores_ends=bool(body.ignore_eos),
        timeout_s=body.timeout_s,
        request_id=request_id,
    )


def _tokens(text: str, codec: PromptCodec) -> tuple[int, ...]:
    """Of an empty text none, whatever the tokenizer puts before texts."""
    return codec.tokens(text) if text else ()


def _one_prompt(prompt: str | list[int] | list[str] | list[list[int]]) -> str | list[int]:
    """The only one; raises InputError for several."""
    if isinstance(prompt, str):
        return prompt
    tokens = [each for each in prompt if isinstance(each, int)]
    others = [each for each in prompt if not isinstance(each, int)]
    if len(others) > 1:
        raise InputError(f"prompt: {len(others)} prompts in one request; one is taken")
    return others[0] if others else tokens


def _checked(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(f"prompt: token {wrong}; this model has tokens 0 to {vocab_size - 1}")
    return tuple(tokens)


def _check_echo(body: CompletionBody, prompt: str | list[int]) -> None:
    if body.echo and not isinstance(prompt, str):
        raise InputError("echo: only of prompts that are texts")
    if body.echo and body.logprobs is not None:
        raise InputError("logprobs with echo is not served: no probabilities of a prompt are computed")


def _usage(body: CompletionBody | ChatBody) -> bool:
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options: only with stream")
    return body.stream_options is not None and bool(body.stream_options.include_usage)
