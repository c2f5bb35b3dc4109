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
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from deployments.settings import ControlSettings
from earlyexit.store import read_card
from experiments.live.emulation import best_plan, plan_of
from experiments.live.figures import EMULATED, check, figures, goodput_bins, usage_words, write
from experiments.live.load import Driven, drive
from experiments.live.mixes import EASY_SHARES, mix, mixed_records
from experiments.live.options import Bench, bench, parser
from experiments.live.phases import INPUTS_PER_REQUEST, Phase, starts_of
from experiments.live.service import Service, control_settings, emulated_settings, hand_control, served
from optimizer.decision import Strategy
from optimizer.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.rescore import joint_reach

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


def main() -> None:
    """Run all sides, print the comparison, write the figures."""
    made = parser("adaptation", __doc__)
    made.add_argument("--period", type=float, default=40.0)
    made.add_argument("--loop", choices=("open", "closed"), default="open")
    made.add_argument("--sides", default=",".join(SIDES))
    options = made.parse_args()
    on = bench(options, {"V100": 16})
    mixes = [mixed(on, share) for share in EASY_SHARES]
    phases = phases_of(on, mixes)
    print(f"{EMULATED} {options.time_scale:g} times; SLO {on.emulation.wall_slo_s:g} s; {options.loop} loop")
    for each in mixes:
        print(f"{each.name}: the best plan does {each.rate_per_s:.0f}/s")
    results: dict[str, Any] = {}
    for side in options.sides.split(","):
        driven = run_side(on, side, mixes, phases)
        results[side] = document_of(on, driven, options.period)
        print(f"{side:<12} {results[side]['scored']}; {usage_words(driven.usage)}")
    _print(results, [each.name for each in mixes])
    predicted = {each.name: each.rate_per_s for each in mixes}
    write("adaptation", {"period_s": options.period, "loop": options.loop, "predicted": predicted, "sides": results})


def mixed(on: Bench, easy_share: float) -> Mixed:
    """The mix, by its true exits."""
    records = mixed_records(on.records, on.thresholds, easy_share)
    survival = records.outcome(on.thresholds).survival
    problem = on.emulation.problem(survival)
    planned = best_plan(problem, "best", records)
    figures_of = evaluate(problem, planned.stages, joint_reach(records, on.thresholds))
    easy = round(100 * easy_share)
    return Mixed(
        name=f"{easy}:{100 - easy}",
        survival=survival,
        plan=plan_of(planned.stages, on.spec),
        rate_per_s=figures_of.rate_per_s,
    )


def phases_of(on: Bench, mixes: list[Mixed]) -> list[Phase]:
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


def plan_of_side(on: Bench, side: str, first: Mixed) -> Plan:
    """What the side begins with."""
    if side not in ("stock", "early-exit"):
        return first.plan
    strategy: Strategy = "stock" if side == "stock" else "early-exit"
    planned = best_plan(on.emulation.problem(first.survival), strategy, on.records)
    return plan_of(planned.stages, on.spec)


def control_of_side(on: Bench, side: str, first: Mixed) -> ControlSettings | None:
    """Offramp's own controller, one that is told what to do, or none."""
    problem = on.emulation.problem(first.survival)
    if side == "offramp":
        period_s = on.options.period
        return control_settings(problem, on.spec, state=side, period_s=period_s, watch_s=2.0, start_s=3.0)
    return hand_control(problem, on.spec, state=side) if side == "omniscient" else None


def run_side(on: Bench, side: str, mixes: list[Mixed], phases: list[Phase]) -> Driven:
    """One service, the whole load."""
    plan = plan_of_side(on, side, mixes[0])
    control = control_of_side(on, side, mixes[0])
    probe_share = PROBE_SHARE if side == "offramp" else 0.0
    settings = emulated_settings(on.emulation, on.model, plan, control=control, probe_share=probe_share)
    with served(settings, plan, port=on.options.port, front=on.options.front) as service:
        return asyncio.run(_run(on, side, service, mixes, phases))


async def _run(on: Bench, side: str, service: Service, mixes: list[Mixed], phases: list[Phase]) -> Driven:
    load = drive(service.url, phases, slo_s=on.emulation.wall_slo_s, seed=on.options.seed)
    if side == "offramp":
        await asyncio.sleep(until_period_s(time.time(), on.options.period))
    if side != "omniscient":
        return await load
    driven, _ = await asyncio.gather(load, _foresee(service, mixes, starts_of(phases)))
    return driven


async def _foresee(service: Service, mixes: list[Mixed], starts_s: tuple[float, ...]) -> None:
    began_s = time.monotonic()
    for each, start_s in list(zip(mixes, starts_s, strict=True))[1:]:
        await asyncio.sleep(max(0.0, began_s + start_s - time.monotonic()))
        await service.apply(each.plan, hold=True)


def until_period_s(at_s: float, period_s: float) -> float:
    """Seconds until the next planning period: they are counted from 1970, so that forecasts have whole windows."""
    return -at_s % period_s


def scored_windows(starts_s: tuple[float, ...], period_s: float) -> list[tuple[float, float]]:
    """The period that begins one period after each switch, the start among them."""
    return [(start_s + period_s, start_s + 2 * period_s) for start_s in starts_s]


def document_of(on: Bench, driven: Driven, period_s: float) -> dict[str, Any]:
    """A side's figures as plain data."""
    windows = [figures(driven, since_s, until_s) for since_s, until_s in scored_windows(driven.starts_s, period_s)]
    checks = check(driven, on.records, on.thresholds, read_card(on.model).label_names)
    return {
        "scored": [round(each.goodput_per_s, 1) for each in windows],
        "windows": [asdict(each) for each in windows],
        "goodput_bins": goodput_bins(driven, BIN_S),
        "bin_s": BIN_S,
        "checks": {"holds": checks.hold, "wrong": len(checks.wrong), "sent": checks.sent, "outcomes": checks.outcomes},
        "usage": asdict(driven.usage),
    }


def _print(results: dict[str, Any], names: list[str]) -> None:
    print("goodput per second in the period that begins one period after each switch")
    print(f"{'':<12} " + " ".join(f"{name:>10}" for name in names))
    for side, result in results.items():
        print(f"{side:<12} " + " ".join(f"{value:10.0f}" for value in result["scored"]))
    for over in ("omniscient", "stock", "early-exit", "first plan"):
        if {"offramp", over} <= set(results):
            ratios = zip(results["offramp"]["scored"], results[over]["scored"], strict=True)
            print(f"offramp / {over}: " + ", ".join(f"{a / b:.3f}" if b else "-" for a, b in ratios))
    print(PAPER)


if __name__ == "__main__":
    main()
