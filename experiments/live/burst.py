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
from typing import Any

import numpy as np

from experiments.data import data_folder
from experiments.live.emulation import Bench
from experiments.live.load import Driven, Phase, Span, memory, replica_pids
from experiments.live.scenario import command, judged, play, serving
from experiments.live.service import Service, control_settings
from profiles.scores import FloatArray

TWITTER = "traces/twitter_per_second_infadapter.txt.gz"
BURSTY_HOUR = (1_436_400, 1_440_000)
"""Seconds of the trace."""
HALF = 0.5
BURST = (("calm", 30.0, 1.0), ("burst", 30.0, 3.0), ("after", 60.0, 1.0))
"""Name, seconds, and times half of capacity."""
TWITTER_SHARE = 0.6


def run(on: Bench) -> dict[str, Any]:
    """Both loads on one service."""
    planned = on.best()
    capacity_per_s = planned.figures.rate_per_s
    control = control_settings(on.problem, on.spec, state="burst", period_s=on.options.period, watch_s=2.0, start_s=3.0)
    print(f"capacity {capacity_per_s:.0f} inputs/s")
    loads = {"three times for 30 s": burst_phases(on.records.sample_ids, capacity_per_s)}
    hour = bursty_hour()
    if hour is None:
        print(f"skipped: {TWITTER} is not in OFFRAMP_DATA")
    else:
        around = around_peak(hour, int(60 * on.options.minutes))
        loads["Twitter's bursty hour"] = trace_phases(on.records.sample_ids, around, TWITTER_SHARE * capacity_per_s)
    with serving(on, on.plan(planned.stages), control) as service:
        return {
            "capacity_per_s": capacity_per_s,
            "loads": {name: loaded(on, service, name, phases) for name, phases in loads.items()},
        }


def burst_phases(keys: tuple[str, ...], capacity_per_s: float) -> list[Phase]:
    """Calm, burst, calm."""
    return [
        Phase(name=name, seconds=seconds, keys=keys, rate_per_s=HALF * capacity_per_s * times)
        for name, seconds, times in BURST
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


def loaded(on: Bench, service: Service, name: str, phases: list[Phase]) -> dict[str, Any]:
    """One load on the running service."""
    before, replicas = memory(), replica_pids(service.app)
    driven = asyncio.run(play(on, service, phases)).driven
    after, died = memory(), died_between(replicas, replica_pids(service.app))
    told = judged(on, driven, spans_of(driven), title=name)
    for span, each in told["windows"].items():
        print(f"{span}: p99 of the answered {'-' if each.p99_s is None else f'{each.p99_s / driven.slo_s:.2f}'} SLO")
    print(f"memory of {before[0]} processes {before[1]:.0f} MiB before, of {after[0]} {after[1]:.0f} MiB after")
    print(f"deployments with a process that ended: {', '.join(died) or 'none'}")
    return {**told, "memory_mib": {"before": before[1], "after": after[1]}, "ended": died}


def died_between(before: dict[str, list[int]], after: dict[str, list[int]]) -> list[str]:
    """Deployments that lost a process. Those that a plan change shrank are among them: read it with the history."""
    return sorted(name for name, pids in before.items() if set(pids) - set(after.get(name, [])))


def spans_of(driven: Driven) -> dict[str, list[Span]]:
    """By phase where they differ, else the whole."""
    if len({phase.name for phase in driven.phases}) == 1:
        return {driven.phases[0].name: [(0.0, driven.seconds)]}
    bounds = [*driven.starts_s, driven.seconds]
    return {phase.name: [(bounds[k], bounds[k + 1])] for k, phase in enumerate(driven.phases)}


if __name__ == "__main__":
    command("burst", __doc__, run, {"V100": 16}, minutes=4.0, period=40.0)
