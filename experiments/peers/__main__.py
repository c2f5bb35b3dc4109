"""Offramp against the servers that one would pick instead, on this machine, the same model behind all of them.

    python -m experiments.peers {clinc150,mpnet,mpnet-news,bert-base,long} [--dtype bfloat16] [--inputs 8]

Measures and plans, takes the compute-bound limit, sweeps every peer's settings, then looks for the goodput of all sides
in interleaved rounds: the highest Poisson rate with p99 within the SLO and at most 1 % refused or failed. Afterwards
latency at 30 % of the best peer's goodput, processor time, memory, and whether the answers are right. Writes
runs/peers/*.json; `python -m experiments.peers.table` prints what is there. Needs `make peers`. Minutes: about 20.
"""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser

from experiments.peers.compare import Asked, compare
from experiments.peers.plans import Machine
from experiments.peers.processes import PEERS
from experiments.peers.table import render
from experiments.peers.workloads import WORKLOADS


def main() -> None:
    """Compare and print."""
    parser = ArgumentParser(prog="python -m experiments.peers", description=__doc__)
    parser.add_argument("workload", choices=tuple(WORKLOADS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--inputs", type=int, default=1, help="texts in a request")
    parser.add_argument("--batch", type=int, default=32, help="inputs in a batch, at most, on every side")
    parser.add_argument("--workers", type=int, default=2, help="processes with the model, on every side")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a probe")
    parser.add_argument("--peers", nargs="+", choices=tuple(PEERS), default=list(PEERS))
    parser.add_argument("--swept", action="store_true", help="the peers' settings are those that the last run found")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that every server that was started is ended
    machine = Machine(workers=options.workers, threads=options.threads, batch_limit=options.batch)
    asked = Asked(
        workload=options.workload,
        dtype=options.dtype,
        inputs_per_request=options.inputs,
        machine=machine,
        rounds=options.rounds,
        seconds=options.seconds,
        peers=tuple(options.peers),
        port=options.port,
        sweep_again=not options.swept,
    )
    result = compare(asked)
    print(render(result))
    print(f"written to {asked.result}")


if __name__ == "__main__":
    main()
