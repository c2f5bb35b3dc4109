"""The metrics of a replica; apart from the ingress's, because they know the engine."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections import defaultdict, deque
from typing import Any, NamedTuple

from ray.serve.metrics import Counter, Gauge

from deployments.metrics import SECONDS, histogram, tags
from deployments.replica.host import StageHost
from earlyexit.engine.engine import Batch
from earlyexit.engine.release import Answered, Release, Survivors
from earlyexit.sequences.memory import MemoryUse

SHARES = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0)


class _Ran(NamedTuple):
    """What is counted of a batch; the batch itself would hold its inputs' hidden states."""

    split: int
    size: int
    target: int
    tokens: int
    token_target: int | None
    """None where tokens do not bound the batch."""
    probe: bool
    seconds: float


class StageMetrics:
    """The counts of a replica, by slot and device, because the stage that a slot hosts changes.

    The event loop passes them to Ray once a second: one call per input cost the device's thread 6 % of its time.
    """

    def __init__(self, slot: str, device: str) -> None:
        self._where = {"slot": slot, "device": device}
        names = tuple(self._where)
        self._queue_s = histogram("offramp_queue_seconds", "Time an input waited in a stage", SECONDS, *names)
        self._compute_s = histogram("offramp_compute_seconds", "Time an input ran in a stage", SECONDS, *names)
        self._fill = histogram(
            "offramp_batch_fill", "Share of the target batch that was filled", SHARES, *names, "split"
        )
        self._token_fill = histogram(
            "offramp_batch_token_fill", "Share of the token budget that was filled", SHARES, *names, "split"
        )
        self._tokens = Counter("offramp_batch_tokens", "Tokens of the inputs of batches", tags(*names, "split"))
        self._size = histogram("offramp_batch_size", "Inputs per batch", SIZES, *names, "split")
        self._busy_s = Counter("offramp_busy_seconds", "Time the device ran batches", tags(*names, "split"))
        self._waiting = Gauge("offramp_stage_waiting", "Inputs queued in a stage's replica", tags(*names))
        self._sequences = Gauge("offramp_sequences", "Sequences that a replica keeps keys and values of", tags(*names))
        self._kv_pages = Gauge(
            "offramp_kv_pages", "Pages of keys and values: reserved, reserved at most, there are", tags(*names, "which")
        )
        self._spent_s: deque[tuple[float, float]] = deque()
        """Seconds of waiting and running, per input."""
        self._ran: deque[_Ran] = deque()

    def record(self, releases: list[Release[Any]]) -> None:
        """Count what a device released."""
        for release in releases:
            match release:
                case Answered(stays=False):
                    self._spent_s.append((release.member.queue_s, release.member.compute_s))
                case Survivors():
                    self._spent_s.extend((member.queue_s, member.compute_s) for member in release.members)
                case _:  # the ingress counts what got no answer: it knows whether another attempt follows
                    pass

    def batch_finished(self, batch: Batch[Any], seconds: float) -> None:
        """Count a batch, and the seconds that it had the device; on the device's thread, as soon as it has run."""
        split = batch.split
        size, tokens = len(batch.members), batch.tokens
        self._ran.append(_Ran(split.first, size, split.batch, tokens, split.tokens, batch.probe, seconds))

    async def keep_telling(self, host: StageHost) -> None:
        """Tell Ray once a second, until cancelled."""
        while True:
            await asyncio.sleep(1.0)
            self.tell(host.num_waiting, host.memory)

    def tell(self, num_waiting: int, memory: MemoryUse | None) -> None:
        """Tell Ray what was counted since the last time."""
        self._waiting.set(num_waiting, self._where)
        if memory is not None:
            self._sequences.set(memory.sequences, self._where)
            for which, pages in (("reserved", memory.pages), ("peak", memory.peak_pages), ("all", memory.num_pages)):
                self._kv_pages.set(pages, {**self._where, "which": which})
        while self._spent_s:
            queue_s, compute_s = self._spent_s.popleft()
            self._queue_s.observe(queue_s, self._where)
            self._compute_s.observe(compute_s, self._where)
        self._tell_batches()

    def _tell_batches(self) -> None:
        busy_s: defaultdict[int, float] = defaultdict(float)
        tokens: Tally[int] = Tally()
        while self._ran:
            ran = self._ran.popleft()
            busy_s[ran.split] += ran.seconds
            tokens[ran.split] += ran.tokens
            if not ran.probe:  # probes do not wait to fill a batch
                where = {**self._where, "split": str(ran.split)}
                self._fill.observe(ran.size / ran.target, where)
                self._size.observe(ran.size, where)
                if ran.token_target is not None:
                    self._token_fill.observe(ran.tokens / ran.token_target, where)
        for split, seconds in busy_s.items():
            if seconds > 0:  # a counter refuses zero
                self._busy_s.inc(seconds, {**self._where, "split": str(split)})
        for split, number in tokens.items():
            self._tokens.inc(number, {**self._where, "split": str(split)})
