"""An HTTP client that shares its processors with the server that it measures, and so costs as little as Python can.

    python -m experiments.peers.client '{"url": "http://127.0.0.1:8100", "bodies": "bodies.jsonl", "rate_per_s": 200,
                                         "duration_s": 10, "slo_s": 0.1}'

Prints one line of JSON, a `LoadResult`. A process of its own: what it costs is not the server's, and is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from earlyexit.errors import DataError, OfframpError
from experiments.peers.loops import ClosedLoop, Loop, OpenLoop, poisson_times_s
from experiments.peers.tally import Ledger, LoadResult, summarize, write_answers
from experiments.peers.wire import Pool, host_and_port, prepare

__all__ = ["ClientOptions", "LoadResult", "run_client", "send_load"]

ROOT = Path(__file__).parents[2]
STARTING_S = 60.0
"""More than a client takes to start, on a machine that does much else, and to write its answers."""


class ClientOptions(BaseModel):
    """What is sent where and when; exactly one of `rate_per_s`, `times` and `concurrency` says when."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str
    """http://host:port."""
    path: str = "/predict"
    bodies: Path
    """One JSON body per line, sent in their order, again and again."""
    rate_per_s: float | None = Field(default=None, gt=0)
    """Poisson, drawn beforehand."""
    times: Path | None = None
    """One send time per line, in seconds from the start of the warm-up, ascending."""
    concurrency: int | None = Field(default=None, ge=1)
    """A closed loop of as many workers: for capacity; says nothing about latency under load."""
    duration_s: float = Field(gt=0)
    """Of what is counted; comes after the warm-up."""
    warmup_s: float = Field(default=0.0, ge=0)
    """Sent, not counted."""
    seed: int = Field(default=0, ge=0)
    connections: int = Field(default=16, ge=1)
    """Open before the first request."""
    most_connections: int = Field(default=2000, ge=1)
    """Requests that find all of them busy wait, and are charged for it."""
    slo_s: float = Field(gt=0)
    timeout_s: float = Field(default=10.0, gt=0)
    """After the time a request was due; its connection is closed then."""
    keep_bodies: bool = False
    """Count answers by label and exit."""
    answers: Path | None = None
    """Where every counted answer goes, a line of JSON each: `body`, its line in `bodies` from 0, and `predictions`."""

    @model_validator(mode="after")
    def _one_way_of_sending(self) -> Self:
        if [self.rate_per_s, self.times, self.concurrency].count(None) != 2:
            raise ValueError("give one of rate_per_s, times and concurrency")
        if self.connections > self.most_connections:
            raise ValueError("connections are more than most_connections")
        return self


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
    bodies = _lines(options.bodies)
    ledger, clock = Ledger(), time.monotonic
    pool = Pool(
        requests=prepare(options.url, options.path, bodies),
        ledger=ledger,
        clock=clock,
        most=options.most_connections,
        keep_bodies=options.keep_bodies or options.answers is not None,
    )
    loop = _loop(options, pool, ledger)
    cpu_s = await _drive(loop, pool, options)
    ledger.timed_out(options.timeout_s)
    counted = _counted(ledger, options, loop.start_s)
    if options.answers is not None:
        write_answers(options.answers, ledger, counted, len(bodies))
    return summarize(
        ledger,
        counted,
        duration_s=options.duration_s,
        slo_s=options.slo_s,
        cpu_s=cpu_s,
        num_retried=len(pool.retried),
        num_waited=pool.num_waited,
        num_connections=pool.num_connections,
    )


def main() -> None:
    """Read the options, send, print."""
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    try:
        options = ClientOptions.model_validate_json(sys.argv[1])
    except ValidationError as error:
        sys.exit(str(error))
    import uvloop

    _allow_connections()
    _go_first()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            result = runner.run(send_load(options))
    except OfframpError as error:
        sys.exit(str(error))
    print(result.model_dump_json())


def _loop(options: ClientOptions, pool: Pool, ledger: Ledger) -> Loop:
    until_s = options.warmup_s + options.duration_s
    clock, timeout_s = time.monotonic, options.timeout_s
    if options.concurrency is not None:
        return ClosedLoop(
            workers=options.concurrency, until_s=until_s, pool=pool, ledger=ledger, clock=clock, timeout_s=timeout_s
        )
    times_s = _times_s(options, until_s)
    if not times_s or times_s[-1] < options.warmup_s:
        raise DataError(f"nothing is due in the {options.duration_s:g} s after the warm-up")
    return OpenLoop(times_s=times_s, pool=pool, ledger=ledger, clock=clock, timeout_s=timeout_s)


async def _drive(loop: Loop, pool: Pool, options: ClientOptions) -> float:
    """Processor time that the load cost. Nothing here makes cycles, so nothing is collected while it runs."""
    try:
        await pool.open(*host_and_port(options.url), options.connections)
    except OSError as error:
        raise OfframpError(f"no server answers at {options.url}: {error}") from error
    gc.collect()
    gc.disable()
    cpu_s = time.process_time()
    try:
        await loop.run()
        return time.process_time() - cpu_s
    finally:
        gc.enable()
        await pool.close()


def _counted(ledger: Ledger, options: ClientOptions, start_s: float) -> list[int]:
    from_s = start_s + options.warmup_s
    return ledger.between(from_s, from_s + options.duration_s)


def _times_s(options: ClientOptions, until_s: float) -> list[float]:
    if options.rate_per_s is not None:
        return poisson_times_s(options.rate_per_s, until_s, options.seed)
    assert options.times is not None
    times_s = [float(json.loads(line)) for line in _lines(options.times)]
    if sorted(times_s) != times_s or times_s[0] < 0 or times_s[-1] >= until_s:
        raise DataError(f"{options.times}: send times ascend from 0 and end before {until_s:g} s")
    return times_s


def _lines(path: Path) -> list[bytes]:
    lines = [line for line in path.read_bytes().splitlines() if line.strip()]
    if not lines:
        raise DataError(f"{path} is empty")
    return lines


def _allow_connections() -> None:
    """As many open files as this process may ask for; what it begins with is often 1024."""
    import resource

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _go_first() -> None:
    """Before the servers on the same cores, all of them alike: a client that waits for a core measures the scheduler.

    Without the right to (few but root have it) it takes its turn like anybody; its lateness tells what that cost.
    """
    with contextlib.suppress(PermissionError):
        os.nice(-10)


if __name__ == "__main__":
    main()
