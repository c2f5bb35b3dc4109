"""The simulator against the live service, of a cascade: the same requests at the same times on both, within 5 %.

    python -m experiments.live.cascade_simulated [--plans best,serial] [--loads 0.4,0.7,0.95] [--requests 600]
    python -m experiments.live.cascade_simulated --compare

6 EMULATED V100, a network of six blocks before one of twelve (`experiments.live.cascade_model`), batches up to 8, SLO
100 ms, all stretched by the time scale. Who crosses is encoded anew by the real ingress; what crossing and calls
cost is measured one request at a time, in a run that is not compared. Every run is kept, in
runs/live/cascade-simulated; `--compare` simulates those. Writes runs/live/cascade-simulated.json. Minutes: 10.
"""

from __future__ import annotations

from argparse import Namespace

from experiments.data import RUNS
from experiments.live.cascade_model import FOLDER as MODEL
from experiments.live.cascade_model import CascadeEmulation, ensure_cascade
from experiments.live.emulation import Bench
from experiments.live.scenario import EMULATED, parser
from experiments.live.validation import CLUSTER, Compared, compare_all, serve_all

FOLDER = RUNS / "live" / "cascade-simulated"
BOUND = 0.05


def main() -> None:
    """Serve what is asked for, compare all that is kept, and say how far the worst figure is off."""
    made = parser("cascade_simulated", __doc__, plans="best,serial", loads="0.4,0.7,0.95", requests=600)
    made.set_defaults(model=MODEL, folder=FOLDER)
    made.add_argument("--compare", action="store_true", help="simulate the kept runs, serve nothing")
    options = made.parse_args()
    on = cascade_bench(options)
    if not options.compare:
        serve_all(on, options.plans.split(","), options.loads.split(","))
    rows = compare_all(FOLDER, on.records)
    print(f"{EMULATED}; {worst(rows)}")


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
