"""Flame graphs of Offramp's processes under load: which lines take the processor time.

    python -m experiments.peers.flame clinc150 [--rate 500]

Serves the workload by its plan, offers the rate, and samples the ingress and one stage with py-spy (in the extra
`peers`). Writes runs/peers/flame-*.svg, which a browser opens. Minutes: 2.
"""

from __future__ import annotations

import subprocess
from argparse import ArgumentParser
from pathlib import Path
from shutil import which

from experiments.peers.compare import Asked, loaded
from experiments.peers.plans import Machine, prepare
from experiments.peers.processes import PEERS_PYTHON, Server, part_of
from experiments.peers.sides import offramp_sides
from experiments.peers.workloads import FOLDER, WORKLOADS

SECONDS = 20.0
SAMPLES_PER_S = 250
SAMPLED = ("ingress", "stages")


def main() -> None:
    """Serve, load, sample."""
    parser = ArgumentParser(prog="python -m experiments.peers.flame", description=__doc__)
    parser.add_argument("workload", choices=tuple(WORKLOADS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--inputs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rate", type=float, default=500.0, help="requests per second")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    asked = Asked(
        workload=options.workload,
        dtype=options.dtype,
        inputs_per_request=options.inputs,
        machine=Machine(batch_limit=options.batch),
        seconds=SECONDS,
    )
    workload = WORKLOADS[asked.workload]()
    with (
        loaded(asked, workload, prepare(workload, asked.dtype, asked.machine)) as bench,
        offramp_sides(
            bench.workload, bench.prepared, asked.dtype, asked.machine, bench.load, port=options.port
        ) as sides,
    ):
        side = next(side for side in sides if side.name == "offramp")
        side.measure(options.rate / 2, seed=1)  # warm, and the plan in force
        samplers = _start_samplers(side.server, f"{options.workload}-{options.dtype}")
        result = side.measure(options.rate, seed=0)
        for path, sampler in samplers.items():
            sampler.wait()
            print(path)
        print(f"{result.answered_per_s:.0f} requests/s answered, p50 {(result.p50_s or 0) * 1e3:.1f} ms")


def _start_samplers(service: Server, name: str) -> dict[Path, subprocess.Popen[bytes]]:
    """One process of each kind; a stage's other replicas do the same."""
    py_spy = which("py-spy") or which("py-spy", path=str(PEERS_PYTHON.parent))
    if py_spy is None:
        raise SystemExit("py-spy is missing: `make peers` installs it")
    by_part = {part_of(process): process.pid for process in service.processes()}
    samplers = {}
    for part in SAMPLED:
        path = FOLDER / f"flame-{name}-{part}.svg"
        command = [py_spy, "record", "--output", str(path), "--duration", f"{SECONDS / 2:.0f}"]
        command += ["--rate", str(SAMPLES_PER_S), "--pid", str(by_part[part])]
        samplers[path] = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return samplers


if __name__ == "__main__":
    main()
