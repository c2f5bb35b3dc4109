"""What is asked of a model that generates, in OpenAI's words and in those of Triton's generate extension."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from deployments.api.bodies import TimeoutSeconds
from deployments.api.generation import GenerateRequest
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, InputError
from earlyexit.sequences.sequence import LARGEST_SEED, Sampling

MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
MOST_LOGPROBS = 5
"""OpenAI's bounds, of messages and of texts."""
IGNORED = frozenset(
    {
        *("user", "metadata", "store", "service_tier", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention", "parallel_tool_calls"),
    }
)
"""Parameters that change no answer."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **{"n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},)},
    **{"suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],)},
    **{"function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],)},
    **{"repetition_penalty": (1,), "min_tokens": (0,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,)},
}
"""Parameters that are not served, with what may be said of them nevertheless, since it asks for nothing."""

StopText = Annotated[str, Field(min_length=1)]
Stop = StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Tokens = Annotated[int, Field(ge=1)]


class _Asked(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)

    def check_served(self) -> None:
        """Raise InputError that names the parameters which are not served."""
        extra = self.model_extra or {}
        not_served = [name for name, value in extra.items() if value is not None and not _is_nothing(name, value)]
        if not_served:
            served = ", ".join(type(self).model_fields)
            names = sorted(not_served)
            raise InputError(f"not served: {', '.join(map(repr, names))}; served are {served}", param=names[0])


def _is_nothing(name: str, value: object) -> bool:
    return name in IGNORED or value in NEUTRAL.get(name, ())


class StreamOptions(BaseModel):
    """Of a stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    include_usage: bool | None = None
    """One more chunk before the end, which has no choices, and says how many tokens there were."""
    include_obfuscation: bool | None = None
    """Of no consequence."""


class DrawnBody(_Asked):
    """How tokens are drawn, and when an answer is over; None stands for the default, wherever it may be said."""

    temperature: float | None = None
    """The temperature of sampling; 0 always takes the likeliest token."""
    top_p: float | None = None
    """Sample from the likeliest tokens whose probabilities reach this sum."""
    top_k: int | None = None
    """Sample from this many of the likeliest tokens. Default: all that the model reports."""
    seed: int | None = None
    """The same seed draws the same tokens. Default: a random seed."""
    stop: Stop | None = None
    """A text, or up to 16 texts, that end the answer and are not part of it."""
    max_tokens: Tokens | None = None
    """The most tokens of the answer."""
    ignore_eos: bool | None = None
    """Go on after tokens that end answers, for measurements."""
    timeout_s: TimeoutSeconds | None = None
    """A limit on the whole answer, in seconds. Default: none; the service limits each token."""
    exits: bool | None = None
    """Report the block after which each token left."""


class _OpenAiBody(DrawnBody):
    model: str
    """The model's name, also with a version: `name:2`."""
    stream: bool | None = None
    """Answer as server-sent events, one for each part."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""


class CompletionBody(_OpenAiBody):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    """A text, in which nothing is read as a special token, or a list of tokens; or a list of one of them."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Report each token's log-probability, and those of this many of the likeliest tokens."""
    echo: bool | None = None
    """Put the prompt before the answer."""


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    text: str | None = None


class ChatMessage(_Asked):
    """A message; what else it may have must be null or empty."""

    role: Annotated[str, Field(min_length=1)]
    """`system`, `user` or `assistant`, as the model's chat template knows them."""
    content: str | list[TextPart]
    """A text, or parts that are texts."""
    name: str | None = None
    """The speaker's name, where the chat template uses it."""

    def as_text(self) -> dict[str, str]:
        """As a chat template takes it; raises InputError for parts that are no text, and for calls of tools."""
        asked = [name for name, value in (self.model_extra or {}).items() if value not in (None, [], {}, "")]
        if asked:
            raise InputError(
                f"messages: {', '.join(map(repr, asked))} of a message is not served; texts are", param="messages"
            )
        parts = [TextPart(type="text", text=self.content)] if isinstance(self.content, str) else self.content
        others = [part.type for part in parts if part.type != "text" or part.text is None]
        if others:
            raise InputError(f"messages: a part of type {others[0]!r} is not served; texts are", param="messages")
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": "".join(part.text or "" for part in parts), **named}


class ChatBody(_OpenAiBody):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The conversation so far."""
    max_completion_tokens: Tokens | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Report each token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """With `logprobs`, report those of this many of the likeliest tokens, too."""


class GenerateParameters(DrawnBody):
    """Of Triton's generate extension, and what we add to them."""


class GenerateBody(DrawnBody):
    """`POST /v2/models/{model}/generate`, and `/generate_stream`; parameters may stand beside the text, too."""

    text_input: str
    """The prompt."""
    id: str | None = None
    """The request's id, which the answer repeats."""
    parameters: GenerateParameters = Field(default_factory=GenerateParameters)
    """The parameters of the answer; they may also stand beside `text_input`."""

    def drawn(self) -> DrawnBody:
        """All parameters, wherever they stood; raises InputError for those that are not served, or said twice."""
        self.check_served()
        self.parameters.check_served()
        names = set(DrawnBody.model_fields)
        beside, inside = self.model_fields_set & names, self.parameters.model_fields_set & names
        if both := beside & inside:
            raise InputError(f"{', '.join(sorted(both))}: said twice, in `parameters` and beside them", param=min(both))
        said = {name: getattr(self, name) for name in beside}
        return self.parameters.model_copy(update=said)


class OpenAiErrorDetail(BaseModel):
    """What went wrong, as OpenAI says it."""

    message: str
    type: str
    param: str | None
    code: str | None


class OpenAiError(BaseModel):
    """Every error in /v1."""

    error: OpenAiErrorDetail


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
    source: str
    """The field that the prompt came from."""
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
        source=_source(body),
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
        raise InputError("top_logprobs: only with logprobs", param="top_logprobs")
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        message = "max_tokens and max_completion_tokens are one parameter, and say different things"
        raise InputError(message, param="max_completion_tokens")
    max_tokens = body.max_completion_tokens or body.max_tokens
    tokens = codec.chat([message.as_text() for message in body.messages])
    return Asked(
        request=_request(body, tokens, codec, (max_tokens, CHAT_TOKENS), OPENAI_TEMPERATURE, request_id=request_id),
        source=_source(body),
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
    return Asked(request=request, source=_source(body), streams=streams, exits=bool(drawn.exits))


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
        raise InputError("the prompt is empty; a token at least is needed", param=_source(body))
    max_tokens = lengths[0] or min(lengths[1], codec.max_length - 1)
    if max_tokens >= codec.max_length:
        raise ContextLengthError(
            f"max_tokens is {max_tokens}; this model takes {codec.max_length} tokens with the prompt",
            param="max_tokens",
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


def _source(body: DrawnBody) -> str:
    """Returns the field that the prompt came from."""
    return "messages" if isinstance(body, ChatBody) else "prompt" if isinstance(body, CompletionBody) else "text_input"


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
        raise InputError(f"prompt: {len(others)} prompts in one request; one is taken", param="prompt")
    return others[0] if others else tokens


def _checked(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(f"prompt: token {wrong}; this model has tokens 0 to {vocab_size - 1}", param="prompt")
    return tuple(tokens)


def _check_echo(body: CompletionBody, prompt: str | list[int]) -> None:
    if body.echo and not isinstance(prompt, str):
        raise InputError("echo: only of prompts that are texts", param="echo")
    if body.echo and body.logprobs is not None:
        raise InputError(
            "logprobs with echo is not served: no probabilities of a prompt are computed", param="logprobs"
        )


def _usage(body: CompletionBody | ChatBody) -> bool:
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options: only with stream", param="stream_options")
    return body.stream_options is not None and bool(body.stream_options.include_usage)
