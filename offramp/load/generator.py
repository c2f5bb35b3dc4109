"""The load generator: sends prediction requests to a server in one event loop, and records their outcomes.

In an open loop (`send_times_s`), the send times are fixed in advance and do not depend on answers. Latency counts from
the scheduled send time. In a closed loop (`concurrency`), each worker sends its next request when the last one is
answered, and latency counts from the actual send time.

Event loops have timers of one millisecond, which would delay requests and group them into bursts. The loop therefore
waits for a kernel timer of Linux (timerfd_create(2)).
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import OfframpError
from offramp.client.client import AsyncClient
from offramp.client.protocol import (
    Failure,
    Input,
    Outcome,
    Prediction,
    are_texts,
    predict_request,
    read_predictions,
    send_with_retries,
)
from offramp.load.connections import Post, connected

Sleep = Callable[[float], Awaitable[object]]


@contextmanager
def exact_sleep() -> Iterator[Sleep]:
    """Yields a sleep function that is more precise than asyncio's, for one sleeping task at a time."""
    loop, libc, expired = asyncio.get_running_loop(), ctypes.CDLL(None, use_errno=True), asyncio.Event()
    # struct itimerspec: seconds and nanoseconds of the interval (0: not periodic), and of the first expiration.
    times = (ctypes.c_long * 4)()
    timer: int = libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK | os.O_CLOEXEC)
    if timer < 0:
        raise OSError(ctypes.get_errno(), "timerfd_create")

    async def sleep(seconds: float) -> None:
        if seconds <= 0:
            await asyncio.sleep(0)
            return
        times[2], times[3] = divmod(int(seconds * 1e9) + 1, 10**9)  # 0 would disarm the timer
        expired.clear()
        if libc.timerfd_settime(timer, 0, times, None):
            raise OSError(ctypes.get_errno(), "timerfd_settime")
        await expired.wait()

    def on_expiration() -> None:
        with suppress(BlockingIOError):  # the timer was set again after it had expired
            os.read(timer, 8)  # otherwise the file stays readable
            expired.set()

    loop.add_reader(timer, on_expiration)
    try:
        yield sleep
    finally:
        loop.remove_reader(timer)
        os.close(timer)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """The options of a load run: of an open loop if `send_times_s` is set, else of a closed loop."""

    url: str
    inputs: Sequence[Input]
    """Inputs of one kind, which are sent in order and repeated."""
    keys: Sequence[str] | None = None
    """An id of each input, which is sent as `ids`; None sends none."""
    send_times_s: Sequence[float] | None = None
    """The send time of each request of an open loop, in seconds from the start, ascending."""
    concurrency: int = 8
    """Number of workers of a closed loop."""
    num_requests: int = 0
    """Number of requests of a closed loop."""
    inputs_per_request: int = 1
    truncate: bool = False
    """Whether the server truncates texts that are longer than the model allows."""
    timeout_s: float = 30.0
    """Timeout of a request from its scheduled send time, retries included."""
    seed: int = 0
    """Seed of the jitter of retries."""
    retries: int = 0
    """Maximum number of retries after a broken connection, a 502 or a 503."""

    def input_indices(self, request_index: int) -> tuple[int, ...]:
        """Returns the indices of a request's inputs."""
        first = request_index * self.inputs_per_request
        return tuple(index % len(self.inputs) for index in range(first, first + self.inputs_per_request))


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord:
    """The outcome of one request. Times are seconds after the start of the run."""

    input_indices: tuple[int, ...]
    """The positions of its inputs in the run's `inputs`."""
    scheduled_s: float
    sent_s: float
    done_s: float
    num_attempts: int
    predictions: tuple[Prediction, ...] = ()
    error: str | None = None
    """The kind of error, if the request failed."""
    message: str | None = None
    """The server's or the client's description of the error, if there is one."""

    def __post_init__(self) -> None:
        assert (self.error is None) == bool(self.predictions), "a request has either an answer or an error"

    @property
    def latency_s(self) -> float:
        """Seconds from the scheduled send time to the outcome, so that a late client is not hidden."""
        return self.done_s - self.scheduled_s

    @property
    def lateness_s(self) -> float:
        """Seconds by which the client itself was late."""
        return self.sent_s - self.scheduled_s


OnRecord = Callable[[RequestRecord], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generator:
    """Sends requests through `post`."""

    config: LoadConfig
    post: Post
    rng: random.Random
    """Source of the jitter of retries."""
    clock: Clock = field(default_factory=MonotonicClock)
    sleep: Sleep = asyncio.sleep
    """Waits between the attempts of a request; many requests can wait at once."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The model's metadata, which gives the format of images and arrays."""

    async def open_loop(self, send_times_s: Sequence[float], done: OnRecord, pace: Sleep) -> None:
        """Sends requests at the given times from now, in seconds; returns when all have their outcome.

        `pace`: waits between the requests (`exact_sleep`).
        """
        start_s = self.clock.now_s()

        async def send(request_index: int, send_time_s: float) -> None:
            done(await self.request(request_index, start_s, send_time_s))

        async with asyncio.TaskGroup() as group:
            for request_index, send_time_s in enumerate(send_times_s):
                await pace(max(0.0, start_s + send_time_s - self.clock.now_s()))
                group.create_task(send(request_index, send_time_s))

    async def closed_loop(self, request_indices: Iterator[int], done: OnRecord, *, pause_s: float = 0.0) -> None:
        """Sends requests from `concurrency` workers until the indices end; returns when all have their outcome.

        A worker waits `pause_s` seconds after a failed request.
        """
        start_s = self.clock.now_s()

        async def work() -> None:
            for request_index in request_indices:
                record = await self.request(request_index, start_s, self.clock.now_s() - start_s)
                done(record)
                if record.error is not None and pause_s:
                    await self.sleep(pause_s)

        async with asyncio.TaskGroup() as group:
            for _ in range(self.config.concurrency):
                group.create_task(work())

    async def request(self, request_index: int, start_s: float, scheduled_s: float) -> RequestRecord:
        """Sends one request, with retries under the same id, and returns its record."""
        config, sent_s = self.config, self.clock.now_s() - start_s
        input_indices = config.input_indices(request_index)
        request = predict_request(
            [config.inputs[index] for index in input_indices],
            self.metadata,
            many=config.inputs_per_request > 1,
            truncate=config.truncate,
            ids=None if config.keys is None else [config.keys[index] for index in input_indices],
        )
        outcome, num_attempts = await send_with_retries(
            partial(self.post, request),
            start_s + scheduled_s + config.timeout_s - self.clock.now_s(),
            config.retries + 1,
            clock=self.clock,
            rng=self.rng,
            sleep=self.sleep,
        )
        return RequestRecord(
            input_indices=input_indices,
            scheduled_s=scheduled_s,
            sent_s=sent_s,
            done_s=self.clock.now_s() - start_s,
            num_attempts=num_attempts,
            **_read(outcome, len(input_indices), request.request_id, config.url),
        )


def _read(outcome: Outcome, num_inputs: int, request_id: str, url: str) -> dict[str, Any]:
    """Returns the predictions, or the kind and the message of the error, as fields of a record."""
    if isinstance(outcome, Failure):
        return {"error": outcome.kind, "message": str(outcome.error)}
    try:
        predictions = read_predictions(outcome, num_inputs=num_inputs, request_id=request_id, address=url)
    except OfframpError as error:  # counted, like every other failure of a single request
        return {"error": "malformed", "message": str(error)}
    for each in predictions:
        for name in [name for name, value in vars(each).items() if isinstance(value, np.ndarray)]:
            delattr(each, name)  # the class maps of a whole run would fill the memory
    return {"predictions": tuple(predictions)}


async def run_load(
    config: LoadConfig, on_progress: Callable[[int, int], object] | None = None, *, api_key: str | None = None
) -> tuple[RequestRecord, ...]:
    """Runs a load and returns its requests in the order of the schedule. Failed requests raise no error.

    `on_progress` is called after each request, with the number of finished requests and of all requests. Raises
    InputError for inputs that the model does not take.
    """
    records: list[RequestRecord] = []
    metadata: dict[str, Any] = {}
    times_s = config.send_times_s
    num_requests = config.num_requests if times_s is None else len(times_s)

    def on_record(record: RequestRecord) -> None:
        records.append(record)
        if on_progress is not None:
            on_progress(len(records), num_requests)

    if not are_texts(config.inputs[:1]):
        async with AsyncClient(config.url, config.timeout_s, api_key=api_key) as client:
            metadata = await client.metadata()
    async with connected(config.url, api_key=api_key) as post:
        generator = Generator(config=config, post=post, rng=random.Random(config.seed), metadata=metadata)
        try:
            if times_s is None:
                await generator.closed_loop(iter(range(num_requests)), on_record)
            else:
                with exact_sleep() as pace:
                    await generator.open_loop(times_s, on_record, pace)
        except ExceptionGroup as group:  # of the tasks that the first error ended
            raise group.exceptions[0] from None
    return tuple(sorted(records, key=lambda record: record.scheduled_s))
