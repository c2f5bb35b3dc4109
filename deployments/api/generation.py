"""Generates sequences: when a step is answered, the token goes to the stream, and the next step is sent."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from starlette.requests import ClientDisconnect

from deployments.api.service import ABANDONED
from deployments.ingress.core.generation import GenerationLoop, GenerationState
from deployments.ingress.core.inputs import PendingInput
from deployments.ingress.dispatcher import Dispatcher
from deployments.settings import ServeSettings
from earlyexit.clock import Clock
from earlyexit.codecs.prompt import PromptCodec
from earlyexit.errors import DeadlineError, ExecutionError, InputError, OfframpError, OverloadedError
from earlyexit.network.boundary import Answer, PackedArray
from earlyexit.sequences.sequence import Sampling, StepResult, TextStream, TokenSequence
from earlyexit.tasks.token import TokenTask


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A request to generate a sequence."""

    prompt: tuple[int, ...]
    """The prompt's tokens."""
    max_tokens: int
    """Most tokens of the answer; it may end earlier at the model's maximum length."""
    stops: tuple[str, ...] = ()
    """Texts that end the answer, and are not part of it."""
    sampling: Sampling = field(default_factory=Sampling)
    ignores_ends: bool = False
    """Whether to continue after end-of-text tokens, for measurements."""
    timeout_s: float | None = None
    """Timeout of the whole sequence from its arrival; None: only the service's timeouts per token apply."""
    waits: bool = False
    """Whether to wait for pages, as the second and later answers to a request do: the first may have taken the last."""
    num_answers: int = 1
    """This answer and the later ones to its request. They start only if the ingress has room for all of them."""
    request_id: str = ""
    """For logs and traces."""


class CutShortError(DeadlineError):
    """A time limit ended a sequence after its first token; the caller keeps the text so far."""

    def __init__(self, message: str, *, text: str) -> None:
        """`text`: text that was held back, because a stop string might have followed."""
        super().__init__(message)
        self.text = text


class Stream:
    """An asynchronous iterator of `StepResult`, for one reader on one event loop. The last result has `ended` set.

    The sequence does not wait for the reader, so a slow reader holds no pages of a replica. Errors are raised after
    all earlier results were read. The first `anext` raises errors before the first token (no pages, no replica, no
    time), so a handler that answers with a status calls it first. Use `abort` to stop before the end.
    """

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        """Number of prompt tokens."""
        self.on_abort: Callable[[], None] | None = lambda: None
        """Called by the first `abort`; set by the service. None once the last token or an error was added."""
        self._queue: asyncio.Queue[StepResult | None] = asyncio.Queue()
        """Results that were not read yet, and at the end None."""
        self._errors: list[Exception] = []
        """What to raise at the end. It is removed then, because it would be in a cycle with its traceback."""

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepResult:
        result = await self._queue.get()
        if result is not None:
            return result
        self._queue.put_nowait(None)  # the end stays, for readers that continue
        raise self._errors.pop() if self._errors else StopAsyncIteration

    def abort(self) -> None:
        """Ends the sequence: its pages are freed, unread tokens are discarded, and a reader gets ClientDisconnect."""
        if self.on_abort is not None:
            self.on_abort()
        while not self._queue.empty():
            self._queue.get_nowait()
        self.on_abort, self._errors = None, [ClientDisconnect()]
        self._queue.put_nowait(None)

    # Called by the service

    def put(self, result: StepResult) -> None:
        if self.on_abort is not None:
            self._queue.put_nowait(result)
            if result.ended is not None:
                self.fail(StopAsyncIteration())

    def fail(self, error: Exception) -> None:
        if self.on_abort is not None:
            self.on_abort, self._errors = None, [error.with_traceback(None)]
            self._queue.put_nowait(None)


logger = logging.getLogger(f"ray.serve.{__name__}")


@dataclass(slots=True, kw_only=True, eq=False)
class _RunningSequence:
    """A sequence with its stream and its current step."""

    state: GenerationState[TokenSequence]
    stream: Stream
    request: GenerateRequest
    step_input: PendingInput | None = None


@dataclass(slots=True, eq=False)
class GenerateService:
    """Generates the sequences of one ingress. Callbacks send the next steps, so there is no task per sequence."""

    codec: PromptCodec
    task: TokenTask
    dispatcher: Dispatcher
    settings: ServeSettings
    clock: Clock
    _: KW_ONLY
    rng: random.Random = field(default_factory=random.SystemRandom)
    """Different in every ingress, because sequences of all ingresses need different numbers at the replicas."""
    loop: GenerationLoop = field(init=False)
    _waiting: dict[_RunningSequence, asyncio.TimerHandle] = field(default_factory=dict, init=False)
    """The sequences that wait for pages, with the timers of their next attempts."""

    def __post_init__(self) -> None:
        self.loop = GenerationLoop(self.dispatcher.core.options, self.dispatcher.core.placed.plan, self.rng)

    def start(self, request: GenerateRequest) -> Stream:
        """Starts a sequence.

        Raises InputError for invalid requests, ContextLengthError for prompts that are too long, AdmissionError if an
        SLO would be violated, OverloadedError and StageUnavailableError.
        """
        now_s, timeout_s, max_s = self.clock.now_s(), request.timeout_s, self.settings.max_timeout_s
        if timeout_s is not None and not 0 < timeout_s <= max_s:
            message = f"the timeout must be more than 0 s and at most {max_s:g} s (got {timeout_s:g} s)"
            raise InputError(message, param="timeout_s")
        sequence = TokenSequence(
            request.prompt,
            TextStream(self.codec.tokenizer, request.prompt if self.task.start is None else (), request.stops),
            max_tokens=request.max_tokens,
            max_length=self.codec.max_length,
            ends=() if request.ignores_ends else self.task.ends,
            sampling=request.sampling,
            chunk=self.settings.prompt_chunk,
            start=self.task.start,
        )
        self.dispatcher.core.check_admission(1, math.inf, now_s)
        self.loop.admit(sequence.num_prompt, now_s)
        state = self.loop.begin(sequence, now_s)
        running = _RunningSequence(state=state, stream=Stream(sequence.num_prompt), request=request)
        try:
            self.dispatcher.core.check_room(request.num_answers, now_s)
            self._step(running)
        except OfframpError as refusal:
            self.loop.end(state, refusal.kind)
            raise
        running.stream.on_abort = partial(self._abort, running)
        return running.stream

    def _limit(self, running: _RunningSequence) -> tuple[float, float, str]:
        """Returns the time of the next deadline, its limit in seconds, and the name of what is limited.

        The limit of a token starts again with each token. `slo_s` is the latency of a step, and so of a token.
        """
        state, settings = running.state, self.settings
        token_s = settings.token_timeout_s if state.num_tokens else settings.default_timeout_s
        token_s = min(token_s, settings.slo_s or math.inf)
        name = "the next token" if state.num_tokens else "the first token"
        whole_s = running.request.timeout_s or math.inf
        return min((state.last_s + token_s, token_s, name), (state.arrived_s + whole_s, whole_s, "the whole answer"))

    def _step(self, running: _RunningSequence) -> None:
        """Sends the next step; raises what `Dispatcher.submit` raises."""
        state = running.state
        state.placement.yields_token = state.sequence.yields_token
        [running.step_input] = self.dispatcher.submit(
            [("", state.sequence.step())],
            self._limit(running)[0],
            partial(self._on_outcome, running),
            request_id=running.request.request_id,
            placement=state.placement,
        )

    def _on_outcome(self, running: _RunningSequence, _: PendingInput, outcome: Answer | OfframpError) -> None:
        running.step_input = None
        if isinstance(outcome, OfframpError):
            self._on_step_error(running, outcome)
            return
        try:
            assert isinstance(outcome.value, PackedArray), "tokens and their log-probabilities"
            result = running.state.sequence.answered(outcome.value.numpy(), outcome.exit)
        except Exception as error:  # only this sequence fails; the others of the same reply continue
            logger.exception("an answer to %s is not a valid token", running.request.request_id)
            message = f"the model's answer is not a valid token: {type(error).__name__}: {error}"
            self._fail(running, ExecutionError(message))
            return
        if result is not None:
            self.loop.on_token(running.state, result.exit, self.clock.now_s())
            running.stream.put(result)
            if result.ended is not None:
                self._end(running, result.ended)
        # The next step is sent one turn of the event loop later. Readers then have their tokens first, and the next
        # steps of all sequences of one reply are sent together.
        asyncio.get_running_loop().call_soon(self._resume, running)

    def _resume(self, running: _RunningSequence) -> None:
        self._waiting.pop(running, None)
        if running.state.placement.has_ended:
            return
        try:
            self._step(running)
        except OfframpError as error:
            self._on_step_error(running, error)

    def _on_step_error(self, running: _RunningSequence, error: OfframpError) -> None:
        """Handles a step without an answer: if possible, the sequence continues on another replica."""
        error = self._limit_error(running) if isinstance(error, DeadlineError) else error
        try:
            pause_s = self.loop.retry(running.state, error, waits=running.request.waits)
        except OfframpError as final_error:
            self._fail(running, final_error)
            return
        logger.info("%s starts again after %d tokens: %s", running.request.request_id, running.state.num_tokens, error)
        left_s = max(0.0, self._limit(running)[0] - self.clock.now_s())
        timer = asyncio.get_running_loop().call_later(min(pause_s, left_s), partial(self._resume, running))
        if isinstance(error, OverloadedError):
            self._waiting[running] = timer

    def _end(self, running: _RunningSequence, reason: str) -> None:
        """Ends a sequence. The one that has waited longest for its pages tries again before any new one."""
        self.loop.end(running.state, reason)
        self._waiting.pop(running, None)
        if self._waiting and reason != OverloadedError.kind:
            oldest = min(self._waiting, key=lambda each: each.state.arrived_s)
            self._waiting.pop(oldest).cancel()
            oldest.state.attempts = 0  # a running batch may still hold the pages, so another attempt must follow soon
            asyncio.get_running_loop().call_soon(self._resume, oldest)

    def _fail(self, running: _RunningSequence, error: OfframpError) -> None:
        running.stream.fail(error)
        self._end(running, error.kind)

    def _abort(self, running: _RunningSequence) -> None:
        """Ends a sequence whose reader has aborted it."""
        if running.step_input is not None:
            self.dispatcher.give_up((running.step_input,), ABANDONED)
            running.step_input = None  # its callback has `running`
        self._end(running, ABANDONED)

    def _limit_error(self, running: _RunningSequence) -> DeadlineError:
        """Returns the error of a sequence that has exceeded a time limit."""
        state, (_, limit_s, what) = running.state, self._limit(running)
        took_s, limit = self.clock.now_s() - state.arrived_s, f"the limit of {limit_s:g} s for {what}"
        if state.num_tokens:
            tokens = f"{state.num_tokens} token{'s' if state.num_tokens > 1 else ''}"
            message = f"the answer was cut short after {tokens} and {took_s:.1f} s: the next one exceeds {limit}"
            return CutShortError(message, text=running.state.sequence.cut())
        return DeadlineError(f"no token came within {limit}")
