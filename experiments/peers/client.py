"""Offramp's load generator in a process of its own: what it costs is not the server's, and is told.

    python -m experiments.peers.client '{"url": "http://127.0.0.1:8100", "inputs": "inputs.jsonl", "rate_per_s": 200,
                                         "duration_s": 10, "slo_s": 0.1}'

Prints one line of JSON, a `LoadResult`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count, takewhile
from pathlib import Path
from statistics import mean
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from earlyexit.clock import MonotonicClock
from earlyexit.errors import DataError, OfframpError
from offramp.load.connections import connected
from offramp.load.generator import Generator, LoadConfig, exact_sleep
from offramp.load.processes import Poisson
from offramp.load.report import RequestRecord, percentile
from offramp.load.sustained import Measured

ROOT = Path(__file__).parents[2]
STARTING_S = 60.0
"""More than a client takes to start, on a machine that does much else, and to write its answers."""
PAUSE_S = 0.05
"""Of a closed loop's worker after a failure: it must not ask again at once."""


class ClientOptions(BaseModel):
    """What is sent where and when; one of `rate_per_s` and `concurrency` says when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """http://host:port."""
    inputs: Path
    """A line of JSON each, with the `text`. Sent in turn, again and again."""
    inputs_per_request: int = Field(default=1, ge=1)
    rate_per_s: float | None = Field(default=None, gt=0)
    """Requests, Poisson: of a seed the same arrivals at every rate, only faster or slower."""
    concurrency: int | None = Field(default=None, ge=1)
    """A closed loop of as many workers: for capacity; says nothing about latency under load."""
    duration_s: float = Field(gt=0)
    """Of what is counted; comes after the warm-up."""
    warmup_s: float = Field(default=0.0, ge=0)
    """Sent, not counted."""
    seed: int = Field(default=0, ge=0)
    slo_s: float = Field(gt=0)
    timeout_s: float = Field(default=10.0, gt=0)
    answers: Path | None = None
    """Where every counted answer goes, a line of JSON each: `input`, its line in `inputs` from 0, `label`, `exit`."""

    @model_validator(mode="after")
    def _one_way_of_sending(self) -> Self:
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise ValueError("give one of rate_per_s and concurrency")
        return self


class LoadResult(BaseModel):
    """Figures of the counted requests: those due after the warm-up.

    Latency runs from when a request was due; mean and percentiles (linear between neighbours) are None of nothing.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    duration_s: float
    num_sent: int
    """Warm-up included."""
    num_counted: int
    num_answered: int
    errors: dict[str, int]
    """Requests that were refused or failed, by the kinds of `LoadReport.errors`."""
    goodput_per_s: float
    """Answers within the SLO, per second of `duration_s`."""
    mean_s: float | None = None
    p50_s: float | None
    p99_s: float | None
    from_sent_p99_s: float | None
    """Of answers, from when the client took the request up rather than from when it was due."""
    lateness_p99_s: float | None
    """How long after it was due the client took a request up: its own fault, never the server's."""
    cpu_s: float
    """Processor time of the client from the first request to the last outcome, warm-up included."""

    @property
    def measured(self) -> Measured:
        """What a search for the sustained rate judges by."""
        return Measured(
            lost_share=sum(self.errors.values()) / self.num_counted if self.num_counted else 0.0,
            p99_s=self.p99_s,
            from_sent_p99_s=self.from_sent_p99_s,
            lateness_p99_s=self.lateness_p99_s,
        )

    @property
    def answered_per_s(self) -> float:
        """Whether or not in time."""
        return self.num_answered / self.duration_s


def write_inputs(path: Path, texts: Iterable[str]) -> Path:
    """What `ClientOptions.inputs` names."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run_client(options: ClientOptions) -> LoadResult:
    """Send the load from a process of its own; raises OfframpError where it fails, as where no server listens."""
    command = [sys.executable, "-m", "experiments.peers.client", options.model_dump_json()]
    patience_s = options.warmup_s + options.duration_s + options.timeout_s + STARTING_S
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience_s)
    except subprocess.TimeoutExpired as error:
        raise OfframpError(f"the client does not come to an end within {patience_s:g} s") from error
    if done.returncode:
        raise OfframpError(f"the client failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return LoadResult.model_validate_json(done.stdout)


async def send_load(options: ClientOptions) -> LoadResult:
    """Send the load from this process and event loop; raises OfframpError where no server listens."""
    config, records = _config(options), list[RequestRecord]()
    async with connected(options.url) as post:
        generator = Generator(config=config, post=post, rng=random.Random(options.seed), clock=MonotonicClock())
        gc.collect()
        gc.disable()  # nothing here makes cycles
        cpu_s = time.process_time()
        try:
            await _drive(generator, options, records)
            cpu_s = time.process_time() - cpu_s
        finally:
            gc.enable()
    if all(record.error == "connection" for record in records):
        raise OfframpError(f"no server answers at {options.url}")
    counted = [record for record in records if record.scheduled_s >= options.warmup_s]
    if options.answers is not None:
        _write_answers(options.answers, counted)
    return summarize(counted, options, num_sent=len(records), cpu_s=cpu_s)


def summarize(counted: Sequence[RequestRecord], options: ClientOptions, *, num_sent: int, cpu_s: float) -> LoadResult:
    """Figures of the counted requests."""
    answered = [record for record in counted if record.error is None]
    latency_s, found = [record.latency_s for record in answered], Measured.of(counted)
    return LoadResult(
        duration_s=options.duration_s,
        num_sent=num_sent,
        num_counted=len(counted),
        num_answered=len(answered),
        errors=dict(sorted(Counter(record.error for record in counted if record.error is not None).items())),
        goodput_per_s=sum(each_s <= options.slo_s for each_s in latency_s) / options.duration_s,
        mean_s=mean(latency_s) if latency_s else None,
        p50_s=percentile(latency_s, 50),
        p99_s=found.p99_s,
        from_sent_p99_s=found.from_sent_p99_s,
        lateness_p99_s=found.lateness_p99_s,
        cpu_s=cpu_s,
    )


def main() -> None:
    """Read the options, send, print."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    import uvloop

    with contextlib.suppress(PermissionError):  # before the servers on the same cores: its lateness tells where not
        os.nice(-10)
    try:
        options = ClientOptions.model_validate_json(sys.argv[1])
        _allow_connections()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(send_load(options))
    except (ValidationError, OfframpError) as error:
        sys.exit(str(error))
    print(result.model_dump_json())


def _config(options: ClientOptions) -> LoadConfig:
    rows = [json.loads(line) for line in options.inputs.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows:
        raise DataError(f"{options.inputs} is empty")
    times_s: list[float] | None = None
    if options.rate_per_s is not None:
        process, rng = Poisson(rate_per_s=options.rate_per_s), np.random.default_rng(options.seed)
        times_s = process.draw(options.warmup_s + options.duration_s, rng).tolist()
        if not times_s or times_s[-1] < options.warmup_s:
            raise DataError(f"nothing is due in the {options.duration_s:g} s after the warm-up")
    return LoadConfig(
        url=options.url,
        inputs=[row["text"] for row in rows],
        num_requests=1 if times_s is None else len(times_s),
        send_times_s=times_s,
        concurrency=options.concurrency,
        inputs_per_request=options.inputs_per_request,
        timeout_s=options.timeout_s,
        slo_s=options.slo_s,
        seed=options.seed,
    )


async def _drive(generator: Generator, options: ClientOptions, records: list[RequestRecord]) -> None:
    if (times_s := generator.config.send_times_s) is not None:
        with exact_sleep() as pace:
            await replace(generator, pace=pace).open_loop(times_s, records.append)
        return
    until_s = generator.clock.now_s() + options.warmup_s + options.duration_s
    indices: Iterator[int] = takewhile(lambda _: generator.clock.now_s() < until_s, count())
    await generator.closed_loop(indices, records.append, pause_s=PAUSE_S)


def _write_answers(path: Path, counted: Iterable[RequestRecord]) -> None:
    with path.open("w", encoding="utf-8") as file:
        for record in counted:
            for index, answer in zip(record.input_indices, record.predictions, strict=bool(record.predictions)):
                file.write(json.dumps({"input": index, "label": answer.label, "exit": answer.exit}) + "\n")


def _allow_connections() -> None:
    """As many open files as this process may ask for; what it begins with is often 1024."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
