"""E3's figure 16 live: the mix of easy and hard inputs changes, and the plan follows, or does not.

    python -m experiments.live.adaptation [--period 40] [--loop open] [--sides offramp,omniscient]

16 EMULATED V100, batches up to 8; mixes 80:20, 50:50, 20:80, switched in the middle of planning periods. One service
per side, one after the other, with the same seeds: *offramp* with its controller, *stock* (no exits), *early-exit*
(all ramps, no splits), *first plan* (the best for 80:20, kept for good), and *omniscient*: the best plan of every mix's
true exits, put in force at the moment of the switch. An open loop offers 10 % more than the omniscient plan does; a
closed one has as many inputs under way as stock answers in 0.6 SLOs. Goodput counts whole requests of 8 inputs. Writes
runs/live/adaptation.json. Minutes: 30 with a period of 40 s.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.kit import show
from experiments.live.emulation import Bench, best_plan
from experiments.live.figures import goodput_bins
from experiments.live.load import INPUTS_PER_REQUEST, Driven, Phase, starts_of
from experiments.live.mixes import EASY_SHARES, mix, mixed_records
from experiments.live.scenario import command, judged, play, serving
from experiments.live.service import Service, control_settings, hand_control
from optimizer.decision import Strategy
from optimizer.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.rescore import joint_reach

KEPT: Mapping[str, Strategy] = {"stock": "stock", "early-exit": "early-exit"}
"""Sides that serve by a strategy's plan, and never change it."""
SIDES = ("offramp", "stock", "early-exit", "first plan", "omniscient")
PERIODS = (2.5, 3.0, 2.5)
"""Each mix lasts so many planning periods: both switches are in the middle of one."""
OFFERED = 1.1
PROBE_SHARE = 0.05
"""More than the default: a stretched clock makes few inputs per period, and the plan needs some hundred probes."""
IN_FLIGHT_SLOS = 0.6
BIN_S = 5.0
PAPER = "E3 figure 16: best of the three at 80:20 and 50:50; at 80 % hard up to 23 % below the model without exits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """One mix and the best plan for it."""

    name: str
    survival: tuple[float, ...]
    plan: Plan
    rate_per_s: float
    """Predicted from the exits of the mix."""


def run(on: Bench) -> dict[str, Any]:
    """All sides, one after the other."""
    mixes = [mixed(on, share) for share in EASY_SHARES]
    phases = phases_of(on, mixes)
    print(", ".join(f"{each.name}: the best plan does {each.rate_per_s:.0f}/s" for each in mixes))
    sides = {side: document_of(on, side, run_side(on, side, mixes, phases)) for side in on.options.sides.split(",")}
    title = "goodput per second in the period that begins one period after each switch"
    show(title, ("", *(each.name for each in mixes)), [(side, *result["scored"]) for side, result in sides.items()])
    for over in ("omniscient", "stock", "early-exit", "first plan"):
        if {"offramp", over} <= set(sides):
            ratios = zip(sides["offramp"]["scored"], sides[over]["scored"], strict=True)
            print(f"offramp / {over}: " + ", ".join(f"{a / b:.3f}" if b else "-" for a, b in ratios))
    print(PAPER)
    predicted = {each.name: each.rate_per_s for each in mixes}
    return {"period_s": on.options.period, "loop": on.options.loop, "predicted": predicted, "sides": sides}


def mixed(on: Bench, easy_share: float) -> Mixed:
    """The mix, by its true exits."""
    records = mixed_records(on.records, on.thresholds, easy_share)
    survival = records.outcome(on.thresholds).survival
    problem = on.emulation.problem(survival)
    stages = best_plan(problem, "best", records).stages
    easy = round(100 * easy_share)
    return Mixed(
        name=f"{easy}:{100 - easy}",
        survival=survival,
        plan=on.plan(stages),
        rate_per_s=evaluate(problem, stages, joint_reach(records, on.thresholds)).rate_per_s,
    )


def phases_of(on: Bench, mixes: Sequence[Mixed]) -> list[Phase]:
    """The load, the same for every side."""
    rng = np.random.default_rng(on.options.seed)
    stock_rate_per_s = best_plan(on.emulation.problem(mixes[0].survival), "stock", on.records).figures.rate_per_s
    in_flight = IN_FLIGHT_SLOS * on.emulation.wall_slo_s * stock_rate_per_s
    is_open = on.options.loop == "open"
    return [
        Phase(
            name=each.name,
            seconds=periods * on.options.period,
            keys=mix(on.records, on.thresholds, share, rng),
            rate_per_s=OFFERED * each.rate_per_s if is_open else None,
            workers=None if is_open else math.ceil(in_flight / INPUTS_PER_REQUEST),
        )
        for share, each, periods in zip(EASY_SHARES, mixes, PERIODS, strict=True)
    ]


def run_side(on: Bench, side: str, mixes: Sequence[Mixed], phases: Sequence[Phase]) -> Driven:
    """One service, the whole load."""
    problem, plan, control = on.emulation.problem(mixes[0].survival), mixes[0].plan, None
    if side in KEPT:
        plan = on.plan(best_plan(problem, KEPT[side], on.records).stages)
    elif side == "offramp":
        period_s = on.options.period
        control = control_settings(problem, on.spec, state=side, period_s=period_s, watch_s=2.0, start_s=3.0)
    elif side == "omniscient":
        control = hand_control(problem, on.spec, state=side)

    async def foresee(service: Service) -> None:
        began_s = time.monotonic()
        for each, start_s in list(zip(mixes, starts_of(phases), strict=True))[1:]:
            await asyncio.sleep(max(0.0, began_s + start_s - time.monotonic()))
            await service.apply(each.plan, hold=True)

    with serving(on, plan, control, probe_share=PROBE_SHARE if side == "offramp" else 0.0) as service:
        if side == "offramp":
            time.sleep(until_period_s(time.time(), on.options.period))
        event = foresee if side == "omniscient" else None
        return asyncio.run(play(on, service, phases, event=event)).driven


def until_period_s(at_s: float, period_s: float) -> float:
    """Seconds until the next planning period: they are counted from 1970, so that forecasts have whole windows."""
    return -at_s % period_s


def scored_windows(starts_s: tuple[float, ...], period_s: float) -> list[tuple[float, float]]:
    """The period that begins one period after each switch, the start among them."""
    return [(start_s + period_s, start_s + 2 * period_s) for start_s in starts_s]


def document_of(on: Bench, side: str, driven: Driven) -> dict[str, Any]:
    """A side's figures as plain data."""
    spans = scored_windows(driven.starts_s, on.options.period)
    windows = {phase.name: [span] for phase, span in zip(driven.phases, spans, strict=True)}
    told = judged(on, driven, windows, title=side)
    scored = [round(each.goodput_per_s, 1) for each in told["windows"].values()]
    return {"scored": scored, "goodput_bins": goodput_bins(driven, BIN_S), "bin_s": BIN_S, **told}


if __name__ == "__main__":
    command("adaptation", __doc__, run, {"V100": 16}, period=40.0, loop=("open", "closed"), sides=",".join(SIDES))
