"""Requests to a model that generates: OpenAI's bodies, and those of Triton's generate extension."""

from __future__ import annotations

import random
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.api.generation import GenerateRequest
from deployments.api.operations import NULL_IS_EMPTY, FastList, TimeoutSeconds
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import ContextLengthError, InputError
from earlyexit.sequences.sequence import LARGEST_SEED, MAX_TOP, Sampling

MAX_STOPS = 16
MAX_ID = 128
"""Most characters of an id, because every event of a stream has it."""
MAX_ANSWERS = 256
"""Most answers to a request. Each is a sequence of its own, which holds memory of a replica."""
MAX_TEXT_LOGPROBS = 5
"""OpenAI's limit for text completions."""
NEUTRAL_VALUES: dict[str, tuple[Any, ...] | None] = {
    "user": None, "metadata": None, "store": None, "service_tier": None, "safety_identifier": None,
    "prompt_cache_key": None, "prompt_cache_retention": None, "parallel_tool_calls": None,
    "stream": None,  # of Triton's generate extension, where the path says whether the answer is a stream
    "n": (1,), "best_of": (1,), "presence_penalty": (0,), "frequency_penalty": (0,), "logit_bias": ({},),
    "suffix": ("",), "tools": ([],), "tool_choice": ("none", "auto"), "functions": ([],),
    "function_call": ("none", "auto"), "response_format": ({"type": "text"},), "modalities": (["text"],),
    "repetition_penalty": (1,), "min_tokens": (0,), "logprobs": (False,), "top_logprobs": (0,), "echo": (False,),
    "bad_words": ("", []), "stop_words": ("", []), "exclude_input_in_output": (True,), "min_p": (0,),
    "length_penalty": (1,), "use_beam_search": (False,), "early_stopping": (False,), "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,), "skip_special_tokens": (True,), "add_generation_prompt": (True,),
    "spaces_between_special_tokens": (True, False), "continue_final_message": (False,), "priority": (0,),
}  # fmt: skip
"""Parameters that are not supported, with the values that are accepted because they have no effect. None: any value."""

StopText = Annotated[str, Field(min_length=1)]
Stop = StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS)]
Tokens = Annotated[int, Field(ge=1)]


def _complete_schema(schema: dict[str, Any], body: type[Any]) -> None:
    """Adds a body's example to its JSON schema, and the defaults that None stands for."""
    for name, field in schema["properties"].items():
        field.pop("default", None)
        if name in body.defaults:
            field["default"] = body.defaults[name]
    if body.example is not None:
        schema["examples"] = [body.example]


class _Described(BaseModel):
    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, json_schema_extra=_complete_schema)

    defaults: ClassVar[Mapping[str, Any]] = {}
    """Values of fields that a request omits or sets to null. Other fields are then off, or random."""
    example: ClassVar[Mapping[str, Any] | None] = None


class StreamOptions(_Described):
    """Options of a stream."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=False)
    defaults = {"include_usage": False, "continuous_usage_stats": False}

    include_usage: bool | None = None
    """Send one more chunk before the end, without choices, which has the numbers of tokens."""
    continuous_usage_stats: bool | None = None
    """With `include_usage`, all chunks have the numbers of tokens so far, as in vLLM."""
    include_obfuscation: bool | None = None
    """Ignored."""


class SamplingBody(_Described):
    """How tokens are sampled, and when an answer ends. None stands for the default of every field."""

    model_config = ConfigDict(extra="allow")  # `check_supported` checks further fields
    defaults = {"top_p": 1.0, "ignore_eos": False, "exits": False}

    temperature: float | None = None
    """The sampling temperature; 0 always takes the most probable token."""
    top_p: float | None = None
    """Sample from the most probable tokens whose probabilities add up to this value."""
    top_k: int | None = None
    """Sample from this many of the most probable tokens. Default, 0 and -1: all tokens that the model reports."""
    seed: int | None = None
    """The same seed samples the same tokens. Default: a random seed."""
    stop: Stop | None = None
    """A text, or up to 16 texts, each of which ends the answer and is not part of it."""
    max_tokens: Tokens | None = None
    """The most tokens of the answer."""
    ignore_eos: bool | None = None
    """Continue after end-of-text tokens, for measurements."""
    timeout_s: TimeoutSeconds | None = None
    """Timeout of the whole answer, in seconds. Default: none; the service limits the time of each token."""
    exits: bool | None = None
    """Report the block after which each token left the model."""

    def value(self, name: str) -> Any:
        """Returns a field, or its default if it is None."""
        value = getattr(self, name)
        return self.defaults.get(name) if value is None else value

    def check_supported(self) -> None:
        """Raises InputError for parameters that are not supported."""
        unsupported = sorted(
            name
            for name, value in (self.model_extra or {}).items()
            if value is not None and (values := NEUTRAL_VALUES.get(name, ())) is not None and value not in values
        )
        if unsupported:
            names, known = ", ".join(map(repr, unsupported)), ", ".join(type(self).model_fields)
            raise InputError(f"not supported: {names}; supported are {known}", param=unsupported[0])


class _PromptBody(SamplingBody):
    """The body of a request for sequences, one for each answer."""

    source: ClassVar[str]
    """The field that holds the prompt."""

    @property
    def sampling(self) -> SamplingBody:
        """The sampling parameters of the request; raises InputError."""
        return self

    @abstractmethod
    def prompt_tokens(self, codec: PromptCodec, vocab_size: int) -> Sequence[Sequence[int]]:
        """Returns the prompt of each answer; raises InputError for a request that contradicts itself."""

    def requests(self, codec: PromptCodec, vocab_size: int, request_id: str) -> list[GenerateRequest]:
        """Returns the sequences to generate; raises InputError."""
        self.check_supported()
        prompts, sampling = self.prompt_tokens(codec, vocab_size), self.sampling
        max_tokens = sampling.max_tokens or min(self.defaults["max_tokens"], codec.max_length - 1)
        if max_tokens >= codec.max_length:
            limit = f"this model's maximum context length is {codec.max_length} tokens, with the prompt"
            raise ContextLengthError(f"max_tokens is {max_tokens}; {limit}", param="max_tokens")
        return [
            GenerateRequest(
                prompt=tuple(tokens),
                max_tokens=max_tokens,
                stops=(sampling.stop,) if isinstance(sampling.stop, str) else tuple(sampling.stop or ()),
                sampling=Sampling(
                    temperature=sampling.value("temperature"),
                    top_p=sampling.value("top_p"),
                    top_k=None if sampling.top_k in (0, -1) else sampling.top_k,  # as in vLLM
                    seed=random.getrandbits(63) if sampling.seed is None else (sampling.seed + index) & LARGEST_SEED,
                ),
                ignores_ends=bool(sampling.ignore_eos),
                timeout_s=sampling.timeout_s,
                waits=index > 0,
                num_answers=len(prompts) - index,
                request_id=request_id,
            )
            for index, tokens in enumerate(prompts)
        ]


class OpenAiBody(_PromptBody):
    """The body of a request in OpenAI's format."""

    defaults = {**SamplingBody.defaults, "temperature": 1.0, "stream": False, "n": 1}
    model: str
    """The model's name, optionally with a version: `name:2`."""
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] | None = None
    """The number of answers to each prompt. A seed is that of the first answer; each later one has the next number."""
    stream: bool | None = None
    """Answer as server-sent events, one for each part of the text."""
    stream_options: StreamOptions | None = None
    """Options of a stream."""

    def requests(self, codec: PromptCodec, vocab_size: int, request_id: str) -> list[GenerateRequest]:
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options: only with stream", param="stream_options")
        return super().requests(codec, vocab_size, request_id)


class CompletionBody(OpenAiBody):
    """`POST /v1/completions`."""

    source = "prompt"
    defaults = {**OpenAiBody.defaults, "max_tokens": 16, "echo": False}
    """OpenAI's defaults."""
    example = {"model": "smollm2", "prompt": "The sky is blue because", "max_tokens": 20}

    prompt: str | FastList[int] | FastList[str] | FastList[FastList[int]]
    """A text or a list of tokens, or a list of up to 256 of them. Special tokens in a text are not parsed."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TEXT_LOGPROBS)] | None = None
    """Report the log-probabilities of each token, and of this many of the most probable tokens."""
    echo: bool | None = None
    """Put the prompt before the answer."""

    @property
    def prompts(self) -> Sequence[str | list[int]]:
        """The prompts, each of which gets `n` answers; raises InputError for too many."""
        given, n = [self.prompt] if isinstance(self.prompt, str) else self.prompt, self.value("n")
        tokens = [each for each in given if isinstance(each, int)]
        prompts = [each for each in given if not isinstance(each, int)] or [tokens]
        if len(prompts) * n > MAX_ANSWERS:
            raise InputError(f"prompt: {len(prompts)} times {n} answers; at most {MAX_ANSWERS}", param="prompt")
        return prompts

    def prompt_tokens(self, codec: PromptCodec, vocab_size: int) -> Sequence[Sequence[int]]:
        prompts = self.prompts
        tokens = (token for prompt in prompts if not isinstance(prompt, str) for token in prompt)
        unknown = next((token for token in tokens if not 0 <= token < vocab_size), None)
        if unknown is not None:
            raise InputError(f"prompt: token {unknown}; this model has tokens 0 to {vocab_size - 1}", param="prompt")
        if self.echo and not all(isinstance(prompt, str) for prompt in prompts):
            raise InputError("echo: only for prompts that are texts", param="echo")
        if self.echo and self.logprobs is not None:
            message = "logprobs: not supported with echo, because no probabilities of the prompt are computed"
            raise InputError(message, param="logprobs")
        each_once = [codec.tokens(prompt) if isinstance(prompt, str) else tuple(prompt) for prompt in prompts]
        return [each for each in each_once for _ in range(self.value("n"))]


class TextPart(BaseModel):
    """A part of a message, which must be a text without further fields; `ChatMessage.as_text` refuses others."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: str
    text: str | None = None


class ChatMessage(BaseModel):
    """A message of a chat; further fields must be null or empty."""

    model_config = ConfigDict(extra="allow", strict=True, use_attribute_docstrings=True)

    role: Annotated[str, Field(min_length=1)]
    """`system`, `user` or `assistant`, as in the model's chat template."""
    content: str | FastList[TextPart] | None
    """A text, or parts that are texts; null is an empty text."""
    name: str | None = None
    """The speaker's name, if the chat template uses it."""
    type: Literal["text"] | None = None
    """Has no effect. The LM Evaluation Harness sends it."""

    def as_text(self) -> dict[str, str]:
        """Returns the message for a chat template; raises InputError for tool calls and parts that are not texts."""
        if unsupported := [name for name, value in (self.model_extra or {}).items() if value not in (None, [], {}, "")]:
            names = ", ".join(map(repr, unsupported))
            raise InputError(f"messages: {names} of a message is not supported; only texts are", param="messages")
        parts = self.content if isinstance(self.content, list) else [TextPart(type="text", text=self.content or "")]
        if others := [part for part in parts if part.type != "text" or part.text is None or part.model_extra]:
            what = " with ".join(map(repr, (others[0].type, *(others[0].model_extra or {}))))
            raise InputError(f"messages: a part of type {what} is not supported; only texts are", param="messages")
        named = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": "".join(part.text or "" for part in parts), **named}


class ChatBody(OpenAiBody):
    """`POST /v1/chat/completions`."""

    source = "messages"
    defaults = {**OpenAiBody.defaults, "max_tokens": 256, "logprobs": False, "top_logprobs": 0}
    """OpenAI's `max_tokens` is the rest of the model's length; ours is lower, as memory is reserved in advance."""
    example = {"model": "smollm2", "messages": [{"role": "user", "content": "Why is the sky blue?"}], "stream": True}

    messages: Annotated[FastList[ChatMessage], Field(min_length=1)]
    """The conversation so far."""
    max_completion_tokens: Tokens | None = None
    """The newer name of `max_tokens`."""
    logprobs: bool | None = None
    """Report each token's log-probability."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP)] | None = None
    """With `logprobs`, also report the log-probabilities of this many of the most probable tokens."""

    @property
    def sampling(self) -> SamplingBody:
        """The sampling parameters; raises InputError if `max_tokens` and its newer name have different values."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            message = "max_tokens and max_completion_tokens are the same parameter, but have different values"
            raise InputError(message, param="max_completion_tokens")
        return self.model_copy(update={"max_tokens": self.max_completion_tokens or self.max_tokens})

    def prompt_tokens(self, codec: PromptCodec, vocab_size: int) -> Sequence[Sequence[int]]:
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs: only with logprobs", param="top_logprobs")
        return [codec.chat([message.as_text() for message in self.messages])] * self.value("n")


class GenerateParameters(SamplingBody):
    """The parameters of Triton's generate extension, and ours."""

    defaults = {**SamplingBody.defaults, "temperature": 0.0, "max_tokens": 16}


class GenerateBody(_PromptBody):
    """`POST /v2/models/{model}/generate`, and `/generate_stream`."""

    source = "text_input"
    defaults = GenerateParameters.defaults
    example = {"text_input": "The sky is blue because", "parameters": {"max_tokens": 20}}

    text_input: str
    """The prompt."""
    id: Annotated[str, Field(max_length=MAX_ID)] | None = None
    """The request's id, which the answer returns."""
    parameters: Annotated[GenerateParameters, NULL_IS_EMPTY] = Field(default_factory=GenerateParameters)
    """The parameters of the answer. They may also be next to `text_input`."""

    @property
    def sampling(self) -> SamplingBody:
        """All parameters; raises InputError for parameters that are not supported or occur twice."""
        self.parameters.check_supported()
        outer = self.model_fields_set & SamplingBody.model_fields.keys()
        if twice := sorted(outer & self.parameters.model_fields_set):
            raise InputError(f"{', '.join(twice)}: set both inside and outside `parameters`", param=twice[0])
        return self.parameters.model_copy(update={name: getattr(self, name) for name in outer})

    def prompt_tokens(self, codec: PromptCodec, vocab_size: int) -> Sequence[Sequence[int]]:
        return [codec.tokens(self.text_input)]
