"""Requests to a model that generates: OpenAI's bodies, and those of Triton's generate extension."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from deployments.api.generation import GenerateRequest
from deployments.api.parsing import TimeoutSeconds
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, InputError
from earlyexit.sequences.sequence import LARGEST_SEED, Sampling

MOST_STOPS = 16
MOST_TOP_LOGPROBS = 20
"""OpenAI's bound for messages."""
MOST_LOGPROBS = 5
"""OpenAI's bound for texts."""
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
"""Parameters that are not supported, with the values that are accepted because they ask for nothing."""

StopText = Annotated[str, Field(min_length=1)]
Stop = StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)]
Tokens = Annotated[int, Field(ge=1)]


def _describe(schema: dict[str, Any], body: type[Any]) -> None:
    """Puts a body's example and its real defaults, which stand for None, into its JSON schema."""
    for name, described in schema["properties"].items():
        described.pop("default", None)
        if name in body.defaults:
            described["default"] = body.defaults[name]
    if body.example is not None:
        schema["examples"] = [body.example]


class _Described(BaseModel):
    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_describe)

    defaults: ClassVar[Mapping[str, Any]] = {}
    """What a request gets that leaves a field out, or sends null; other fields are then off, or random."""
    example: ClassVar[Mapping[str, Any] | None] = None

    def value(self, name: str) -> Any:
        """Returns a field, or its default if it is None."""
        given = getattr(self, name)
        return self.defaults.get(name) if given is None else given


class _ExtensibleBody(BaseModel):
    """A body that may have further fields, which are checked by hand."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)

    def check_served(self) -> None:
        """Raises InputError, which names them, for parameters that are not supported."""
        extra = self.model_extra or {}
        asked = ((name, value) for name, value in extra.items() if value is not None and name not in IGNORED)
        not_served = [name for name, value in asked if value not in NEUTRAL.get(name, ())]
        if not_served:
            served = ", ".join(type(self).model_fields)
            names = sorted(not_served)
            raise InputError(f"not served: {', '.join(map(repr, names))}; served are {served}", param=names[0])


class StreamOptions(_Described):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=False)
    defaults = {"include_usage": False}

    include_usage: bool | None = None
    """One more chunk before the end, which has no choices, and says how many tokens there were."""
    include_obfuscation: bool | None = None
    """Of no consequence."""


class DrawnBody(_Described, _ExtensibleBody):
    """How tokens are drawn, and when an answer is over; None stands for the default, wherever it may be said."""

    defaults = {"top_p": 1.0, "ignore_eos": False, "exits": False}

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

    @property
    def most_tokens(self) -> int | None:
        """The limit that the request names; None for the default."""
        return self.max_tokens


class _OpenAiBody(DrawnBody):
    source: ClassVar[str]
    """The field that the prompt comes from."""
    model: str
    """The model's name, also with a version: `name:2`."""
    stream: bool | None = None
    """Answer as server-sent events, one for each part."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""

    @property
    @abstractmethod
    def num_likeliest(self) -> int | None:
        """Alternatives to report for each token; None if no log-probabilities are reported."""

    @property
    def echoed(self) -> str:
        """The text that is put before the answer."""
        return ""

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @abstractmethod
    def prompt_tokens(self, codec: PromptCodec, vocab_size: int) -> Sequence[int]:
        """Returns the tokens of the prompt; raises InputError for a request that contradicts itself."""

    def request(self, codec: PromptCodec, vocab_size: int, request_id: str) -> GenerateRequest:
        """Returns the sequence to generate; raises InputError."""
        self.check_served()
        asked = request_of(self, self.prompt_tokens(codec, vocab_size), codec, self.source, request_id)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream", param="stream_options")
        return asked


class CompletionBody(_OpenAiBody):
    """`POST /v1/completions`."""

    source = "prompt"
    defaults = {**DrawnBody.defaults, "temperature": 1.0, "max_tokens": 16, "stream": False, "echo": False}
    """OpenAI's."""
    example = {"model": "smollm2", "prompt": "The sky is blue because", "max_tokens": 20}

    prompt: str | list[int] | list[str] | list[list[int]]
    """A text, in which nothing is read as a special token, or a list of tokens; or a list of one of them."""
    logprobs: Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None = None
    """Report each token's log-probability, and those of this many of the likeliest tokens."""
    echo: bool | None = None
    """Put the prompt before the answer."""

    @property
    def num_likeliest(self) -> int | None:
        return self.logprobs

    @property
    def echoed(self) -> str:
        prompt = self._one_prompt()
        return prompt if self.echo and isinstance(prompt, str) else ""

    def prompt_tokens(self, codec: PromptCodec, vocab_size: int) -> Sequence[int]:
        prompt = self._one_prompt()
        tokens = text_tokens(prompt, codec) if isinstance(prompt, str) else _checked(prompt, vocab_size)
        if self.echo and not isinstance(prompt, str):
            raise InputError("echo: only of prompts that are texts", param="echo")
        if self.echo and self.logprobs is not None:
            message = "logprobs with echo is not served: no probabilities of a prompt are computed"
            raise InputError(message, param="logprobs")
        return tokens

    def _one_prompt(self) -> str | list[int]:
        """Returns the only prompt; raises InputError for several."""
        if isinstance(self.prompt, str):
            return self.prompt
        tokens = [each for each in self.prompt if isinstance(each, int)]
        others = [each for each in self.prompt if not isinstance(each, int)]
        if len(others) > 1:
            raise InputError(f"prompt: {len(others)} prompts in one request; one is taken", param="prompt")
        return others[0] if others else tokens


class TextPart(BaseModel):
    """A part of a message."""

    model_config = ConfigDict(extra="forbid", strict=True)

    type: str
    text: str | None = None


class ChatMessage(_ExtensibleBody):
    """A message; what else it may have must be null or empty."""

    role: Annotated[str, Field(min_length=1)]
    """`system`, `user` or `assistant`, as the model's chat template knows them."""
    content: str | list[TextPart]
    """A text, or parts that are texts."""
    name: str | None = None
    """The speaker's name, where the chat template uses it."""

    def as_text(self) -> dict[str, str]:
        """Returns the message for a chat template; raises InputError for tool calls and parts that are not texts."""
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

    source = "messages"
    defaults = {
        **DrawnBody.defaults,
        **{"temperature": 1.0, "max_tokens": 256, "stream": False, "logprobs": False, "top_logprobs": 0},
    }
    """OpenAI's `max_tokens` is all that the model's length leaves; here keys and values are reserved beforehand."""
    example = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "stream": True,
    }

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    """The conversation so far."""
    max_completion_tokens: Tokens | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Report each token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """With `logprobs`, report those of this many of the likeliest tokens, too."""

    @property
    def most_tokens(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def num_likeliest(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    def prompt_tokens(self, codec: PromptCodec, vocab_size: int) -> Sequence[int]:
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs: only with logprobs", param="top_logprobs")
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens and max_completion_tokens are one parameter, and say different things"
            raise InputError(message, param="max_completion_tokens")
        return codec.chat([message.as_text() for message in self.messages])


class GenerateParameters(DrawnBody):
    """Of Triton's generate extension, and what we add to them."""

    defaults = {**DrawnBody.defaults, "temperature": 0.0, "max_tokens": 16}


class GenerateBody(DrawnBody):
    """`POST /v2/models/{model}/generate`, and `/generate_stream`; parameters may stand beside the text, too."""

    defaults = GenerateParameters.defaults
    example = {"text_input": "The sky is blue because", "parameters": {"max_tokens": 20}}

    text_input: str
    """The prompt."""
    id: str | None = None
    """The request's id, which the answer repeats."""
    parameters: GenerateParameters = Field(default_factory=GenerateParameters)
    """The parameters of the answer; they may also stand beside `text_input`."""

    def drawn(self) -> GenerateParameters:
        """Returns all parameters; raises InputError for those that are not supported, or given twice."""
        self.check_served()
        self.parameters.check_served()
        names = set(DrawnBody.model_fields)
        beside, inside = self.model_fields_set & names, self.parameters.model_fields_set & names
        if both := beside & inside:
            raise InputError(f"{', '.join(sorted(both))}: said twice, in `parameters` and beside them", param=min(both))
        return self.parameters.model_copy(update={name: getattr(self, name) for name in beside})

    def request(self, codec: PromptCodec, request_id: str) -> GenerateRequest:
        """Returns the sequence to generate; raises InputError."""
        return request_of(self.drawn(), text_tokens(self.text_input, codec), codec, "text_input", request_id)


def request_of(
    body: DrawnBody, tokens: Sequence[int], codec: PromptCodec, source: str, request_id: str
) -> GenerateRequest:
    """Returns the sequence to generate after some tokens, which came from the field `source`; raises InputError."""
    if not tokens:
        raise InputError("the prompt is empty; a token at least is needed", param=source)
    max_tokens = body.most_tokens or min(body.defaults["max_tokens"], codec.max_length - 1)
    if max_tokens >= codec.max_length:
        raise ContextLengthError(
            f"max_tokens is {max_tokens}; this model takes {codec.max_length} tokens with the prompt",
            param="max_tokens",
        )
    return GenerateRequest(
        prompt=tuple(tokens),
        max_tokens=max_tokens,
        stops=(body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ()),
        sampling=Sampling(
            temperature=body.value("temperature"),
            top_p=body.value("top_p"),
            top_k=body.top_k,
            seed=random.getrandbits(63) if body.seed is None else body.seed & LARGEST_SEED,
        ),
        ignores_ends=bool(body.ignore_eos),
        timeout_s=body.timeout_s,
        request_id=request_id,
    )


def text_tokens(text: str, codec: PromptCodec) -> tuple[int, ...]:
    """Returns the tokens of a text; none for an empty text, whatever the tokenizer puts before texts."""
    return codec.tokens(text) if text else ()


def _checked(tokens: Sequence[int], vocab_size: int) -> tuple[int, ...]:
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise InputError(f"prompt: token {wrong}; this model has tokens 0 to {vocab_size - 1}", param="prompt")
    return tuple(tokens)
