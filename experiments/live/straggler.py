"""A replica that is three times slower than its peers: when it is found, and what it costs until then.

    python -m experiments.live.straggler [--minutes 4] [--slowness 3]

8 EMULATED V100, a plan of one stage. Seven healthy replicas at 90 % of what they do; after a quarter of the time the
eighth joins, and is slow. Writes runs/live/straggler.json.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from experiments.live.emulation import best_plan, plan_of
from experiments.live.figures import EMULATED, Figures, figures, milliseconds, usage_words, write
from experiments.live.load import Driven, drive
from experiments.live.options import Bench, bench, parser
from experiments.live.phases import Phase
from experiments.live.service import Service, control_settings, emulated_settings, served
from optimizer.plan import Plan

COUNT = 8
SHARE = 0.9
WARM_S = 10.0
LOOK_S = 0.5
WATCH_S = 2.0
LONG_S = 1e8
"""A planning period that does not end, of a controller that does not hold its plan."""


def main() -> None:
    """Run it, print the table, write the figures."""
    made = parser("straggler", __doc__, time_scale=20.0)
    made.add_argument("--minutes", type=float, default=4.0)
    made.add_argument("--slowness", type=float, default=3.0)
    options = made.parse_args()
    on = bench(options, {"V100": COUNT})
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    planned = best_plan(problem, "serial", on.records)
    healthy = plan_of((replace(planned.stages[0], replicas=COUNT - 1),), on.spec)
    # The watch alone is to act: planning anew would change more than the straggler.
    control = control_settings(
        problem, on.spec, state="straggler", strategy="serial", period_s=LONG_S, watch_s=WATCH_S, start_s=3.0
    )
    settings = emulated_settings(
        on.emulation, on.model, healthy, control=control, slow={COUNT - 1: options.slowness}, probe_share=0.0
    )
    rate_per_s = SHARE * planned.figures.rate_per_s * (COUNT - 1) / COUNT
    print(f"{EMULATED} {options.time_scale:g} times; {rate_per_s:.0f} inputs/s, SLO {on.emulation.wall_slo_s:g} s")
    with served(settings, healthy, port=options.port, front=options.front) as service:
        driven, joined_s, found_s = asyncio.run(_run(on, service, healthy, rate_per_s))
    report(on, driven, joined_s, found_s)


async def _run(on: Bench, service: Service, healthy: Plan, rate_per_s: float) -> tuple[Driven, float, float | None]:
    seconds = WARM_S + 60 * on.options.minutes
    load = Phase(name="all", seconds=seconds, keys=on.records.sample_ids, rate_per_s=rate_per_s)
    driven, (joined_s, found_s) = await asyncio.gather(
        drive(service.url, [load], slo_s=on.emulation.wall_slo_s, seed=on.options.seed),
        _join_and_look(service, healthy, join_s=WARM_S + seconds / 4, until_s=seconds),
    )
    return driven, joined_s, found_s


async def _join_and_look(
    service: Service, healthy: Plan, *, join_s: float, until_s: float
) -> tuple[float, float | None]:
    """When the slow replica had joined, and when it was first avoided."""
    began_s = time.monotonic()
    await asyncio.sleep(join_s)
    await service.apply(replace(healthy, stages=(replace(healthy.stages[0], replicas=COUNT),)))
    joined_s = time.monotonic() - began_s
    while (now_s := time.monotonic() - began_s) < until_s:
        if (await service.current()).get("avoided"):
            return joined_s, now_s
        await asyncio.sleep(LOOK_S)
    return joined_s, None


def windows_of(joined_s: float, found_s: float | None, end_s: float, settle_s: float) -> dict[str, tuple[float, float]]:
    """Before, during and after; `settle_s` are left out behind each event, for what was under way."""
    windows = {"before": (WARM_S, joined_s - settle_s), "during": (joined_s, end_s if found_s is None else found_s)}
    if found_s is not None and found_s + settle_s < end_s:
        windows["after"] = (found_s + settle_s, end_s)
    return {name: (since_s, until_s) for name, (since_s, until_s) in windows.items() if until_s > since_s}


def report(on: Bench, driven: Driven, joined_s: float, found_s: float | None) -> None:
    """Print and write it."""
    took = "not found" if found_s is None else f"found after {found_s - joined_s:.1f} s"
    print(f"slow replica serving at {joined_s:.0f} s; {took} (the controller looks every {WATCH_S:g} s)")
    spans = windows_of(joined_s, found_s, driven.phases[0].seconds, driven.slo_s)
    windows = {name: figures(driven, *span) for name, span in spans.items()}
    _print(windows, list(windows))
    print(usage_words(driven.usage))
    document: dict[str, Any] = {
        "slowness": on.options.slowness,
        "joined_s": joined_s,
        "found_s": found_s,
        "windows": {name: asdict(each) for name, each in windows.items()},
        "usage": asdict(driven.usage),
    }
    write("straggler", document)


def _print(windows: dict[str, Figures], names: Sequence[str]) -> None:
    print("window   goodput/s   p50 ms   p99 ms   errors")
    for name in names:
        each = windows[name]
        print(
            f"{name:<8} {each.goodput_per_s:9.0f} {milliseconds(each.p50_s):>8} {milliseconds(each.p99_s):>8}   "
            f"{dict(each.errors) or 'none'}"
        )


if __name__ == "__main__":
    main()
