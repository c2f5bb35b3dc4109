"""The simulator against the live service: three plans under several loads, the same requests at the same times on both.

    python -m experiments.live.validation [--plans stock,e3,best] [--loads 0.4,0.7,0.95,1.2] [--requests 600]
    python -m experiments.live.validation --compare

6 EMULATED V100, batches up to 8, SLO 100 ms, all stretched by the time scale; exits as recorded; no controller. Loads
are shares of each plan's predicted rate, Poisson arrivals of requests of 8 inputs, a fresh service for every run. What
calls cost beyond the accelerators' time is measured per plan, one request at a time, in a run that is not compared.
Every run is kept in runs/live/validation; `--compare` simulates what is kept and serves nothing. Writes
runs/live/validation.json. Minutes: 27, of which the simulations take seconds.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from earlyexit.errors import DataError
from experiments.live.figures import EMULATED, Figures, figures, usage_words, write
from experiments.live.model import ensure_model
from experiments.live.options import Bench, bench, parser
from experiments.live.validation_live import exits_of, idle_phase, load_phase, serve_run, side_of
from experiments.live.validation_runs import FOLDER, IDLE, Run, SplitDocument, keep, read_run
from experiments.live.validation_simulated import Overhead, as_driven, later, overhead_of, scenario_of
from offramp.jobs.provenance import provenance
from optimizer.decision import Strategy
from optimizer.plan_file import parse_plan
from profiles.records import ExitRecords
from simulator.outcome import SplitUse
from simulator.simulate import simulate

CLUSTER = {"V100": 6}
BOUNDS: Mapping[str, float] = {"goodput_per_s": 0.05, "p50_s": 0.10, "p99_s": 0.20}
"""How far a simulated figure may be from the live one, as a share of it."""
NUM_AGAIN = 20
"""Simulations beside the one that is compared, of the same requests a little later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """One run on both sides; shares are of the live figure, by the name of the figure."""

    run: str
    live: Figures
    simulated: Figures
    scatter: Mapping[str, float]
    """Standard deviation over simulations in which requests come a few milliseconds later."""
    fill: Mapping[str, tuple[float | None, float | None]]
    """By the blocks of a split, how full its batches were, live and simulated; None where it ran none."""
    other_exits: int
    """Requests of which the service let an input out elsewhere than the records say."""
    machine: float
    """Share of the CPU in the live run."""

    @property
    def ratios(self) -> dict[str, float]:
        """Simulated over live; NaN where one side has no such figure."""
        return {name: figure(self.simulated, name) / (figure(self.live, name) or np.nan) for name in BOUNDS}

    @property
    def within(self) -> dict[str, bool]:
        """Whether each figure is as near as it must be."""
        return {name: abs(ratio - 1) <= BOUNDS[name] for name, ratio in self.ratios.items()}


def main() -> None:
    """Serve what is asked for, then compare all that is kept."""
    options = _options().parse_args()
    if not options.compare:
        serve_all(bench(options, CLUSTER), options.plans.split(","), options.loads.split(","))
    compare_all(options.folder, ensure_model(options.model))


def _options() -> ArgumentParser:
    made = parser("validation", __doc__)
    made.add_argument("--plans", default="stock,e3,best")
    made.add_argument("--loads", default="0.4,0.7,0.95,1.2")
    made.add_argument("--requests", type=int, default=600)
    made.add_argument("--folder", type=Path, default=FOLDER)
    made.add_argument("--compare", action="store_true", help="simulate the kept runs, serve nothing")
    return made


def serve_all(on: Bench, plans: Sequence[str], loads: Sequence[str]) -> None:
    """Every plan idle, then under every load; each run is kept as it ends."""
    print(f"{EMULATED} {on.options.time_scale:g} times")
    for name in plans:
        side = side_of(on, cast(Strategy, name))
        stages = ", ".join(f"{stage.replicas} x {stage.first}-{stage.end - 1}" for stage in side.plan.stages)
        print(f"{name}: {stages}; {side.rate_per_s:.1f}/s predicted")
        phases = [idle_phase(on, side), *(load_phase(on, side, float(share), on.options.requests) for share in loads)]
        for phase in phases:
            run = serve_run(on, side, phase)
            path = keep(run, on.options.folder)
            asked = f"{len(run.rows)} requests in {run.seconds:.0f} s"
            print(f"{run.name}: {asked}; {usage_words(run.driven().usage)}; {path}")


def compare_all(folder: Path, records: ExitRecords) -> None:
    """Simulate every kept run, print the table, write it."""
    found = [read_run(path) for path in sorted(folder.glob("*.json"))]
    overheads = {run.plan_name: overhead_of(run, records) for run in found if run.load == IDLE}
    for name, each in overheads.items():
        print(f"{name}: calls cost {each.entry_s * 1e3:.1f} ms, {each.hop_s * 1e3:.1f} ms more per further stage")
    rows = [compare(run, records, _overhead(overheads, run)) for run in found if run.load != IDLE]
    for line in table(rows):
        print(line)
    write(folder.name, _document(found, overheads, rows))


def _overhead(overheads: Mapping[str, Overhead], run: Run) -> Overhead:
    if run.plan_name not in overheads:
        raise DataError(f"no idle run of {run.plan_name} is kept: what calls cost is not known")
    return overheads[run.plan_name]


def compare(run: Run, records: ExitRecords, overhead: Overhead, *, num_again: int = NUM_AGAIN) -> Compared:
    """The run's figures, the simulator's, and how far the simulator's own scatter."""
    rng = np.random.default_rng(0)
    live = figures(run.driven(), run.warm_s, run.seconds)
    outcome = simulate(scenario_of(run, records, overhead))
    again = [as_driven(each, simulate(scenario_of(each, records, overhead))) for each in _later(run, rng, num_again)]
    return Compared(
        run=run.name,
        live=live,
        simulated=figures(as_driven(run, outcome), run.warm_s, run.seconds),
        scatter=_scatter(live, [figures(each, run.warm_s, run.seconds) for each in again]),
        fill=_fill(run.splits, outcome.splits),
        other_exits=_other_exits(run, records),
        machine=run.usage.machine,
    )


def _later(run: Run, rng: np.random.Generator, num_again: int) -> list[Run]:
    return [later(run, rng) for _ in range(num_again)]


def _scatter(live: Figures, again: Sequence[Figures]) -> dict[str, float]:
    if not again:
        return {}
    return {
        name: float(np.std([figure(each, name) for each in again])) / (figure(live, name) or np.nan) for name in BOUNDS
    }


def _fill(
    live: Sequence[SplitDocument], simulated: Sequence[SplitUse]
) -> dict[str, tuple[float | None, float | None]]:
    live_of = {f"{split.first}-{split.end - 1}": split.fill for split in live if split.batches}
    simulated_of = {f"{split.first}-{split.end - 1}": split.fill for split in simulated}
    return {blocks: (live_of.get(blocks), simulated_of.get(blocks)) for blocks in {**live_of, **simulated_of}}


def _other_exits(run: Run, records: ExitRecords) -> int:
    said_N = exits_of(records, parse_plan(run.plan))
    answered = [(rows, exits) for rows, exits in zip(run.rows, run.exits, strict=True) if exits]
    return sum(said_N[rows].tolist() != exits for rows, exits in answered)


def figure(of: Figures, name: str) -> float:
    """One of `BOUNDS`; NaN where it is not defined."""
    value = getattr(of, name)
    return np.nan if value is None else float(value)


def table(rows: Sequence[Compared]) -> list[str]:
    """Per figure: live, simulated, their ratio, and the simulator's own scatter; then how many are near enough."""
    lines = [f"{'run':<11} " + "".join(f"{name:<33}" for name in BOUNDS) + "CPU   refused or failed"]
    for row in rows:
        cells = [
            f"{figure(row.live, name):7.3f} {figure(row.simulated, name):7.3f} {ratio:5.3f} "
            f"+-{row.scatter.get(name, np.nan):5.1%} {' ' if row.within[name] else '!'} "
            for name, ratio in row.ratios.items()
        ]
        failed = f"{sum(row.live.errors.values())}, {sum(row.simulated.errors.values())}"
        lines.append(f"{row.run:<11} " + "".join(f"{cell:<33}" for cell in cells) + f"{row.machine:.0%}  {failed}")
    return [*lines, *_verdicts(rows)]


def _verdicts(rows: Sequence[Compared]) -> list[str]:
    verdicts = [
        f"{name}: {sum(row.within[name] for row in rows)} of {len(rows)} within {bound:.0%}"
        for name, bound in BOUNDS.items()
    ]
    others = [f"{row.run}: {row.other_exits} requests left elsewhere" for row in rows if row.other_exits]
    return [*verdicts, *others]


def _document(runs: Sequence[Run], overheads: Mapping[str, Overhead], rows: Sequence[Compared]) -> dict[str, Any]:
    return {
        "provenance": provenance(kept={run.name: run.provenance for run in runs}),
        "bounds": dict(BOUNDS),
        "overheads": {name: asdict(overhead) for name, overhead in overheads.items()},
        "runs": [asdict(row) | {"ratios": row.ratios, "within": row.within} for row in rows],
    }


if __name__ == "__main__":
    main()
