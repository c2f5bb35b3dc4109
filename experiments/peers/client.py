"""Runs Offramp's load generator in its own process, so that its processor time is not counted as the server's.

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
from dataclasses import asdict, dataclass
from itertools import count, takewhile
from pathlib import Path
from statistics import mean
from typing import Self

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from earlyexit.clock import MonotonicClock
from earlyexit.errors import DataError, OfframpError
from offramp.load.arrivals import Poisson
from offramp.load.connections import connected
from offramp.load.generator import Generator, LoadConfig, RequestRecord, exact_sleep
from offramp.load.sustained import ProbeResult, percentile

ROOT = Path(__file__).parents[2]
STARTING_S = 60.0
"""Upper bound of the time that a client needs to start on a busy machine and to write its answers, in seconds."""
PAUSE_S = 0.05
"""Pause of a closed loop's worker after a failure, in seconds."""


class ClientOptions(BaseModel):
    """The destination and the form of the load. Exactly one of `rate_per_s` and `concurrency` must be set."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """Address, such as http://host:port."""
    inputs: Path
    """JSON lines with the field `text`. They are sent in turn, repeatedly."""
    inputs_per_request: int = Field(default=1, ge=1)
    rate_per_s: float | None = Field(default=None, gt=0)
    """Rate of Poisson requests. With equal seeds, another rate only stretches the same arrivals."""
    concurrency: int | None = Field(default=None, ge=1)
    """Number of workers of a closed loop. It measures capacity, not latency under load."""
    duration_s: float = Field(gt=0)
    """Seconds that are counted, after the warm-up."""
    warmup_s: float = Field(default=0.0, ge=0)
    """Seconds of load that are not counted."""
    seed: int = Field(default=0, ge=0)
    slo_s: float = Field(gt=0)
    timeout_s: float = Field(default=10.0, gt=0)
    answers: Path | None = None
    """Output file of counted answers, as JSON lines: `input` (line number in `inputs`, from 0), `label`, `exit`."""

    @model_validator(mode="after")
    def _one_way_of_sending(self) -> Self:
        if (self.rate_per_s is None) == (self.concurrency is None):
            raise ValueError("set exactly one of rate_per_s and concurrency")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult(ProbeResult):
    """Figures of the counted requests, which were due after the warm-up.

    Latency starts at a request's due time. Mean and percentiles (linear interpolation) are None without answers.
    """

    duration_s: float
    num_sent: int
    """Sent requests, including the warm-up."""
    num_counted: int
    num_answered: int
    errors: dict[str, int]
    """Refused and failed requests, by the kinds of `errors` of `offramp bench`."""
    goodput_per_s: float
    """Answers within the SLO, per second of `duration_s`."""
    mean_s: float | None
    p50_s: float | None
    cpu_s: float
    """Processor time of the client from the first request to the last outcome, including the warm-up."""

    @property
    def answered_per_s(self) -> float:
        """Rate of all answers, in time or late."""
        return self.num_answered / self.duration_s


def write_inputs(path: Path, texts: Iterable[str]) -> Path:
    """Writes texts in the format of `ClientOptions.inputs`."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def run_client(options: ClientOptions) -> LoadResult:
    """Sends the load from another process; raises OfframpError if it fails, for example because no server listens."""
    command = [sys.executable, "-m", "experiments.peers.client", options.model_dump_json()]
    patience_s = options.warmup_s + options.duration_s + options.timeout_s + STARTING_S
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=patience_s)
    except subprocess.TimeoutExpired as error:
        raise OfframpError(f"the client did not end within {patience_s:g} s") from error
    if done.returncode:
        raise OfframpError(f"the client failed: {done.stderr.strip() or f'exit status {done.returncode}'}")
    return LoadResult(**json.loads(done.stdout))


async def send_load(options: ClientOptions) -> LoadResult:
    """Sends the load from this process and event loop; raises OfframpError if no server listens."""
    config, records = _config(options), list[RequestRecord]()
    async with connected(options.url) as post:
        generator = Generator(config=config, post=post, rng=random.Random(options.seed), clock=MonotonicClock())
        gc.collect()
        gc.disable()  # this code makes no reference cycles
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
    """Returns the figures of the counted requests."""
    answered = [record for record in counted if record.error is None]
    latency_s = [record.latency_s for record in answered]
    return LoadResult(
        **asdict(ProbeResult.of(counted)),
        duration_s=options.duration_s,
        num_sent=num_sent,
        num_counted=len(counted),
        num_answered=len(answered),
        errors=dict(sorted(Counter(record.error for record in counted if record.error is not None).items())),
        goodput_per_s=sum(each_s <= options.slo_s for each_s in latency_s) / options.duration_s,
        mean_s=mean(latency_s) if latency_s else None,
        p50_s=percentile(latency_s, 50),
        cpu_s=cpu_s,
    )


def main() -> None:
    """Reads the options, sends the load, and prints the result."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    import uvloop

    with contextlib.suppress(PermissionError):  # goes before the servers on the same cores if it may
        os.nice(-10)
    try:
        options = ClientOptions.model_validate_json(sys.argv[1])
        _allow_connections()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(send_load(options))
    except (ValidationError, OfframpError) as error:
        sys.exit(str(error))
    print(json.dumps(asdict(result)))


def _config(options: ClientOptions) -> LoadConfig:
    rows = [json.loads(line) for line in options.inputs.read_text(encoding="utf-8").splitlines() if line.strip()]
    if not rows:
        raise DataError(f"{options.inputs} is empty")
    times_s: list[float] | None = None
    if options.rate_per_s is not None:
        process, rng = Poisson(rate_per_s=options.rate_per_s), np.random.default_rng(options.seed)
        times_s = process.draw(options.warmup_s + options.duration_s, rng).tolist()
        if not times_s or times_s[-1] < options.warmup_s:
            raise DataError(f"no request is due in the {options.duration_s:g} s after the warm-up")
    return LoadConfig(
        url=options.url,
        inputs=[row["text"] for row in rows],
        send_times_s=times_s,
        concurrency=options.concurrency or 1,
        inputs_per_request=options.inputs_per_request,
        timeout_s=options.timeout_s,
        seed=options.seed,
    )


async def _drive(generator: Generator, options: ClientOptions, records: list[RequestRecord]) -> None:
    if (times_s := generator.config.send_times_s) is not None:
        with exact_sleep() as pace:
            await generator.open_loop(times_s, records.append, pace)
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
    """Raises the limit of open files, which is often 1024, to the allowed maximum."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


if __name__ == "__main__":
    main()
