"""The simulator against the live service, of a cascade: the same requests at the same times on both, within 5 %.

    python -m experiments.live.cascade_simulated [--plans cascade,together,large] [--loads 0.4,0.7,0.95]
    python -m experiments.live.cascade_simulated --compare

6 EMULATED V100, a network of six blocks before one of twelve (`experiments.live.cascade_model`), batches up to 8, SLO
100 ms, all stretched by the time scale. Who crosses is encoded anew by the real ingress; what crossing and calls
cost is measured one request at a time, in a run that is not compared. Every run is kept, in
runs/live/cascade-simulated; `--compare` simulates those. Writes runs/live/cascade-simulated.json. Minutes: 10.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping

from earlyexit.split import Split
from experiments.data import RUNS
from experiments.live.cascade_model import FOLDER as MODEL
from experiments.live.cascade_model import CascadeEmulation, ensure_cascade
from experiments.live.emulation import Bench, emulated
from experiments.live.scenario import EMULATED, parser
from experiments.live.validation import CLUSTER, Compared, compare_all, serve_all
from experiments.live.validation_live import plan_of
from optimizer.plan import Stage

FOLDER = RUNS / "live" / "cascade-simulated"
BOUND = 0.05
RAMPS = (2, 5, 8, 11, 14)
BATCH = 8
PLANS: Mapping[str, tuple[tuple[int, tuple[tuple[int, int], ...]], ...]] = {
    "cascade": ((3, ((0, 6),)), (3, ((6, 12), (12, 18)))),
    "together": ((6, ((0, 6), (6, 12), (12, 18))),),
    "large": ((6, ((6, 12), (12, 18))),),
}
"""By name, replicas and splits of every stage: each network with its own replicas, both on all, the large one alone."""


def main() -> None:
    """Serve what is asked for, compare all that is kept, and say how far the worst figure is off."""
    made = parser("cascade_simulated", __doc__, plans="cascade,together,large", loads="0.4,0.7,0.95", requests=600)
    made.set_defaults(model=MODEL, folder=FOLDER)
    made.add_argument("--compare", action="store_true", help="simulate the kept runs, serve nothing")
    options = made.parse_args()
    on = cascade_bench(options)
    if not options.compare:
        plans = {name: plan_of(on, stages_of(name)) for name in options.plans.split(",")}
        serve_all(on, plans, options.loads.split(","))
    rows = compare_all(FOLDER, on.records)
    print(f"{EMULATED}; {worst(rows)}")


def stages_of(name: str) -> tuple[Stage, ...]:
    """Of one of `PLANS`, with the ramps inside."""
    return tuple(
        Stage(device=emulated("V100"), replicas=replicas, splits=tuple(_split(*bounds) for bounds in splits))
        for replicas, splits in PLANS[name]
    )


def _split(first: int, end: int) -> Split:
    return Split(first=first, end=end, batch=BATCH, ramps=tuple(ramp for ramp in RAMPS if first <= ramp < end))


def cascade_bench(options: Namespace) -> Bench:
    """The emulated cluster, and its cascade."""
    emulation = CascadeEmulation(counts=CLUSTER, time_scale=options.time_scale)
    return Bench(emulation=emulation, model=options.model, records=ensure_cascade(options.model), options=options)


def worst(rows: list[Compared]) -> str:
    """The figure that is furthest off."""
    off = {(row.run, name): ratio - 1 for row in rows for name, ratio in row.ratios.items()}
    (run, name), by = max(off.items(), key=lambda each: abs(each[1]))
    near = sum(abs(each) <= BOUND for each in off.values())
    return f"furthest off: {name} of {run}, {by:+.1%}; {near} of {len(off)} within {BOUND:.0%}"


if __name__ == "__main__":
    main()
