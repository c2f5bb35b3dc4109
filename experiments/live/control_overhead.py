"""What the controller costs: latency with and without it at the same plan, and the seconds of a planning cycle.

    python -m experiments.live.control_overhead [--rounds 3] [--minutes 0.75]

16 EMULATED V100, the best plan, open loop at 60 % of what it does. Three sides take turns, a service each: without a
controller, with one and no probes, with one and 2 % probes. The controller plans every 15 s and may never find a plan
worth a change, so that all sides serve by the same one. Writes runs/live/control_overhead.json. Minutes: 10.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from experiments.live.emulation import best_plan, plan_of
from experiments.live.figures import EMULATED, Figures, figures, usage_words, write
from experiments.live.load import Driven, drive
from experiments.live.options import Bench, bench, parser
from experiments.live.phases import Phase
from experiments.live.service import Service, control_settings, emulated_settings, served
from optimizer.decision import Planned

SIDES = {"without": (False, 0.0), "controller": (True, 0.0), "controller and probes": (True, 0.02)}
"""Whether there is a controller, and the share of probes."""
SHARE = 0.6
WARM_S = 10.0
PERIOD_S = 15.0
NEVER_WORTH = 1e6
"""A gain that no plan has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One side, once."""

    side: str
    figures: Figures
    machine: float
    """Share of the CPU."""
    description: Mapping[str, Any]
    """Of the controller, at the end; empty without one."""


def main() -> None:
    """Take turns, print the medians, write all rounds."""
    made = parser("control_overhead", __doc__)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--minutes", type=float, default=0.75)
    options = made.parse_args()
    on = bench(options, {"V100": 16})
    planned = best_plan(on.emulation.problem(on.records.outcome(on.thresholds).survival), "best", on.records)
    print(f"{EMULATED} {options.time_scale:g} times")
    rounds = [run(on, planned, side) for _ in range(options.rounds) for side in SIDES]
    report(rounds)
    write("control_overhead", {"time_scale": options.time_scale, "rounds": [asdict(each) for each in rounds]})


def run(on: Bench, planned: Planned, side: str) -> Round:
    """One side's service under the load."""
    with_controller, probe_share = SIDES[side]
    plan = plan_of(planned.stages, on.spec)
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    control = None
    if with_controller:
        control = control_settings(
            problem, on.spec, state="overhead", period_s=PERIOD_S, watch_s=2.0, least_gain=NEVER_WORTH
        )
    settings = emulated_settings(on.emulation, on.model, plan, control=control, probe_share=probe_share)
    load = Phase(
        name=side,
        seconds=WARM_S + 60 * on.options.minutes,
        keys=on.records.sample_ids,
        rate_per_s=SHARE * planned.figures.rate_per_s,
    )
    with served(settings, plan, port=on.options.port, front=on.options.front) as service:
        driven, description = asyncio.run(_load(on, service, load, with_controller=with_controller))
    print(f"{side}: {usage_words(driven.usage)}")
    return Round(
        side=side,
        figures=figures(driven, WARM_S, load.seconds),
        machine=driven.usage.machine,
        description=description,
    )


async def _load(on: Bench, service: Service, load: Phase, *, with_controller: bool) -> tuple[Driven, dict[str, Any]]:
    driven = await drive(service.url, [load], slo_s=on.emulation.wall_slo_s, seed=on.options.seed)
    return driven, await service.describe() if with_controller else {}


def report(rounds: Sequence[Round]) -> None:
    """Medians over the rounds, and the ratios to the side without a controller."""
    base = middle(rounds, "without")
    print("side                    p50 ms          p99 ms         CPU")
    for side in SIDES:
        p50_s, p99_s, machine = middle(rounds, side)
        print(
            f"{side:<22} {p50_s * 1e3:7.0f} ({p50_s / base[0]:.3f} x) {p99_s * 1e3:7.0f} ({p99_s / base[1]:.3f} x) "
            f"{machine:6.1%}"
        )
    phases = cycle_seconds(rounds[-1].description)
    told = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())
    print(f"a planning cycle: {told or 'the controller tells no times'}")


def middle(rounds: Sequence[Round], side: str) -> tuple[float, float, float]:
    """Median p50, p99 and CPU share of a side; NaN where nothing was answered."""
    mine = [each for each in rounds if each.side == side]
    nan = float("nan")
    return (
        median(nan if each.figures.p50_s is None else each.figures.p50_s for each in mine),
        median(nan if each.figures.p99_s is None else each.figures.p99_s for each in mine),
        median(each.machine for each in mine),
    )


def cycle_seconds(description: Mapping[str, Any]) -> dict[str, float]:
    """Seconds by phase of the last planning cycle, as the controller describes itself."""
    cycle = description.get("phases_s") or {}
    return {str(name): float(seconds) for name, seconds in cycle.items()}


if __name__ == "__main__":
    main()
