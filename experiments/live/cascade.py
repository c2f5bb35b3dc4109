"""A cascade live beside the large model alone: MiniLM-L6 before all-mpnet-base-v2, exits really computed.

    OFFRAMP_DATA=... python -m experiments.live.cascade [clinc150|ag_news|sst2] [--dtype float32] [--rounds 2]
        [--sides large cascade] [--probes 6]

One service of the chain follows the plans of `experiments.live.cascade_sides` in turns, so that whatever drifts on the
machine hits all sides alike. First the rate of every side: the highest Poisson rate with p99 within the SLO (12.5 runs
of the large model on one text). Then all sides at the same rate, 60 % of the large model's: latency, processor time per
answer, and how many answers are those of the large model alone. Models: `python -m experiments.cascades.models`. Writes
runs/live/cascade-*.json. Minutes: about 14 for CLINC150, mostly the search for rates.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import httpx

from earlyexit.engine import Dispatch
from earlyexit.store import read_card
from experiments.cascades.models import chain_folder
from experiments.data import RUNS
from experiments.kit import Spread, keep, show, spread
from experiments.live.cascade_sides import LARGE, SIDES, Setup, Sides, make_sides
from experiments.peers.client import ClientOptions, LoadResult, write_inputs
from experiments.peers.rounds import PROBE_HEADER, SEEDS_PER_ROUND, Comparison, Hunt, Probe, interleave, probe_line
from experiments.peers.search import Bounds, Target
from experiments.peers.sides import ServedSide, planned_sides
from experiments.peers.turns import per_input
from experiments.trained.mpnet import DataName, parts_of
from offramp.jobs.provenance import provenance
from optimizer.plan_file import plan_document

SHARE = 0.6
"""Of the large model's rate: where all sides are compared at the same load."""
START_SHARE = 0.75
"""Of the most that a closed loop got on any side: where the search for a rate starts on all of them. A closed loop
right after a change of plans says little of its own side: kernels for its batches are made while it runs."""
CLIENTS = 48
SETTLED_S = 0.5
WARM_UP_S = 3.0
"""Admission learns of another plan meanwhile."""


class Ran(NamedTuple):
    """Of one network's splits, in all replicas."""

    batches: float
    inputs: float
    """Of every split: who runs two of them counts twice."""
    busy_s: float

    def since(self, sooner: Ran) -> Ran:
        """What was run between."""
        return Ran(*(own - other for own, other in zip(self, sooner, strict=True)))

    def document(self, num_requests: int) -> dict[str, float]:
        """Mean batch, and seconds of the device for a request and for an input."""
        return {
            "mean_batch": self.inputs / max(1, self.batches),
            "s_per_request": self.busy_s / max(1, num_requests),
            "s_per_input": self.busy_s / max(1, self.inputs),
        }


@dataclass(slots=True)
class Bench:
    """All sides of one service, up."""

    options: Namespace
    sides: Sequence[ServedSide]
    slo_s: float
    bounds: Sequence[int]
    """Where each network ends."""
    folder: Path
    """For answers."""
    at_rate: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def rates(self) -> Comparison:
        """Every side's highest rate within the SLO, in rounds of turns."""
        closed_per_s = {}
        for side in self.sides:
            closed = side.saturate(CLIENTS, self.options.seconds / 2)
            closed_per_s[side.name] = closed.answered_per_s
            print(f"{side.name:<14} closed loop of {CLIENTS}: {closed.answered_per_s:7.1f}/s", flush=True)
        starts = dict.fromkeys(closed_per_s, max(1.0, START_SHARE * max(closed_per_s.values())))
        hunt = Hunt(
            num_rounds=self.options.rounds,
            starts_per_s=starts,
            bounds=Bounds(
                low_per_s=min(starts.values()) / 10,
                high_per_s=max(starts.values()) * 10,
                resolution=0.05,
                most_probes=self.options.probes,
            ),
            target=Target(slo_s=self.slo_s),
            cold_growth=1.12,
        )
        print(PROBE_HEADER, flush=True)
        return interleave(self.sides, hunt, _print_probe)

    def same_rate(self, rate_per_s: float) -> None:
        """All sides at one rate, the same arrivals, in turns."""
        for turn in range(self.options.rounds + 1):
            order = [*self.sides[turn % len(self.sides) :], *self.sides[: turn % len(self.sides)]]
            for side in order:
                side.saturate(CLIENTS, SETTLED_S)  # replicas take a plan up with its first call
                before, ran = side.server.cpu_s_by_part(), self._ran(side)
                path = self.folder / f"{SIDES.index(side.name)}.answers"
                answering = replace(side, load=side.load.model_copy(update={"answers": path}))
                result = answering.measure(rate_per_s, turn * SEEDS_PER_ROUND)
                spent_s = per_input(before, side.server.cpu_s_by_part(), result.num_sent)
                networks = [later.since(sooner) for later, sooner in zip(self._ran(side), ran, strict=True)]
                figures = {"networks": [each.document(result.num_sent) for each in networks]}
                self.at_rate.setdefault(side.name, []).append(_figures(result, spent_s) | figures)
                print(f"{side.name:<14} at {rate_per_s:.1f}/s: {_told(result)}; {_networks_told(networks)}", flush=True)

    def _ran(self, side: ServedSide) -> list[Ran]:
        """By network, what its splits have run since they were first hosted."""
        stages = httpx.get(f"{side.server.url}/stats").raise_for_status().json()["stages"]
        splits = [split for replicas in stages for replica in replicas for split in replica["splits"]]
        return [
            Ran(*(sum(split[name] for split in splits if first <= split["first"] < end) for name in Ran._fields))
            for first, end in zip((0, *self.bounds), self.bounds, strict=False)
        ]

    def answers(self, side: str) -> dict[int, dict[str, Any]]:
        """By text, what a side said of it last."""
        lines = (self.folder / f"{SIDES.index(side)}.answers").read_text(encoding="utf-8").splitlines()
        return {row["input"]: row for row in map(json.loads, lines)}


def _figures(result: LoadResult, spent_s: Mapping[str, float]) -> dict[str, Any]:
    return result.model_dump(mode="json") | {"cpu_s": dict(spent_s)}


def _told(result: LoadResult) -> str:
    figures = [f"{1e3 * (value or 0):.1f}" for value in (result.mean_s, result.p50_s, result.p99_s)]
    return f"mean {figures[0]} ms, p50 {figures[1]} ms, p99 {figures[2]} ms, errors {result.errors or 'none'}"


def _networks_told(networks: Sequence[Ran]) -> str:
    return ", ".join(
        f"network {place}: batches of {ran.inputs / ran.batches:.1f}, {1e3 * ran.busy_s / ran.inputs:.1f} ms an input"
        for place, ran in enumerate(networks)
        if ran.inputs
    )


def _print_probe(probe: Probe) -> None:
    print(probe_line(probe), flush=True)


def told_answers(
    bench: Bench, labels: Sequence[str], drawn: Sequence[int], sides: Sequence[str] = SIDES
) -> dict[str, dict[str, Any]]:
    """Of every side: agreement with the large model alone, accuracy, and which network answered."""
    alone = bench.answers(LARGE)
    found = {}
    for side in sides:
        said = bench.answers(side)
        both = [index for index in said if index in alone]
        found[side] = {
            "answers": len(said),
            "agreement": sum(said[index]["label"] == alone[index]["label"] for index in both) / max(1, len(both)),
            "accuracy": sum(row["label"] == labels[drawn[index]] for index, row in said.items()) / max(1, len(said)),
            "by_network": [
                sum(first <= row["exit"] < end for row in said.values()) / max(1, len(said))
                for first, end in zip((0, *bench.bounds), bench.bounds, strict=False)
            ],
        }
    return found


def table(
    comparison: Comparison, at_rate: Mapping[str, Sequence[Mapping[str, Any]]], said: Mapping[str, Mapping[str, Any]]
) -> list[tuple[object, ...]]:
    """Medians of the rounds, side by side."""
    rows: list[tuple[object, ...]] = []
    large = at_rate[LARGE]
    for side in said:
        rate, own, times = comparison.spread(side), at_rate[side], times_large(comparison, side)
        cpu_s = [sum(each["cpu_s"].values()) for each in own]
        rows.append(
            (
                side,
                None if rate is None else rate.median,
                None if times is None else times.median,
                *(1e3 * median(each[name] for each in own) for name in ("mean_s", "p50_s", "p99_s")),
                *(median(a[name] / b[name] for a, b in zip(own, large, strict=True)) for name in ("mean_s", "p99_s")),
                1e3 * median(cpu_s),
                1e3 * median(each["cpu_s"].get("stages", 0.0) for each in own),
                f"{said[side]['agreement']:.2%}",
                f"{said[side]['accuracy']:.2%}",
                " ".join(f"{share:.0%}" for share in said[side]["by_network"]),
            )
        )
    return rows


COLUMNS = (
    *("side", "rate/s", "x large", "mean ms", "p50 ms", "p99 ms", "mean x", "p99 x"),
    *("CPU ms", "of it stages", "as large", "accuracy", "by network"),
)


def run(options: Namespace) -> dict[str, Any]:
    """Plan, serve, measure, print; gives what is written."""
    rows = parts_of(options.data)["unseen"]
    setup = Setup(
        chain=chain_folder(options.data),
        texts=rows.texts,
        dtype=options.dtype,
        workers=options.workers,
        threads=options.threads,
        batch_limit=options.batch,
        folder=RUNS / "live" / "cascade" / options.data,
    )
    sides: Sides = make_sides(setup)
    asked = {name: replace(sides.plans[name], dispatch=options.dispatch) for name in SIDES if name in options.sides}
    sides = replace(sides, plans=asked)
    for name, plan in sides.plans.items():
        splits = [(split.first, split.end, split.batch, split.ramps) for split in plan.splits]
        told = f"{plan.stages[0].replicas} replicas, planned {plan.predicted['rate_per_s']:.0f}/s"
        print(f"{name:<14} {told}, splits (first, end, batch, ramps) {splits}", flush=True)
    drawn = list(range(len(rows))) * (1 + 4000 // len(rows))
    with tempfile.TemporaryDirectory() as folder:
        load = ClientOptions(
            url="",
            inputs=write_inputs(Path(folder) / "inputs.jsonl", [rows.texts[row] for row in drawn]),
            truncate=True,
            concurrency=1,
            duration_s=options.seconds,
            warmup_s=WARM_UP_S,
            slo_s=sides.slo_s,
            timeout_s=max(2.0, 4 * sides.slo_s),
        )
        bounds = read_card(setup.chain).chain.bounds
        with planned_sides(sides.settings, sides.plans, load, port=options.port) as served:
            bench = Bench(options=options, sides=served, slo_s=sides.slo_s, bounds=bounds, folder=Path(folder))
            comparison = bench.rates()
            rate = comparison.spread(LARGE)
            assert rate is not None, "the large model alone has a rate"
            bench.same_rate(SHARE * rate.median)
        said = told_answers(bench, rows.labels, drawn, tuple(asked))
    title = (
        f"{options.data}, {options.dtype}: SLO {sides.slo_s * 1e3:.0f} ms, {sides.mean_length} tokens on average; "
        f"the rest at {SHARE * rate.median:.1f}/s; medians of {options.rounds} and {options.rounds + 1} rounds"
    )
    show(title, COLUMNS, table(comparison, bench.at_rate, said))
    return {
        "options": vars(options),
        "provenance": provenance(),
        "slo_s": sides.slo_s,
        "plans": {name: plan_document(plan) for name, plan in sides.plans.items()},
        "block_s": sides.table.block_s_NB.tolist(),
        "rates": comparison.document(),
        "times_large": {side: each and each._asdict() for side, each in _times(comparison).items()},
        "at_rate": bench.at_rate,
        "answers": said,
    }


def _times(comparison: Comparison) -> dict[str, Spread | None]:
    return {side: times_large(comparison, side) for side in dict.fromkeys(each.side for each in comparison.rounds)}


def times_large(comparison: Comparison, side: str) -> Spread | None:
    """Of a side's rate over the large model's, within rounds."""
    reached = {(each.round_index, each.side): each.sustained_per_s for each in comparison.rounds}
    pairs = [(value, reached.get((index, LARGE))) for (index, name), value in reached.items() if name == side]
    return spread(own / other for own, other in pairs if own and other)


def main() -> None:
    """Run and write."""
    parser = ArgumentParser(prog="python -m experiments.live.cascade", description=__doc__)
    parser.add_argument("data", nargs="?", choices=get_args(DataName), default="clinc150")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=16, help="inputs in a batch, at most")
    parser.add_argument("--workers", type=int, default=2, help="replicas")
    parser.add_argument("--threads", type=int, default=1, help="of each")
    parser.add_argument("--dispatch", choices=get_args(Dispatch), default="work-conserving")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=SIDES, help="the large model alone is one of them")
    parser.add_argument("--probes", type=int, default=6, help="of the search for a side's rate, at most")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0, help="of a probe")
    parser.add_argument("--port", type=int, default=8000)
    options = parser.parse_args()
    if LARGE not in options.sides:
        parser.error(f"--sides needs {LARGE!r}, which the others are held against")
    signal.signal(signal.SIGTERM, partial(_ended, 143))  # so that the service is ended
    document = run(options)
    print(f"written: {keep(document, RUNS / 'live' / f'cascade-{options.data}-{options.dtype}.json')}")


def _ended(status: int, *_: object) -> None:
    sys.exit(status)


if __name__ == "__main__":
    main()
