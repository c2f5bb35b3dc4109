"""The load generator: sends predictions to a server at a rate, or from so many workers, and reports what came back.

One process, one event loop. In an open loop (`rate_rps` or `send_times_s`) every request has its send time before the
first is sent, and is sent then whether or not earlier ones were answered; its latency counts from that time. In a
closed loop (`concurrency`) workers send back to back, and latency counts from the sending.

Timers of event loops know milliseconds. A generator that sends up to a millisecond late adds that to every latency, and
sends in bursts what should be Poisson. So on Linux the loop sleeps until a timer of the kernel makes a file readable
(timerfd_create(2)).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np

from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import InputError, OfframpError
from offramp.client.client import AsyncClient
from offramp.client.inputs import Input, TensorBody, tensor_body, travel_as_json
from offramp.client.protocol import (
    NoReply,
    Outcome,
    Prediction,
    error_kind,
    predict_body,
    read_predictions,
    retry_wait_s,
)
from offramp.load.connections import Body, Post, connected
from offramp.load.processes import Poisson, Uniform
from offramp.load.report import LoadReport, RequestRecord, summarise

Sleep = Callable[[float], Awaitable[object]]

CLOCK_MONOTONIC = 1
NONBLOCK_CLOEXEC = 0o2004000
"""Constants of Linux's time.h and sys/timerfd.h."""


@contextmanager
def exact_sleep() -> Iterator[Sleep]:
    """The most exact sleep, in seconds, that this system has; for one sleeper at a time, in the running loop."""
    if sys.platform != "linux":
        yield asyncio.sleep
        return
    loop, libc, rung = asyncio.get_running_loop(), ctypes.CDLL(None, use_errno=True), asyncio.Event()
    # struct itimerspec: the interval's seconds and nanoseconds, 0 for once, then those of the time.
    times = (ctypes.c_long * 4)()
    timer: int = libc.timerfd_create(CLOCK_MONOTONIC, NONBLOCK_CLOEXEC)
    if timer < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")

    async def sleep(seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        times[2], times[3] = divmod(int(seconds * 1e9) + 1, 10**9)  # a time of 0 would disarm it
        rung.clear()
        if libc.timerfd_settime(timer, 0, times, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await rung.wait()

    def ring() -> None:
        with suppress(BlockingIOError):  # set anew in the turn in which it rang: it rings again
            os.read(timer, 8)  # else the file stays readable
            rung.set()

    loop.add_reader(timer, ring)
    try:
        yield sleep
    finally:
        loop.remove_reader(timer)
        os.close(timer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """One load run; exactly one of `rate_rps`, `send_times_s` and `concurrency` is set."""

    url: str
    inputs: Sequence[Input]
    """Of one kind, sent in turn, from the first again after the last."""
    labels: Sequence[str] | None = None
    """The right label per input; None where it is not known."""
    keys: Sequence[str] | None = None
    """An id per input, sent along as `ids`; None sends none."""
    num_requests: int
    rate_rps: float | None = None
    """Requests per second, open loop."""
    arrivals: Literal["poisson", "constant"] = "poisson"
    """At `rate_rps`."""
    send_times_s: Sequence[float] | None = None
    """Open loop too: when each request is sent, ascending from the start; `Arrivals.draw` gives such."""
    concurrency: int | None = None
    """Workers, closed loop."""
    inputs_per_request: int = 1
    truncate: bool = False
    """Whether texts may be cut to what the model takes."""
    timeout_s: float = 30.0
    """For a whole request, from when it was scheduled, repetitions included."""
    slo_s: float
    seed: int = 0
    retries: int = 0
    """Repetitions of a request that met a broken connection, a 502 or a 503."""

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.rate_rps, self.send_times_s, self.concurrency)) != 1:
            raise InputError("set one of rate_rps and send_times_s (open loop) and concurrency (closed loop)")
        if self.send_times_s is not None and not (
            len(self.send_times_s) == self.num_requests and self.send_times_s[-1] > 0
        ):
            raise InputError(f"{self.num_requests} send times are needed, one a request, the last above 0")
        if not self.inputs:
            raise InputError("inputs is empty: there is nothing to send")
        for name, values in (("labels", self.labels), ("keys", self.keys)):
            if values is not None and len(values) != len(self.inputs):
                raise InputError(f"{name} has {len(values)} entries for {len(self.inputs)} inputs")

    @property
    def offered_rps(self) -> float | None:
        """Inputs per second of an open loop; with send times, up to the last of them."""
        if self.send_times_s is not None:
            return self.num_requests * self.inputs_per_request / self.send_times_s[-1]
        return None if self.rate_rps is None else self.rate_rps * self.inputs_per_request

    def input_indices(self, request_index: int) -> tuple[int, ...]:
        """Which inputs the request carries."""
        first = request_index * self.inputs_per_request
        return tuple(index % len(self.inputs) for index in range(first, first + self.inputs_per_request))


OnRecord = Callable[[RequestRecord], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Sends requests through `post`; holds what a phase needs and changes nothing but `rng`."""

    config: LoadConfig
    post: Post
    rng: random.Random
    """For the jitter of retries."""
    clock: Clock
    sleep: Sleep = asyncio.sleep
    """Between the attempts of one request; many sleep at once."""
    pace: Sleep = asyncio.sleep
    """Between the requests of an open loop: `exact_sleep` gives a finer one."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The model's, which images and arrays are sent by."""

    async def open_loop(self, send_times_s: Sequence[float], done: OnRecord) -> None:
        """Send at the given seconds from now, never waiting for an answer; returns when all have their outcome."""
        start_s = self.clock.now_s()
        async with asyncio.TaskGroup() as group:
            for request_index, send_time_s in enumerate(send_times_s):
                await self.pace(max(0.0, start_s + send_time_s - self.clock.now_s()))
                group.create_task(self._report(request_index, start_s, send_time_s, done))

    async def closed_loop(self, request_indices: Iterator[int], done: OnRecord, *, pause_s: float = 0.0) -> None:
        """Send back to back from `concurrency` workers, each pausing after a failure, until the indices end.

        Returns when all have their outcome.
        """
        assert self.config.concurrency is not None
        start_s = self.clock.now_s()
        async with asyncio.TaskGroup() as group:
            for _ in range(self.config.concurrency):
                group.create_task(self._work(request_indices, start_s, done, pause_s))

    async def request(self, request_index: int, start_s: float, scheduled_s: float) -> RequestRecord:
        """See one request through: its attempts, under one id, until an answer or a failure that stays."""
        sent_s = self.clock.now_s() - start_s
        input_indices = self.config.input_indices(request_index)
        request_id = f"{random.getrandbits(128):032x}"
        outcome, num_attempts = await self._attempts(request_id, input_indices, start_s + scheduled_s)
        done_s = self.clock.now_s() - start_s
        predictions, error = _read(outcome, len(input_indices), request_id)
        return RequestRecord(
            request_id=request_id,
            input_indices=input_indices,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            done_s=done_s,
            num_attempts=num_attempts,
            predictions=predictions,
            error=error,
        )

    async def _attempts(
        self, request_id: str, input_indices: Sequence[int], scheduled_at_s: float
    ) -> tuple[Outcome, int]:
        body = _body(self.config, self.metadata, input_indices)
        until_s = scheduled_at_s + self.config.timeout_s
        num_attempts = 0
        while True:
            num_attempts += 1
            left_s = until_s - self.clock.now_s()
            if left_s > 0:
                timed = body if isinstance(body, TensorBody) else body | {"timeout_s": left_s}
                outcome = await self.post(request_id, timed, left_s)
            else:
                outcome = NoReply(kind="timeout", message="the client was too late to send it")
            wait_s = retry_wait_s(
                outcome,
                attempt=num_attempts,
                max_attempts=self.config.retries + 1,
                left_s=until_s - self.clock.now_s(),
                jitter=self.rng.random(),
            )
            if wait_s is None:
                return outcome, num_attempts
            await self.sleep(wait_s)

    async def _report(self, request_index: int, start_s: float, scheduled_s: float, done: OnRecord) -> None:
        done(await self.request(request_index, start_s, scheduled_s))

    async def _work(self, request_indices: Iterator[int], start_s: float, done: OnRecord, pause_s: float) -> None:
        for request_index in request_indices:
            record = await self.request(request_index, start_s, self.clock.now_s() - start_s)
            done(record)
            if record.error is not None and pause_s:
                await self.sleep(pause_s)


def _body(config: LoadConfig, metadata: Mapping[str, Any], input_indices: Sequence[int]) -> Body:
    rows = [config.inputs[index] for index in input_indices]
    ids = None if config.keys is None else [config.keys[index] for index in input_indices]
    if travel_as_json(rows):
        return predict_body(rows[0] if config.inputs_per_request == 1 else rows, truncate=config.truncate, ids=ids)
    return tensor_body(rows, metadata, {} if ids is None else {"ids": ids})


def _read(outcome: Outcome, num_inputs: int, request_id: str) -> tuple[tuple[Prediction, ...], str | None]:
    if isinstance(outcome, NoReply):
        return (), outcome.kind
    if (kind := error_kind(outcome)) is not None:
        return (), kind
    try:
        predictions = read_predictions(outcome.payload, num_inputs=num_inputs, request_id=request_id)
        return tuple(map(_light, predictions)), None
    except OfframpError:  # counted, like every other failure of a single request
        return (), "malformed"


def _light(found: Prediction) -> Prediction:
    """Without arrays, which no report looks at: the class maps of a run would fill the memory."""
    said = {name: value for name, value in found.said.items() if not isinstance(value, np.ndarray)}
    return found if len(said) == len(found.said) else Prediction(exit=found.exit, request_id=found.request_id, **said)


async def run_load(
    config: LoadConfig, on_progress: Callable[[int, int], object] | None = None, *, api_key: str | None = None
) -> LoadReport:
    """Measure and report. Requests that fail are counted in the report, not raised.

    `on_progress` is called after each request, with the number of requests done and the number of all.
    """
    records: list[RequestRecord] = []
    metadata: dict[str, Any] = {}

    def note(record: RequestRecord) -> None:
        records.append(record)
        if on_progress is not None:
            on_progress(len(records), config.num_requests)

    if not travel_as_json(config.inputs[:1]):
        async with AsyncClient(config.url, config.timeout_s, api_key=api_key) as client:
            metadata = await client.metadata()
    async with connected(config.url, api_key=api_key) as post:
        rng, clock = random.Random(config.seed), MonotonicClock()
        generator = Generator(config=config, post=post, rng=rng, clock=clock, metadata=metadata)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        times_s = send_times_s(config, config.num_requests)
        if times_s is None:
            await generator.closed_loop(iter(range(config.num_requests)), note)
        else:
            with exact_sleep() as pace:
                await replace(generator, pace=pace).open_loop(times_s, note)
    return summarise(
        records,
        started_at=started_at,
        seed=config.seed,
        slo_s=config.slo_s,
        offered_rps=config.offered_rps,
        labels=config.labels,
    )


def send_times_s(config: LoadConfig, num_requests: int) -> Sequence[float] | None:
    """When an open loop sends its first so many requests; None for a closed loop."""
    if config.send_times_s is not None:
        return config.send_times_s[:num_requests]
    if config.rate_rps is None:
        return None
    process = (Uniform if config.arrivals == "constant" else Poisson)(rate_per_s=config.rate_rps)
    return [float(time_s) for time_s in process.first(num_requests, np.random.default_rng(config.seed))]
