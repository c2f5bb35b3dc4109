"""How fast the client is: rising rates against a server that does nothing, until the client itself is late.

    python -m experiments.peers.capacity [--seconds 3] [--rates 300 1000 ...]

A server compared here must stay well below the last rate that the client sent in time. Minutes: about 1.
"""

from __future__ import annotations

import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from experiments.peers.client import ROOT, ClientOptions, LoadResult, run_client

RATES_PER_S = (100.0, 300.0, 1000.0, 2000.0, 3000.0, 5000.0, 8000.0, 12000.0)
LATENESS_S = 0.002
"""The 99th percentile that a client in time stays below: a fiftieth of an SLO of 100 ms."""
SLO_S = 0.1
WARMUP_S = 0.5
WORKERS = 32
"""Of the closed loop."""
BODY = '{"inputs": "what is the weather like tomorrow in the capital of australia"}\n'
HEADER = "   rate/s   sent/s  answered/s  late p50 us  late p99 us   p50 us   p99 us  CPU us/request  connections"


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.peers.capacity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_PER_S)
    options = parser.parse_args()
    print(HEADER)
    with TemporaryDirectory() as folder, null_server() as url:
        bodies = Path(folder) / "bodies.jsonl"
        bodies.write_text(BODY)
        to_null = ClientOptions(
            url=url, bodies=bodies, rate_per_s=1, duration_s=options.seconds, warmup_s=WARMUP_S, slo_s=SLO_S
        )
        highest_per_s = _rise(to_null, sorted(options.rates))
        closed = run_client(to_null.model_copy(update={"rate_per_s": None, "concurrency": WORKERS}))
    print(f"late by less than {LATENESS_S * 1000:g} ms (p99) up to {highest_per_s:g} requests/s")
    cpu_us = closed.cpu_per_request_s * 1e6
    print(f"{WORKERS} workers in a closed loop: {closed.answered_per_s:.0f} requests/s, {cpu_us:.1f} us of CPU each")


@contextmanager
def null_server() -> Iterator[str]:
    """The address of a server that answers at once, in a process of its own."""
    command = [sys.executable, "-m", "experiments.peers.null_server", "0"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(server.stdout.readline())}"
        finally:
            server.terminate()


def _rise(to_null: ClientOptions, rates_per_s: list[float]) -> float:
    """The highest rate before the first that the client was late at; 0 where it always was."""
    highest_per_s, in_time = 0.0, True
    for rate_per_s in rates_per_s:
        result = run_client(to_null.model_copy(update={"rate_per_s": rate_per_s}))
        print(_line(rate_per_s, result), flush=True)
        in_time = in_time and (result.lateness_p99_s or 0.0) < LATENESS_S
        highest_per_s = rate_per_s if in_time else highest_per_s
    return highest_per_s


def _line(rate_per_s: float, result: LoadResult) -> str:
    return (
        f"{rate_per_s:9.0f} {result.offered_per_s:8.0f} {result.answered_per_s:11.0f} {_us(result.lateness_p50_s):>12}"
        f" {_us(result.lateness_p99_s):>12} {_us(result.p50_s):>8} {_us(result.p99_s):>8}"
        f" {result.cpu_per_request_s * 1e6:15.1f} {result.num_connections:12}"
    )


def _us(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e6:.0f}"


if __name__ == "__main__":
    main()
