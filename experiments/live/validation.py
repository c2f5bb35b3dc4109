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

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from earlyexit.errors import DataError
from experiments.kit import show
from experiments.live.emulation import Bench, bench
from experiments.live.figures import WindowFigures, figures
from experiments.live.model import ensure_model
from experiments.live.scenario import EMULATED, parser, write
from experiments.live.validation_live import idle_phase, load_phase, plan_of, serve_run
from experiments.live.validation_runs import FOLDER, IDLE, Run, SplitDocument, exits_of, keep_run, read_run
from experiments.live.validation_simulated import Overhead, as_driven, later, overhead_of, scenario_of, simulated
from offramp.jobs.provenance import provenance
from optimizer.decision import Strategy
from optimizer.plan import Plan
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
    live: WindowFigures
    simulated: WindowFigures
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

    def document(self) -> dict[str, Any]:
        """As plain data, without what JSON has not."""
        known = {"ratios": _known(self.ratios), "scatter": _known(self.scatter), "within": self.within}
        return asdict(self) | known


def main() -> None:
    """Serve what is asked for, then compare all that is kept."""
    made = parser("validation", __doc__, plans="stock,e3,best", loads="0.4,0.7,0.95,1.2", requests=600)
    made.add_argument("--folder", type=Path, default=FOLDER)
    made.add_argument("--compare", action="store_true", help="simulate the kept runs, serve nothing")
    options = made.parse_args()
    if not options.compare:
        on = bench(options, CLUSTER)
        plans = {name: plan_of(on, on.best(cast(Strategy, name)).stages) for name in options.plans.split(",")}
        serve_all(on, plans, options.loads.split(","))
    compare_all(options.folder, ensure_model(options.model))


def serve_all(on: Bench, plans: Mapping[str, Plan], loads: Sequence[str]) -> None:
    """Every plan, by its name, idle, then under every load; each run is kept as it ends."""
    print(f"{EMULATED} {on.options.time_scale:g} times")
    for name, plan in plans.items():
        stages = ", ".join(f"{stage.replicas} x {stage.first}-{stage.end - 1}" for stage in plan.stages)
        print(f"{name}: {stages}; {plan.predicted['rate_per_s']:.1f}/s predicted")
        for phase in (
            idle_phase(on, plan),
            *(load_phase(on, plan, float(share), on.options.requests) for share in loads),
        ):
            run = serve_run(on, name, plan, phase)
            path = keep_run(run, on.options.folder)
            print(f"{run.name}: {len(run.rows)} requests in {run.seconds:.0f} s; {run.driven().usage.told()}; {path}")


def compare_all(folder: Path, records: ExitRecords) -> list[Compared]:
    """Simulate every kept run, print the table, write it."""
    found = [read_run(path) for path in sorted(folder.glob("*.json"))]
    overheads = {run.plan_name: overhead_of(run, records) for run in found if run.load == IDLE}
    for name, each in overheads.items():
        print(f"{name}: calls cost {each.entry_s * 1e3:.1f} ms, {each.hop_s * 1e3:.1f} ms more per further stage")
    rows = [compare(run, records, _overhead(overheads, run)) for run in found if run.load != IDLE]
    columns = ("run", *(f"{name}{part}" for name in BOUNDS for part in ("", " simulated", " ratio")), "CPU", "failed")
    show("live and simulated", columns, [_cells(row) for row in rows])
    print(*verdicts(rows), sep="\n")
    document = {
        "provenance": provenance(kept={run.name: run.provenance for run in found}),
        "bounds": dict(BOUNDS),
        "overheads": overheads,
        "runs": [row.document() for row in rows],
    }
    write(folder.name, document)
    return rows


def _overhead(overheads: Mapping[str, Overhead], run: Run) -> Overhead:
    if run.plan_name not in overheads:
        raise DataError(f"no idle run of {run.plan_name} is kept: what calls cost is not known")
    return overheads[run.plan_name]


def compare(run: Run, records: ExitRecords, overhead: Overhead, *, num_again: int = NUM_AGAIN) -> Compared:
    """The run's figures, the simulator's, and how far the simulator's own scatter."""
    rng, window = np.random.default_rng(0), (run.warm_s, run.seconds)
    live = figures(run.driven(), window)
    outcome = simulate(scenario_of(run, records, overhead))
    again = [figures(simulated(later(run, rng), records, overhead), window) for _ in range(num_again)]
    return Compared(
        run=run.name,
        live=live,
        simulated=figures(as_driven(run, outcome), window),
        scatter={
            name: float(np.std([figure(each, name) for each in again])) / (figure(live, name) or np.nan)
            for name in (BOUNDS if again else ())
        },
        fill=_fill(run.splits, outcome.splits),
        other_exits=_other_exits(run, records),
        machine=run.usage["machine"],
    )


def _fill(live: Sequence[SplitDocument], simulated: Sequence[SplitUse]) -> dict[str, tuple[float | None, float | None]]:
    live_of = {f"{split.first}-{split.end - 1}": split.fill for split in live if split.batches}
    simulated_of = {f"{split.first}-{split.end - 1}": split.fill for split in simulated}
    return {blocks: (live_of.get(blocks), simulated_of.get(blocks)) for blocks in {**live_of, **simulated_of}}


def _other_exits(run: Run, records: ExitRecords) -> int:
    said_N = exits_of(records, parse_plan(run.plan))
    answered = [(rows, exits) for rows, exits in zip(run.rows, run.exits, strict=True) if exits]
    return sum(said_N[rows].tolist() != exits for rows, exits in answered)


def figure(of: WindowFigures, name: str) -> float:
    """One of `BOUNDS`; NaN where it is not defined."""
    value = getattr(of, name)
    return np.nan if value is None else float(value)


def _known(shares: Mapping[str, float]) -> dict[str, float | None]:
    return {name: None if np.isnan(share) else share for name, share in shares.items()}


def _cells(row: Compared) -> list[str]:
    cells = [row.run]
    for name, ratio in row.ratios.items():
        scatter = f"{ratio:.3f} +-{row.scatter.get(name, np.nan):.1%}{'' if row.within[name] else ' !'}"
        cells += [f"{figure(row.live, name):.3f}", f"{figure(row.simulated, name):.3f}", scatter]
    failed = f"{sum(row.live.errors.values())}, {sum(row.simulated.errors.values())}"
    return [*cells, f"{row.machine:.0%}", failed]


def verdicts(rows: Sequence[Compared]) -> list[str]:
    """How many figures are near enough, and which runs left elsewhere than recorded."""
    near = [
        f"{name}: {sum(row.within[name] for row in rows)} of {len(rows)} within {bound:.0%}"
        for name, bound in BOUNDS.items()
    ]
    return near + [f"{row.run}: {row.other_exits} requests left elsewhere" for row in rows if row.other_exits]


if __name__ == "__main__":
    main()
