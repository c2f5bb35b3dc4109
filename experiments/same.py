"""Whether this checkout answers as an older commit did: plans to the last bit, simulations, and planning's speed.

    python -m experiments.same REVISION [--only plans speed simulations] [--problems 500] [--rounds 5]

The older commit is checked out below runs/ and run by this environment's Python. Plans: seeded problems, small and
large, of every objective, which both sides plan by every strategy; what `offramp plan --json` prints must not differ by
a byte. Simulations: Poisson arrivals at these problems' best plans, of which `offramp simulate --json` must print the
same but for the commit. Speed: processor time of the larger problems, in turns. The exit status is 1 where anything
differs. `tests/experiments/studies/quick_figures.json` holds the figures of studies. Minutes: about 5 on two cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.random import Generator, default_rng

from experiments.checkout import Checkout, checked_out
from experiments.kit import show
from experiments.peers.client import ROOT
from profiles.catalogue import published_profile

WORK = Path("runs/same")
SEED = 19
LARGE = 0.2
"""Share of the problems that are larger than what is tested beside brute force."""
CARDS = ("V100", "T4", "P100", "K80")
LENGTH = 128
TIMED_PROBLEMS = 100
ENOUGH_S = 0.15
"""Seconds of planning above which a problem's time is compared: below, starting costs more."""
PARTS = ("plans", "simulations", "speed")
SIMULATED = ("--arrivals", "poisson:300", "--duration", "3", "--json")
ASK_ALL = """
import contextlib, importlib, io, json, sys, time
module, name = sys.argv[1].split(":")
main = getattr(importlib.import_module(module), name)
command, *options = json.loads(sys.argv[2])
def ask(path):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main([command, path, *options])
    return said
ask(sys.argv[3])  # imports, and loads what is compiled
for path in sys.argv[3:]:
    began_s = time.process_time()
    said = ask(path)
    print(json.dumps({"said": said.getvalue(), "seconds": time.process_time() - began_s}), flush=True)
"""


def random_document(rng: Generator) -> dict[str, Any]:
    """A problem file: blocks with times that fall per input as batches grow, one to four types of accelerators."""
    large = rng.random() < LARGE
    num_blocks = int(rng.integers(8, 25) if large else rng.integers(1, 7))
    ramps = [ramp for ramp in range(num_blocks - 1) if rng.random() < 0.8]
    cards = CARDS[: rng.integers(1, 5 if large else 3)]
    batches = [1, 2, 4, 8, 16, 32] if large else [1, 4, 16]
    latency = {card: _table(rng, num_blocks, len(ramps), batches) for card in cards}
    counts = {card: int(rng.integers(1, 17 if large else 5)) for card in cards}
    whole_s = max(sum(row[-1] for row in table["block_s"]) for table in latency.values())
    rate = sum(counts.values()) * batches[-1] / whole_s
    document: dict[str, Any] = {
        "blocks": num_blocks,
        "ramps": ramps,
        "survival": _survival(rng, num_blocks, ramps),
        "latency": latency,
        "devices": {
            card: {"count": counts[card], "usd_per_hour": round(float(rng.uniform(0, 4)), 2)} for card in cards
        },
        "link": {"bandwidth_bytes_per_s": float(rng.choice([1.25e9, 1e7])), "delay_s": float(rng.choice([0.0, 1e-4]))},
        "bytes_per_sample": float(rng.choice([0.0, 1e4, 2e5])),
        "slo": {"latency_s": whole_s * float(rng.uniform(0.8, 12)), "slack": float(rng.choice([0.0, 0.2]))},
        "objective": {"maximize": "rate"} if rng.random() < 0.6 else {"minimize": "cost", "rate_per_s": rate * 0.3},
    }
    if rng.random() < 0.2:
        document["budget"] = {"usd_per_hour": float(rng.uniform(1, 40))}
    return document


def _table(rng: Generator, num_blocks: int, num_ramps: int, batches: Sequence[int]) -> dict[str, Any]:
    """Seconds with a fixed and a growing part per block; at times BERT's published ones."""
    if rng.random() < 0.2:
        table = published_profile("bert-base", "V100").tables[LENGTH]
        blocks = np.tile(table.block_s_NB[0, : len(batches)], (num_blocks, 1))
        return {"batch": list(batches), "block_s": blocks.tolist(), "ramp_s": (blocks[:num_ramps] * 0.05).tolist()}
    fixed = rng.uniform(0.2, 1.0, (num_blocks, 1)) * 1e-3
    growing = rng.uniform(0.0, 0.3, (num_blocks, 1)) * 1e-3
    block_s = fixed + growing * np.array(batches)
    return {"batch": list(batches), "block_s": block_s.tolist(), "ramp_s": (block_s[:num_ramps] * 0.1).tolist()}


def _survival(rng: Generator, num_blocks: int, ramps: Sequence[int]) -> list[float]:
    """Falls after ramps only."""
    shares = [1.0]
    for block in range(num_blocks - 1):
        shares.append(shares[-1] * (float(rng.uniform(0.5, 1.0)) if block in ramps else 1.0))
    return shares


def planned(side: Checkout, paths: Sequence[Path]) -> list[dict[str, Any]]:
    """What a checkout plans for each problem, and its seconds of processor time."""
    return _asked(side, paths, "plan", "--json")


def _asked(side: Checkout, paths: Sequence[Path], *command: str) -> list[dict[str, Any]]:
    entry = tomllib.loads((side.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]["offramp"]
    done = subprocess.run(
        [sys.executable, "-c", ASK_ALL, entry, json.dumps(command), *(str(path.resolve()) for path in paths)],
        cwd=side.root,
        env=side.environment(OMP_NUM_THREADS="1", NUMBA_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def compare_plans(older: Checkout, ours: Checkout, paths: Sequence[Path]) -> list[str]:
    """Names of the problems of which the two say different things."""
    before, now = planned(older, paths), planned(ours, paths)
    print(f"plans: {len(paths)} problems, {sum('stages' in each['said'] for each in before)} with a plan")
    return [path.name for path, one, other in zip(paths, before, now, strict=True) if one["said"] != other["said"]]


def compare_simulations(older: Checkout, ours: Checkout, paths: Sequence[Path]) -> list[str]:
    """Names of the problems whose plans the two simulate to different figures."""
    before, now = (
        [_without_commit(each["said"]) for each in _asked(side, paths, "simulate", *SIMULATED)]
        for side in (older, ours)
    )
    print(f"simulations: {len(paths)} problems, {sum('simulated' in each for each in before)} simulated")
    return [path.name for path, one, other in zip(paths, before, now, strict=True) if one != other]


def _without_commit(said: str) -> dict[str, Any]:
    """What was printed; of problems without a plan, in words."""
    try:
        document: dict[str, Any] = json.loads(said)
    except ValueError:
        return {"said": said}
    return {name: value for name, value in document.items() if name != "provenance"}


def compare_speed(older: Checkout, ours: Checkout, paths: Sequence[Path], rounds: int) -> None:
    """Print the processor time of both, each problem's least over the rounds, and the median ratio."""
    long = [path for path, each in zip(paths, planned(ours, paths), strict=True) if each["seconds"] >= ENOUGH_S]
    least = {side.name: np.full(len(long), np.inf) for side in (older, ours)}
    for _ in range(rounds):
        for side in (older, ours):
            seconds = np.array([each["seconds"] for each in planned(side, long)])
            least[side.name] = np.minimum(least[side.name], seconds)
    before, now = least[older.name], least[ours.name]
    show(
        f"{len(long)} problems",
        ("", "CPU s", "median ms"),
        [(name, each.sum(), 1000 * float(np.median(each))) for name, each in least.items()],
    )
    print(f"speed: {before.sum() / now.sum():.3f} x in all, {median((before / now).tolist()):.3f} x the median problem")


def main() -> None:
    """Compare, print, and end with 1 where anything differs."""
    parser = ArgumentParser(prog="python -m experiments.same", description=__doc__)
    parser.add_argument("revision")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    older, ours = (
        Checkout(name=options.revision, root=checked_out(options.revision)),
        Checkout(name="this checkout", root=ROOT),
    )
    rng = default_rng(SEED)
    WORK.mkdir(parents=True, exist_ok=True)
    paths = [WORK / f"problem-{number:03}.yaml" for number in range(options.problems)]
    for path in paths:
        path.write_text(json.dumps(random_document(rng)) + "\n", encoding="utf-8")
    different = compare_plans(older, ours, paths) if "plans" in options.only else []
    if "simulations" in options.only:
        different += compare_simulations(older, ours, paths)
    if "speed" in options.only:
        given = sorted(older.root.glob("ex*/problems/*.yaml"))  # later ones it may not understand
        compare_speed(older, ours, [*paths[:TIMED_PROBLEMS], *given], options.rounds)
    print("\n".join(different[:50]))
    print(f"{len(different)} differences")
    sys.exit(1 if different else 0)


if __name__ == "__main__":
    main()
