"""Compares Offramp with other model servers, on this machine and with the same model.

    python -m experiments.peers {clinc150,mpnet} [--dtype bfloat16] [--inputs 8]

First the model is measured, plans are made, and every peer's settings are swept. Then come rounds, in which servers
take turns. Each server runs alone on the machine. It is started, warmed up, and measured at a light and a heavy rate,
which are the same for all. Then its sustained rate is searched: the highest Poisson rate with p99 within the SLO and at
most 1 % refused or failed. The output has processor time per answer, sustained rate, latency, memory, and the share of
right answers. Writes runs/peers/*.json; `python -m experiments.peers.table` prints them. `make bench-peers` installs
the peers. Minutes: about 4 to begin with, then 3 per side and round.
"""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser

from earlyexit.backends import BACKENDS
from experiments.peers.compare import OURS, ComparisonOptions, compare
from experiments.peers.processes import PEERS
from experiments.peers.table import render
from experiments.peers.workloads import WORKLOADS, Processors


def main() -> None:
    """Compares and prints."""
    parser = ArgumentParser(prog="python -m experiments.peers", description=__doc__)
    parser.add_argument("workload", choices=tuple(WORKLOADS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--inputs", type=int, default=1, help="texts per request")
    parser.add_argument("--batch", type=int, default=32, help="largest batch, for every server")
    parser.add_argument("--workers", type=int, default=2, help="processes with the model, for every server")
    parser.add_argument("--threads", type=int, default=1, help="threads of each process")
    parser.add_argument("--rounds", type=int, default=5, help="0: only measure, plan and sweep")
    parser.add_argument("--seconds", type=float, default=20.0, help="seconds of a client's run, after its warm-up")
    parser.add_argument("--sides", nargs="+", choices=(*OURS, *PEERS), default=[*OURS, *PEERS])
    parser.add_argument("--backend", choices=tuple(BACKENDS), default="auto", help="Offramp's backend")
    parser.add_argument("--port", type=int, default=8000)
    arguments = parser.parse_args()
    if not set(arguments.sides) & set(PEERS):
        parser.error(f"--sides needs a peer, which sets the rates: one of {', '.join(PEERS)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every started server is ended
    options = ComparisonOptions(
        workload=arguments.workload,
        dtype=arguments.dtype,
        inputs_per_request=arguments.inputs,
        machine=Processors(arguments.workers, arguments.threads, arguments.batch),
        seconds=arguments.seconds,
        sides=tuple(arguments.sides),
        backend=arguments.backend,
        port=arguments.port,
    )
    result = compare(options, arguments.rounds)
    if result["rounds"]:
        print(render(result))
    print(f"written to {options.result}")


if __name__ == "__main__":
    main()
