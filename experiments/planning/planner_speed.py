"""How long planning takes, in process and as a command, next to the planning times of E3.

    python -m experiments.planning.planner_speed [--rounds 5] [--out runs/planner_speed]

Each problem is planned once to compile and warm up, then timed; one core (`OMP_NUM_THREADS=1`). Minutes: about 3.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from argparse import ArgumentParser
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from experiments.kit import keep, show
from experiments.planning.e3_plans import PROBLEMS
from optimizer.decision import Planned, Strategy
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, Objective, PlanProblem, Slo, Supply
from optimizer.problem_file import read_problem
from profiles.catalogue import published_profile
from profiles.table import LatencyTable

# E3 (SOSP'24), figure 20: seconds of its optimizer.
E3_S = {
    "bert_base_16_v100": 0.87,
    "bert_base_hetero": 2.09,
    "bert_large_16_v100": 1.53,
    "bert_large_hetero": 3.63,
    "resnet50_16_v100": 1.13,
    "resnet50_hetero": 2.62,
}
COMMAND_PROBLEM = PROBLEMS / "bert_base_16_v100.yaml"
# 10,000 accelerators; the prices per hour are made up, near those of clouds.
BIG_CLUSTER = {
    "V100": Supply(count=1500, usd_per_hour=2.93),
    "T4": Supply(count=3500, usd_per_hour=0.53),
    "A100": Supply(count=1000, usd_per_hour=3.67),
    "A30": Supply(count=1500, usd_per_hour=1.2),
    "L4": Supply(count=1500, usd_per_hour=0.8),
    "L40S": Supply(count=1000, usd_per_hour=1.86),
}
# What such a cluster has, and E3's: there hops cost so much that no bound on them is tight.
BIG_LINKS = {
    "100 Gbit/s": Link(bandwidth_bytes_per_s=12.5e9, delay_s=5e-5),
    "10 Gbit/s": Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4),
}
BIG_BLOCKS = 64
LENGTH = 128


def main() -> None:
    """Measure, print, and keep the figures."""
    parser = ArgumentParser(prog="python -m experiments.planning.planner_speed", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("runs/planner_speed"))
    options = parser.parse_args()
    rows = [timed(path.stem, read_problem(path).problem, options.rounds) for path in sorted(PROBLEMS.glob("*.yaml"))]
    for name, link in BIG_LINKS.items():
        problem = bert_large_problem(BIG_BLOCKS, BIG_CLUSTER, link)
        rows.append(timed(f"64 blocks, 10,000 of 6 types, {name}", problem, options.rounds))
    command_s = median(_command_s() for _ in range(options.rounds))
    imports = _heavy_imports()
    columns = ("problem", "seconds", "e3_seconds", "rate_per_s", "gap")
    show("", columns, [[row[name] for name in columns] for row in rows])
    told = ", ".join(imports) or "neither torch nor ray"
    print(f"offramp plan {COMMAND_PROBLEM.name} --json: {command_s:.2f} s, imports {told}")
    report = {"rows": rows, "command_s": command_s, "command_imports": imports}
    print(f"written: {keep(report, options.out / 'planner_speed.json')}")


def bert_large_problem(
    num_blocks: int, devices: Mapping[str, Supply], link: Link, objective: Objective | None = None
) -> PlanProblem:
    """Blocks as fast as BERT-large's; from all to a quarter of the inputs are left, most leave early."""
    latency = {}
    for device in devices:
        table = published_profile("bert-large", device).tables[LENGTH]
        latency[device] = LatencyTable(
            batches=table.batches,
            block_s_NB=np.tile(table.block_s_NB[0], (num_blocks, 1)),
            ramp_s_EB=np.tile(table.ramp_s_EB[0], (num_blocks - 1, 1)),
        )
    return PlanProblem(
        num_blocks=num_blocks,
        ramps=tuple(range(num_blocks - 1)),
        survival_N=tuple(1 - 0.75 * (block / (num_blocks - 1)) ** 0.6 for block in range(num_blocks)),
        latency=latency,
        devices=devices,
        link=link,
        bytes_per_sample_N=(LENGTH * 1024 * 2.0,) * num_blocks,  # float16
        slo=Slo(latency_s=0.1, slack=0.2),
        objective=objective or MaximizeRate(),
    )


def timed(name: str, problem: PlanProblem, rounds: int, strategy: Strategy = "best") -> dict[str, Any]:
    """Median seconds of so many rounds after a first one, and the plan's rate per second and gap."""
    decision = solve(problem, strategy)
    assert isinstance(decision, Planned), decision
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        solve(problem, strategy)
        seconds.append(time.perf_counter() - start)
    return {
        "problem": name,
        "seconds": median(seconds),
        "e3_seconds": E3_S.get(name),
        "rate_per_s": decision.figures.rate_per_s,
        "gap": decision.gap,
    }


def _command_s() -> float:
    start = time.perf_counter()
    command = ["offramp", "plan", str(COMMAND_PROBLEM), "--json"]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return time.perf_counter() - start


def _heavy_imports() -> list[str]:
    """Which of torch and ray the command imports."""
    program = (
        "import sys; from offramp.cli.app import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print('imported:', *(name for name in ('torch', 'ray') if name in sys.modules))"
    )
    command = [sys.executable, "-c", program, "plan", str(COMMAND_PROBLEM), "--json"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return said.splitlines()[-1].removeprefix("imported:").split()


if __name__ == "__main__":
    main()
