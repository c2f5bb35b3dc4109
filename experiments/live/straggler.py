"""A replica that is three times slower than its peers: when it is found, and what it costs until then.

    python -m experiments.live.straggler [--minutes 4] [--slowness 3]

8 EMULATED V100, a plan of one stage. Seven healthy replicas at 90 % of what they do; after a quarter of the time the
eighth joins, and is slow. Writes runs/live/straggler.json.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

from experiments.live.emulation import Bench
from experiments.live.load import Span
from experiments.live.scenario import command, judged, played
from experiments.live.service import Service, control_settings

COUNT = 8
SHARE = 0.9
WARM_S = 10.0
LOOK_S = 0.5
WATCH_S = 2.0
LONG_S = 1e8
"""A planning period that does not end, of a controller that does not hold its plan."""


def run(on: Bench) -> dict[str, Any]:
    """Seven replicas, then eight."""
    planned = on.best("serial")
    (stage,) = planned.stages
    healthy, joined = (on.plan((replace(stage, replicas=count),)) for count in (COUNT - 1, COUNT))
    rate_per_s = SHARE * planned.figures.rate_per_s * (COUNT - 1) / COUNT
    seconds = WARM_S + 60 * on.options.minutes

    async def join_and_look(service: Service) -> tuple[float, float | None]:
        """When the slow replica had joined, and when it was first avoided."""
        began_s = time.monotonic()
        await asyncio.sleep(WARM_S + seconds / 4)
        await service.apply(joined)
        joined_s = time.monotonic() - began_s
        while (now_s := time.monotonic() - began_s) < seconds:
            if (await service.current()).get("avoided"):
                return joined_s, now_s
            await asyncio.sleep(LOOK_S)
        return joined_s, None

    # The watch alone is to act: planning anew would change more than the straggler.
    control = control_settings(
        on.problem, on.spec, state="straggler", strategy="serial", period_s=LONG_S, watch_s=WATCH_S, start_s=3.0
    )
    load = [on.steady("all", seconds, rate_per_s)]
    slow = {COUNT - 1: on.options.slowness}
    result = played(on, healthy, load, control, event=join_and_look, slow=slow, probe_share=0.0)
    joined_s, found_s = result.meanwhile
    took = "not found" if found_s is None else f"found after {found_s - joined_s:.1f} s"
    print(f"slow replica serving at {joined_s:.0f} s; {took} (the controller looks every {WATCH_S:g} s)")
    windows = windows_of(joined_s, found_s, seconds, result.driven.slo_s)
    told = judged(on, result.driven, windows, title=f"{rate_per_s:.0f} inputs/s")
    return {"slowness": on.options.slowness, "joined_s": joined_s, "found_s": found_s, **told}


def windows_of(joined_s: float, found_s: float | None, end_s: float, settle_s: float) -> dict[str, list[Span]]:
    """Before, during and after; `settle_s` are left out behind each event, for what was under way."""
    windows = {"before": (WARM_S, joined_s - settle_s), "during": (joined_s, end_s if found_s is None else found_s)}
    if found_s is not None and found_s + settle_s < end_s:
        windows["after"] = (found_s + settle_s, end_s)
    return {name: [span] for name, span in windows.items() if span[1] > span[0]}


if __name__ == "__main__":
    command("straggler", __doc__, run, {"V100": COUNT}, time_scale=20.0, minutes=4.0, slowness=3.0)
