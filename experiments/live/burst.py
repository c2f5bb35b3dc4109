"""More than the service can do: three times the rate for 30 s, and the bursts of the Twitter trace.

    python -m experiments.live.burst [--minutes 4]

16 EMULATED V100 with a controller. First half of capacity, with 30 s of three times as much in it. Then, where
OFFRAMP_DATA has the trace, its bursty hour: `--minutes` around the hour's peak, scaled to 60 % of capacity on average.
Printed: whether anything died, memory of all processes before and after, what was dropped and why, and the p99 of what
was answered against the SLO. Writes runs/live/burst.json.
"""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from experiments.data import data_folder
from experiments.drift import FloatArray
from experiments.live.emulation import best_plan, plan_of
from experiments.live.figures import EMULATED, Figures, figures, milliseconds, usage_words, write
from experiments.live.load import Driven, drive
from experiments.live.meter import Memory, memory, replica_pids
from experiments.live.options import Bench, bench, parser
from experiments.live.phases import Phase
from experiments.live.service import Service, control_settings, emulated_settings, served

TWITTER = "traces/twitter_per_second_infadapter.txt.gz"
BURSTY_HOUR = (1_436_400, 1_440_000)
"""Seconds of the trace."""
HALF = 0.5
TIMES = 3.0
TWITTER_SHARE = 0.6
CALM_S, BURST_S, AFTER_S = 30.0, 30.0, 60.0


def main() -> None:
    """Run both loads on one service, print and write them."""
    made = parser("burst", __doc__)
    made.add_argument("--minutes", type=float, default=4.0, help="of the trace")
    made.add_argument("--period", type=float, default=40.0)
    options = made.parse_args()
    on = bench(options, {"V100": 16})
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    planned = best_plan(problem, "best", on.records)
    plan = plan_of(planned.stages, on.spec)
    control = control_settings(problem, on.spec, state="burst", period_s=options.period, watch_s=2.0, start_s=3.0)
    settings = emulated_settings(on.emulation, on.model, plan, control=control)
    capacity_per_s = planned.figures.rate_per_s
    print(f"{EMULATED} {options.time_scale:g} times; capacity {capacity_per_s:.0f} inputs/s")
    loads = {"three times for 30 s": burst_phases(on.records.sample_ids, capacity_per_s)}
    hour = bursty_hour()
    if hour is None:
        print(f"skipped: {TWITTER} is not in OFFRAMP_DATA")
    else:
        around = around_peak(hour, int(60 * options.minutes))
        loads["Twitter's bursty hour"] = trace_phases(on.records.sample_ids, around, TWITTER_SHARE * capacity_per_s)
    with served(settings, plan, port=options.port, front=options.front) as service:
        results = {name: run(on, service, name, phases) for name, phases in loads.items()}
    write("burst", {"capacity_per_s": capacity_per_s, "time_scale": options.time_scale, "loads": results})


def burst_phases(keys: tuple[str, ...], capacity_per_s: float) -> list[Phase]:
    """Calm, burst, calm."""
    spans = (("calm", CALM_S, 1.0), ("burst", BURST_S, TIMES), ("after", AFTER_S, 1.0))
    return [
        Phase(name=name, seconds=seconds, keys=keys, rate_per_s=HALF * capacity_per_s * times)
        for name, seconds, times in spans
    ]


def bursty_hour() -> FloatArray | None:
    """Requests per second; None where the trace is absent."""
    folder = data_folder()
    if folder is None or not (folder / TWITTER).is_file():
        return None
    with gzip.open(folder / TWITTER, "rt", encoding="utf-8") as file:
        return np.array(file.read().split()[slice(*BURSTY_HOUR)], dtype=np.float64)


def around_peak(per_second_S: FloatArray, seconds: int) -> FloatArray:
    """So many seconds with the highest one in their middle, as far as the trace goes."""
    first = max(0, min(int(per_second_S.argmax()) - seconds // 2, len(per_second_S) - seconds))
    return per_second_S[first : first + seconds]


def trace_phases(keys: tuple[str, ...], per_second_S: FloatArray, mean_per_s: float) -> list[Phase]:
    """A phase for every second that has requests or none, scaled to a mean rate of inputs."""
    rates_S = per_second_S * (mean_per_s / per_second_S.mean())
    return [Phase(name="trace", seconds=1.0, keys=keys, rate_per_s=float(rate)) for rate in rates_S]


def run(on: Bench, service: Service, name: str, phases: Sequence[Phase]) -> dict[str, Any]:
    """One load on the running service."""
    before, replicas = memory(), replica_pids(service.app)
    driven = asyncio.run(drive(service.url, phases, slo_s=on.emulation.wall_slo_s, seed=on.options.seed))
    after, died = memory(), died_between(replicas, replica_pids(service.app))
    spans = spans_of(driven)
    _print(name, driven, {span: figures(driven, *times) for span, times in spans.items()}, before, after)
    print(f"  deployments with a process that ended: {died or 'none'}")
    return {
        "windows": {span: asdict(figures(driven, *times)) for span, times in spans.items()},
        "memory_mib": {"before": before.resident_mib, "after": after.resident_mib},
        "ended": died,
        "usage": asdict(driven.usage),
        "sent": driven.num_sent,
        "outcomes": len(driven.records),
    }


def died_between(before: dict[str, list[int]], after: dict[str, list[int]]) -> list[str]:
    """Deployments that lost a process. Those that a plan change shrank are among them: read it with the history."""
    return sorted(name for name, pids in before.items() if set(pids) - set(after.get(name, [])))


def spans_of(driven: Driven) -> dict[str, tuple[float, float]]:
    """By phase where there are few, else the whole."""
    end_s = driven.starts_s[-1] + driven.phases[-1].seconds
    if len({phase.name for phase in driven.phases}) == 1:
        return {driven.phases[0].name: (0.0, end_s)}
    bounds = [*driven.starts_s, end_s]
    return {phase.name: (bounds[k], bounds[k + 1]) for k, phase in enumerate(driven.phases)}


def _print(name: str, driven: Driven, windows: dict[str, Figures], before: Memory, after: Memory) -> None:
    print(f"{name}: sent {driven.num_sent} requests, outcomes {len(driven.records)}")
    for span, each in windows.items():
        within = "-" if each.p99_s is None else f"{each.p99_s / driven.slo_s:.2f} SLO"
        print(
            f"  {span:<6} requests {each.requests}, answered {each.answered}, goodput {each.goodput_per_s:.0f}/s, "
            f"p99 of the answered {milliseconds(each.p99_s)} ms = {within}, dropped {dict(each.errors) or 'none'}"
        )
    print(
        f"  memory of {before.processes} processes {before.resident_mib:.0f} MiB before, of {after.processes} "
        f"{after.resident_mib:.0f} MiB after; {usage_words(driven.usage)}"
    )


if __name__ == "__main__":
    main()
