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
from typing import Any

from experiments.kit import show
from experiments.peers.client import ROOT, ClientOptions, run_client, write_inputs

RATES_PER_S = (100.0, 300.0, 1000.0, 2000.0, 3000.0, 5000.0)
LATENESS_S = 0.002
"""The 99th percentile that a client in time stays below: a fiftieth of an SLO of 100 ms."""
TEXT = "what is the weather like tomorrow in the capital of australia"
COLUMNS = ("offered", "answered/s", "late p99, us", "p50, us", "p99, us", "client's CPU us/request")


def main() -> None:
    """Measure and print."""
    parser = ArgumentParser(prog="python -m experiments.peers.capacity", description=__doc__)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES_PER_S)
    options = parser.parse_args()
    loads: dict[str, dict[str, Any]] = {f"{rate:g}/s": {"rate_per_s": rate} for rate in options.rates}
    loads["32 workers"] = {"concurrency": 32}
    rows = []
    with TemporaryDirectory() as folder, null_server() as url:
        inputs = write_inputs(Path(folder) / "inputs.jsonl", [TEXT])
        for offered, load in loads.items():
            told = {"url": url, "inputs": inputs, "duration_s": options.seconds, "warmup_s": 0.5, "slo_s": 0.1}
            result = run_client(ClientOptions.model_validate(told | load))
            times_s = (result.lateness_p99_s, result.p50_s, result.p99_s, result.cpu_per_request_s)
            rows.append((offered, result.answered_per_s, *(each_s and each_s * 1e6 for each_s in times_s)))
    show(f"a client that is late by less than {LATENESS_S * 1e6:g} us (p99) is in time", COLUMNS, rows)


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


if __name__ == "__main__":
    main()
