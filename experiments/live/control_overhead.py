"""What the controller costs: latency with and without it at the same plan, and the seconds of a planning cycle.

    python -m experiments.live.control_overhead [--rounds 3] [--minutes 0.75]

16 EMULATED V100, the best plan, open loop at 60 % of what it does. Three sides take turns, a service each: without a
controller, with one and no probes, with one and 2 % probes. The controller plans every 15 s and may never find a plan
worth a change, so that all sides serve by the same one. Writes runs/live/control_overhead.json. Minutes: 10.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from experiments.kit import show
from experiments.live.emulation import Bench
from experiments.live.scenario import command, judged, played
from experiments.live.service import Service, control_settings
from optimizer.decision import Planned

SIDES = {"without": None, "controller": 0.0, "controller and probes": 0.02}
"""The share of probes; None for no controller."""
SHARE = 0.6
WARM_S = 10.0
PERIOD_S = 15.0
NEVER_WORTH = 1e6
"""A gain that no plan has."""


def run(on: Bench) -> dict[str, Any]:
    """The sides take turns; medians over the rounds, and their ratios to the side without a controller."""
    planned = on.best()
    rounds = [{side: served(on, planned, side) for side in SIDES} for _ in range(on.options.rounds)]
    base = middle(rounds, "without")
    rows = []
    for side in SIDES:
        p50_s, p99_s, machine = middle(rounds, side)
        times = [f"{s * 1e3:.0f} ({s / of:.3f} x)" for s, of in ((p50_s, base[0]), (p99_s, base[1]))]
        rows.append((side, *times, f"{machine:.1%}"))
    show("medians of the rounds", ("", "p50 ms", "p99 ms", "CPU"), rows)
    phases_s = (rounds[-1]["controller and probes"]["description"].get("phases_s") or {}).items()
    told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases_s)
    print(f"a planning cycle: {told or 'the controller tells no times'}")
    return {"rounds": rounds}


def served(on: Bench, planned: Planned, side: str) -> dict[str, Any]:
    """One side's service under the load."""
    probe_share = SIDES[side]
    control = None
    if probe_share is not None:
        control = control_settings(
            on.problem, on.spec, state="overhead", period_s=PERIOD_S, watch_s=2.0, least_gain=NEVER_WORTH
        )
    seconds = WARM_S + 60 * on.options.minutes
    load = on.steady(side, seconds, SHARE * planned.figures.rate_per_s)
    after = None if control is None else Service.describe
    result = played(on, on.plan(planned.stages), [load], control, after=after, probe_share=probe_share or 0.0)
    told = judged(on, result.driven, {side: [(WARM_S, seconds)]})
    return {**told, "description": result.after or {}}


def middle(rounds: Sequence[Mapping[str, Any]], side: str) -> tuple[float, float, float]:
    """Median p50, p99 and CPU share of a side; NaN where nothing was answered."""
    windows = [each[side]["windows"][side] for each in rounds]
    p50_s, p99_s = (median(getattr(each, name) or float("nan") for each in windows) for name in ("p50_s", "p99_s"))
    return p50_s, p99_s, median(each[side]["usage"].machine for each in rounds)


if __name__ == "__main__":
    command("control_overhead", __doc__, run, {"V100": 16}, rounds=3, minutes=0.75)
