"""Processor time per answer where batches fill, beside where they begin at once: the same plan, really computed.

    OFFRAMP_DATA=... python -m experiments.live.filling [runs/cascade/small] [--workers 2] [--threads 1] [--rates ...]

One service follows the plan that the planner makes of a profile, with `dispatch: work-conserving` and with `filling`,
in turns, at the same rates and arrivals. Texts are CLINC150's. Writes runs/live/filling-*.json. Minutes: about 5.
"""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from earlyexit.engine import Dispatch
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.live.cascade_sides import SLO_FACTOR, Setup, make_plan
from experiments.peers.client import ClientOptions, write_inputs
from experiments.peers.rounds import SEEDS_PER_ROUND
from experiments.peers.sides import ServedSide, planned_sides
from experiments.peers.turns import per_input
from experiments.trained.mpnet import parts_of
from offramp.jobs.provenance import provenance
from optimizer.plan import Plan
from optimizer.plan_file import plan_document

RULES: tuple[Dispatch, ...] = ("work-conserving", "filling")
COLUMNS = ("rate/s", "dispatch", "CPU ms", "of it stages", "ingress", "mean ms", "p50 ms", "p99 ms", "lost")


def measured(side: ServedSide, rate_per_s: float, seed: int) -> dict[str, Any]:
    """A side at a rate: what the client saw, and processor seconds per request, by part."""
    before = side.server.cpu_s_by_part()
    result = side.measure(rate_per_s, seed)
    spent_s = per_input(before, side.server.cpu_s_by_part(), result.num_sent)
    return result.model_dump(mode="json") | {"cpu_s": dict(spent_s), "lost_share": result.lost_share}


def row(rate_per_s: float, name: str, rounds: Sequence[dict[str, Any]]) -> tuple[object, ...]:
    """Medians of the rounds."""
    cpu = [each["cpu_s"] for each in rounds]
    return (
        rate_per_s,
        name,
        1e3 * median(sum(each.values()) for each in cpu),
        *(1e3 * median(each.get(part, 0.0) for each in cpu) for part in ("stages", "ingress")),
        *(1e3 * median(each[name_s] or 0.0 for each in rounds) for name_s in ("mean_s", "p50_s", "p99_s")),
        f"{median(each['lost_share'] for each in rounds):.1%}",
    )


def run(options: Namespace) -> dict[str, Any]:
    """Plan, serve, measure, print; gives what is written."""
    rows = parts_of("clinc150")["unseen"]
    setup = Setup(
        chain=options.model,
        texts=rows.texts,
        dtype=options.dtype,
        workers=options.workers,
        threads=options.threads,
        batch_limit=options.batch,
        folder=RUNS / "live" / "filling",
    )
    settings, plan, slo_s = make_plan(setup)
    splits = [(split.first, split.end, split.batch, split.ramps) for split in plan.splits]
    print(f"{options.workers} replicas of {options.threads} threads, splits {splits}, SLO {1e3 * slo_s:.0f} ms")
    plans: dict[str, Plan] = {rule: replace(plan, dispatch=rule) for rule in RULES}
    found: dict[str, dict[str, list[dict[str, Any]]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        load = ClientOptions(
            url="",
            inputs=write_inputs(Path(folder) / "inputs.jsonl", rows.texts),
            truncate=True,
            concurrency=1,
            duration_s=options.seconds,
            warmup_s=2.0,
            slo_s=slo_s,
            timeout_s=max(2.0, 4 * slo_s),
        )
        with planned_sides(settings, plans, load, port=options.port) as sides:
            for side in sides:  # kernels for its batches are made
                measured(side, options.rates[0], SEEDS_PER_ROUND)
            for round_index in range(options.rounds):
                for number, rate_per_s in enumerate(options.rates):
                    for side in sides if round_index % 2 else sides[::-1]:
                        one = measured(side, rate_per_s, round_index * SEEDS_PER_ROUND + number)
                        found.setdefault(str(rate_per_s), {}).setdefault(side.name, []).append(one)
                        print(row(rate_per_s, side.name, [one]), flush=True)
    table = [row(rate, rule, found[str(rate)][rule]) for rate in options.rates for rule in RULES]
    show(f"{options.model}, {options.dtype}, medians of {options.rounds}, SLO {SLO_FACTOR} runs", COLUMNS, table)
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "provenance": provenance(),
        "slo_s": slo_s,
        "plan": plan_document(plan),
        "at_rate": found,
    }


def main() -> None:
    """Run and write."""
    parser = ArgumentParser(prog="python -m experiments.live.filling", description=__doc__)
    parser.add_argument("model", nargs="?", type=Path, default=RUNS / "cascade" / "small")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--batch", type=int, default=16, help="inputs in a batch, at most")
    parser.add_argument("--workers", type=int, default=2, help="replicas")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--rates", type=float, nargs="+", default=[150.0, 250.0, 350.0, 450.0], help="requests/s")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=6.0, help="of a turn")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    document = run(options)
    name = f"filling-{options.model.name}-{options.dtype}-{options.workers}x{options.threads}.json"
    print(f"written: {keep(document, RUNS / 'live' / name)}")


if __name__ == "__main__":
    main()
