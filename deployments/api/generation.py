"""Generates sequences: sends the next step of each when the answer to its last step has come, and fills its stream."""

from __future__ import annotations

import asyncio
import logging
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import partial

from tokenizers import Tokenizer

from deployments.api.service import ABANDONED
from deployments.ingress.core.generation import GenerationLoop, GenerationOptions, GenerationState
from deployments.ingress.core.inputs import PendingInput
from deployments.ingress.dispatcher import Alarm, Dispatcher, call_later
from deployments.settings import ServeSettings
from earlyexit.clock import Clock
from earlyexit.errors import DeadlineError, ExecutionError, InputError, OfframpError, OverloadedError, SequenceLostError
from earlyexit.network.boundary import Answer, Encoded, PackedArray
from earlyexit.sequences.sequence import Sampling, StepResult, TextStream, TokenSequence
from earlyexit.tasks.token import TokenTask
from optimizer.placement import PlacedPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """A sequence to generate."""

    prompt: tuple[int, ...]
    """Tokens."""
    max_tokens: int
    """Most tokens of the answer; the model's length may end it earlier."""
    stops: tuple[str, ...] = ()
    """Texts that end it, and are not part of it."""
    sampling: Sampling = field(default_factory=Sampling)
    ignores_ends: bool = False
    """Whether it continues after tokens that end sequences, for measurements."""
    timeout_s: float | None = None
    """Limit on the whole sequence, from its arrival; None: only the service's limits on each token apply."""
    request_id: str = ""
    """For logs and traces."""


class CutShortError(DeadlineError):
    """A time limit ended a sequence after its first token; the caller keeps the text so far."""

    def __init__(self, message: str, *, text: str) -> None:
        """`text`: text that was held back, because it might have become a stop string."""
        super().__init__(message)
        self.text = text


class Stream:
    """An asynchronous iterator of `StepResult`. The last result says why it `ended`. For one event loop and one reader.

    It is never longer than the request's `max_tokens`: a slow reader holds no pages of any replica, since the
    sequence goes on without it. An error is raised once everything said before it was taken.
    Errors that come before the first token (no pages, no replica, no time) are raised by the first `anext`: a handler
    that answers with a status calls it first. To stop before the end, `abort` it.
    """

    def __init__(self, num_prompt: int) -> None:
        self.num_prompt = num_prompt
        """Tokens of the prompt."""
        self.when_aborted: Callable[[], None] = lambda: None
        """Called once; set by the service."""
        self.is_over = False
        """Whether no more tokens come."""
        self._news: asyncio.Queue[StepResult | Exception | None] = asyncio.Queue()
        """What was not read yet: tokens, then at the end the error, or None."""

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> StepResult:
        news = await self._news.get()
        if isinstance(news, StepResult):
            return news
        self._news.put_nowait(news)  # the end stays, for whatever reads on
        raise StopAsyncIteration if news is None else news

    def abort(self) -> None:
        """Ends the sequence: its pages are freed, and unread tokens are dropped."""
        if not self.is_over:
            self.is_over = True
            self.when_aborted()
        while not self._news.empty():
            self._news.get_nowait()
        self._news.put_nowait(None)

    # The service's side

    def put(self, said: StepResult) -> None:
        """Adds a token."""
        if self.is_over:
            return
        self._news.put_nowait(said)
        if said.ended is not None:
            self.is_over = True
            self._news.put_nowait(None)

    def fail(self, error: Exception) -> None:
        """Ends the stream by an error."""
        if not self.is_over:
            self.is_over = True
            self._news.put_nowait(error)


logger = logging.getLogger(f"ray.serve.{__name__}")


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    """A sequence, its stream, and its current step."""

    sequence: TokenSequence
    course: GenerationState[Encoded]
    stream: Stream
    timeout_s: float
    """Limit on the whole sequence; infinite if its caller named none."""
    request_id: str
    flight: PendingInput | None = None
    timer: Alarm | None = None


@dataclass(slots=True, eq=False)
class GenerateService:
    """Generates the sequences of one ingress. There is no task per sequence: steps are sent when answers come."""

    tokenizer: Tokenizer
    task: TokenTask
    max_length: int
    """Of the model, for prompt and answer together."""
    dispatcher: Dispatcher
    settings: ServeSettings
    clock: Clock
    _: KW_ONLY
    rng: random.Random = field(default_factory=random.SystemRandom)
    """Another one in every ingress: their sequences meet at replicas, and have different numbers."""
    trace: Callable[[Sequence[PendingInput]], None] | None = None
    """Called with the first step of each sequence, whose request is traced up to its first token or chunk."""
    loop: GenerationLoop = field(init=False)
    _due: list[_Running] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        rules = GenerationOptions(
            max_attempts=self.settings.max_attempts,
            ttft_slo_s=self.settings.ttft_slo_s,
            tpot_slo_s=self.settings.tpot_slo_s,
            num_ingresses=self.settings.ingress_replicas,
        )
        self.loop = GenerationLoop(rules, self.dispatcher.core.placed.plan, self.rng)

    def follow(self, placed: PlacedPlan) -> None:
        """Follows another plan."""
        self.loop.follow(placed.plan)

    def start(self, request: GenerateRequest) -> Stream:
        """Starts a sequence.

        Raises InputError for invalid requests, ContextLengthError for prompts that are too long, AdmissionError if an
        SLO would not be kept, OverloadedError and StageUnavailableError.
        """
        now_s, timeout_s, longest = self.clock.now_s(), request.timeout_s, self.settings.max_timeout_s
        if timeout_s is not None and not 0 < timeout_s <= longest:
            message = f"a timeout of {timeout_s:g} s; more than 0 and at most {longest:g} s are taken"
            raise InputError(message, param="timeout_s")
        sequence = TokenSequence(
            request.prompt,
            TextStream(self.tokenizer, request.prompt if self.task.start is None else (), request.stops),
            max_tokens=request.max_tokens,
            max_length=self.max_length,
            ends=() if request.ignores_ends else self.task.ends,
            sampling=request.sampling,
            chunk=self.settings.prompt_chunk,
            start=self.task.start,
        )
        self.dispatcher.check(1, math.inf)
        self.loop.admit(sequence.num_prompt, now_s)
        course = self.loop.begin(sequence, now_s)
        running = _Running(
            sequence=sequence,
            course=course,
            stream=Stream(sequence.num_prompt),
            timeout_s=math.inf if timeout_s is None else timeout_s,
            request_id=request.request_id,
        )
        try:
            self._step(running)
        except OfframpError as refusal:
            self.loop.end(course, refusal.kind)
            raise
        if self.trace is not None and running.flight is not None:
            self.trace([running.flight])
        running.stream.when_aborted = partial(self._abort, running)
        self._watch(running, -math.inf)
        return running.stream

    def _limit(self, running: _Running) -> tuple[float, float, str]:
        """Returns the time when the next token is too late, the limit in seconds, and what is limited.

        The limit on a token restarts with each token. `slo_s` is the latency of a step, hence of a token.
        """
        course, settings = running.course, self.settings
        token_s = settings.token_timeout_s if course.num_tokens else settings.default_timeout_s
        token_s = min(token_s, settings.slo_s or math.inf)
        awaited = "the next token" if course.num_tokens else "the first token"
        of_token = course.waiting_since_s + token_s, token_s, awaited
        return min(of_token, (course.arrived_s + running.timeout_s, running.timeout_s, "the whole answer"))

    def _step(self, running: _Running) -> None:
        """Sends the next step; raises what `Dispatcher.step` raises."""
        course = running.course
        running.flight = self.dispatcher.step(
            course.step(),
            course.placement,
            self._limit(running)[0],
            partial(self._settle, running),
            arrived_s=self.clock.now_s(),
            request_id=running.request_id,
        )

    def _settle(self, running: _Running, flight: PendingInput, outcome: Answer | OfframpError) -> None:
        if flight is not running.flight:
            return
        running.flight = None
        if isinstance(outcome, OfframpError):
            self._failed(running, outcome)
            return
        try:
            assert isinstance(outcome.value, PackedArray), "tokens and their log-probabilities"
            said = running.sequence.answered(outcome.value.numpy(), outcome.exit)
        except Exception as error:  # the error is this sequence's; others of the same reply go on
            logger.exception("an answer to %s makes no token", running.request_id)
            self._fail(running, ExecutionError(f"the answer makes no token: {type(error).__name__}: {error}"))
            return
        if said is not None:
            self.loop.on_token(running.course, said.exit, self.clock.now_s())
            running.stream.put(said)
            if said.ended is not None:
                self._end(running, said.ended)
                return
            if running.course.num_tokens == 1 and running.timer is not None:  # the limit between tokens may be shorter
                running.timer.cancel()
                self._watch(running, -math.inf)
        self._send_soon(running)

    def _send_soon(self, running: _Running) -> None:
        # One loop turn later, when readers have their tokens: a token is sent before the next one is asked
        # for. So all steps that came of one part of a reply are sent together, too.
        self._due.append(running)
        if len(self._due) == 1:
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        due, self._due = self._due, []
        for running in due:
            self._resume(running)

    def _resume(self, running: _Running) -> None:
        if running.course.has_ended:
            return
        try:
            self._step(running)
        except OfframpError as error:
            self._failed(running, error)

    def _failed(self, running: _Running, error: OfframpError) -> None:
        """Handles a step without an answer: the sequence continues on another replica if it can."""
        course, placement = running.course, running.course.placement
        is_lost, is_full = isinstance(error, SequenceLostError), isinstance(error, OverloadedError)
        if is_full and self.loop.try_another_replica(course):
            self.dispatcher.end(placement)
            self._send_soon(running)
            return
        if isinstance(error, DeadlineError):
            self._cut(running)
            return
        if not is_lost and not (placement.is_retry and is_full):
            self._fail(running, error)
            return
        self.dispatcher.end(placement)
        logger.info("a sequence of %s begins anew after %d tokens: %s", running.request_id, course.num_tokens, error)
        try:
            pause_s = self.loop.restart(course)
        except OfframpError as too_often:
            self._fail(running, too_often)
            return
        if pause_s:
            call_later(pause_s, partial(self._resume, running))
        else:
            self._send_soon(running)

    def _fail(self, running: _Running, error: OfframpError) -> None:
        running.stream.fail(error)
        self._end(running, error.kind)

    def _abort(self, running: _Running) -> None:
        """Ends a sequence whose reader has left."""
        if running.flight is not None:
            self.dispatcher.give_up((running.flight,), ABANDONED)
        self._end(running, ABANDONED)

    def _watch(self, running: _Running, reached_s: float) -> None:
        """Sets the timer to the limit; if it was set to the present limit, that is reached."""
        limit_s = self._limit(running)[0]
        if limit_s > reached_s:
            left_s = max(0.0, limit_s - self.clock.now_s())
            running.timer = call_later(left_s, partial(self._watch, running, limit_s))
            return
        flight, running.flight = running.flight, None
        if flight is not None:
            self.dispatcher.expire(flight)
        if not running.course.has_ended:
            self._cut(running)

    def _cut(self, running: _Running) -> None:
        """Ends a sequence by a time limit."""
        course, (_, limit_s, what) = running.course, self._limit(running)
        took_s, limit = self.clock.now_s() - course.arrived_s, f"the limit of {limit_s:g} s for {what}"
        if course.num_tokens:
            told = f"{course.num_tokens} token{'s' if course.num_tokens > 1 else ''}"
            why = f"the answer was cut short after {told} and {took_s:.1f} s: the next one exceeds {limit}"
            self._fail(running, CutShortError(why, text=running.sequence.cut()))
        else:
            self._fail(running, DeadlineError(f"no token came within {took_s:.1f} s: the first one exceeds {limit}"))

    def _end(self, running: _Running, reason: str) -> None:
        """Frees all that a sequence holds; if a call still has its step, the timer ends that step."""
        self.loop.end(running.course, reason)
        self.dispatcher.end(running.course.placement)
        flight = running.flight
        if running.timer is not None and (flight is None or flight.holder is None):
            running.timer.cancel()
