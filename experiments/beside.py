"""Ours beside an older commit: what text costs in the engine, in the service and in the simulator.

    OFFRAMP_DATA=... python -m experiments.beside REVISION [--rounds 3] [--only engine service simulator]

The older commit is checked out below runs/ and run by this environment's Python; the model, CLINC150 on MiniLM-L6, is
the one that it trains. The two take turns, so that a machine that drifts hits both. Ratios, this checkout's figure
over the older one's, are medians of the rounds'; of processor time less is better, of rates more. A machine that does
nothing else, please. Minutes: about 25 on two cores, 5 of them to train the model, once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from earlyexit.dataset import read_labelled
from experiments.data import RUNS, require_data
from experiments.peers.client import ROOT, ClientOptions, run_client, write_inputs
from experiments.peers.processes import Server, running
from experiments.peers.turns import per_input
from experiments.turns import Figures, in_turns, tell
from offramp.client.client import Client

DATA = "clinc150/data_full.json"
MODEL = Path("runs/clinc150")
RATE_PER_S = 300.0
WORKERS = 64
SLO_S = 0.25
SIMULATED = 10_000_000
PORT = 8600
RUN = """
import importlib.util, sys
here = "offramp.cli.app" if importlib.util.find_spec("offramp.cli").submodule_search_locations else "offramp.cli"
sys.argv[0] = "offramp"
importlib.import_module(here).main()
"""
"""The command line, which was one module before it was a folder."""
BEFORE = {
    "experiments.engine.speed": "experiments.engine_speed",
    "experiments.planning.simulator_speed": "experiments.simulator_speed",
    "experiments.trained.clinc150": "experiments.clinc150",
}
"""What modules that both sides run were called before experiments lay in folders."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """One of the two checkouts."""

    name: str
    root: Path

    def command(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a module of the checkout to its end; SystemExit tells what it said where it fails."""
        if module in BEFORE and not (self.root / f"{module.replace('.', '/')}.py").is_file():
            module = BEFORE[module]
        done = subprocess.run(
            [sys.executable, "-m", module, *arguments],
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{self.name}: {' '.join((module, *arguments))}: {done.stderr[-2000:]}")
        return done

    def figures(self, script: str, *arguments: object) -> Figures:
        """Of a script that prints them as JSON, run by this checkout's modules; CalledProcessError where it fails."""
        done = subprocess.run(
            [sys.executable, "-c", script, *map(str, arguments)],
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=True,
        )
        found: Figures = json.loads(done.stdout)
        return found

    def environment(self, **beside: str) -> dict[str, str]:
        """Ours, but its own modules; and the data by its full path."""
        data = str(Path(os.environ.get("OFFRAMP_DATA", "../shared/data")).resolve())
        quiet = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
        return os.environ | quiet | {"PYTHONPATH": str(self.root), "OFFRAMP_DATA": data} | beside


def checked_out(revision: str) -> Path:
    """The folder that holds a commit, made by `git worktree` where it is missing; raises CalledProcessError."""
    folder = (RUNS / "beside" / revision).resolve()
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["git", "worktree", "add", "--detach", str(folder), revision], cwd=ROOT, check=True)
    return folder


def engine(side: Side, model: Path) -> Figures:
    """Samples a second of the batch engine alone, one thread."""
    data = str(require_data(DATA).resolve())
    options = [str(model), "--data", data, "--part", "test", "--rounds", "1", "--json"]
    told = json.loads(side.command("experiments.engine.speed", *options).stdout)
    return {name: rates[0] for name, rates in told["samples_per_s"].items()}


def simulator(side: Side, _: Path) -> Figures:
    """Seconds of processor time for ten million requests."""
    out = side.root / "runs" / "beside-simulator.json"
    side.command(
        "experiments.planning.simulator_speed", "--requests", str(SIMULATED), "--sides", "plain", "--out", str(out)
    )
    [told] = json.loads(out.read_text(encoding="utf-8"))["sides"]
    return {"CPU s": told["cpu_s"]}


def service(side: Side, model: Path) -> Figures:
    """Milliseconds of processor time per answer, by part, at a rate and at saturation; and the rate at saturation."""
    texts = read_labelled(require_data(DATA), part="test").texts
    inputs = write_inputs((RUNS / "beside" / "inputs.jsonl").resolve(), texts)
    figures: Figures = {}
    with served(side, model) as process:
        for name, load in (("at 300/s", {"rate_per_s": RATE_PER_S}), ("saturated", {"concurrency": WORKERS})):
            told = {"url": process.url, "inputs": inputs, "slo_s": SLO_S} | load
            run_client(ClientOptions.model_validate(told | {"duration_s": 4.0}))
            before = process.cpu_s_by_part()
            result = run_client(ClientOptions.model_validate(told | {"duration_s": 15.0}))
            parts_s = per_input(before, process.cpu_s_by_part(), result.num_sent)
            parts_s["all"] = sum(parts_s.values())
            figures |= {f"{name}, ms, {part}": 1000 * each_s for part, each_s in parts_s.items()}
            figures[f"{name}, answers/s"] = result.answered_per_s
    return figures


@contextmanager
def served(side: Side, model: Path) -> Iterator[Server]:
    """The checkout's own `offramp serve`, once it is ready."""
    options = [str(model), "--plan", "serial", "--batch", "16", "--port", str(PORT), "--threads", "2"]
    log = RUNS / "beside" / f"{side.name}.log"
    command = [sys.executable, "-c", RUN, "serve", *options]
    with running(command, f"http://127.0.0.1:{PORT}", log, side.environment(), cwd=side.root) as server:
        with Client(server.url, timeout_s=10.0) as client:
            client.wait_until_ready(timeout_s=180.0)
        yield server


MEASURES: Mapping[str, Callable[[Side, Path], Figures]] = {
    "engine": engine,
    "service": service,
    "simulator": simulator,
}


def main() -> None:
    """Measure in turns, and print medians and ratios."""
    parser = ArgumentParser(prog="python -m experiments.beside", description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    options = parser.parse_args()
    older = Side(name=options.revision, root=checked_out(options.revision))
    ours = Side(name="this checkout", root=ROOT)
    model = older.root / MODEL
    if not (model / "calibration.json").is_file():
        older.command("experiments.trained.clinc150")
    for name in options.only:
        sides = {side.name: partial(MEASURES[name], side, model) for side in (older, ours)}
        tell(f"{name}, {options.rounds} rounds", in_turns(sides, options.rounds, warm_ups=0))


if __name__ == "__main__":
    main()
