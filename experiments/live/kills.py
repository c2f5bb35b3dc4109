"""What a killed controller, a killed replica of each stage, and a lost node cost, under load.

    python -m experiments.live.kills [--parts controller,replicas,node]

EMULATED V100; kill -9 each time. Controller and replicas: 12 in three stages of at least two replicas, 60 % of their
capacity. Node: three nodes of 4 beside a head, 90 % of what all 12 do, then one node is gone. Printed: answers,
explicit errors, lost requests; until planning resumed; until goodput was back at what the hardware that is left can do.
Writes runs/live/kills.json. Minutes: 8.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any

from earlyexit.split import Split
from earlyexit.store import read_card
from experiments.live.emulation import best_plan, emulated, plan_of
from experiments.live.figures import (
    EMULATED,
    back_at_s,
    check,
    figures,
    goodput_bins,
    longest_silence_s,
    usage_words,
    write,
)
from experiments.live.killers import Kill, kill_controller, kill_one_of_each_stage
from experiments.live.load import Driven, drive
from experiments.live.nodes import served_on_nodes
from experiments.live.options import Bench, bench, parser
from experiments.live.phases import Phase
from experiments.live.service import Service, control_settings, emulated_settings, hand_control, served
from optimizer.evaluate import evaluate
from optimizer.plan import Plan, Stage
from optimizer.rescore import joint_reach

COUNT, PER_NODE = 12, 4
CUTS, REPLICAS = (0, 3, 7, 12), (6, 3, 3)
SECONDS, KILL_S = 90.0, 30.0
SHARE, NODE_SHARE = 0.6, 0.9
BACK = 0.95
"""Of a goodput counts as all of it."""
BIN_S = 1.0
PERIOD_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One kind of death, and the load around it."""

    name: str
    plan: Plan
    rate_per_s: float
    """Of the load."""
    left_per_s: float
    """What is left can do so much."""


def main() -> None:
    """Run the parts that are asked for, print and write them."""
    made = parser("kills", __doc__, time_scale=20.0)
    made.add_argument("--parts", default="controller,replicas,node")
    options = made.parse_args()
    on = bench(options, {"V100": COUNT})
    print(f"{EMULATED} {options.time_scale:g} times; SLO {on.emulation.wall_slo_s:g} s")
    run = {"controller": controller_dies, "replicas": replicas_die, "node": node_dies}
    write("kills", {part: run[part](on) for part in options.parts.split(",")})


def staged(on: Bench) -> Plan:
    """Three stages, all ramps on."""
    stages = tuple(
        Stage(
            device=emulated("V100"),
            replicas=replicas,
            splits=(Split(first=first, end=end, batch=8, ramps=tuple(range(first, min(end, CUTS[-1] - 1)))),),
        )
        for first, end, replicas in zip(CUTS, CUTS[1:], REPLICAS, strict=False)
    )
    return plan_of(stages, on.spec)


def capacity(on: Bench, plan: Plan) -> float:
    """Predicted rate of a plan, by the recorded exits."""
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    return evaluate(problem, plan.stages, joint_reach(on.records, on.thresholds)).rate_per_s


def controller_dies(on: Bench) -> dict[str, Any]:
    """Serving must not notice; planning must come back by itself."""
    plan = staged(on)
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    control = control_settings(problem, on.spec, state="kills", period_s=PERIOD_S, watch_s=2.0, start_s=3.0)
    rate_per_s = SHARE * capacity(on, plan)
    part = Part(name="controller", plan=plan, rate_per_s=rate_per_s, left_per_s=rate_per_s)
    settings = emulated_settings(on.emulation, on.model, plan, control=control)
    with served(settings, plan, port=on.options.port, front=on.options.front) as service:
        return report(on, part, *asyncio.run(_under_load(on, service, part, kill_controller)))


def replicas_die(on: Bench) -> dict[str, Any]:
    """One of every stage at once, the plan stays."""
    plan = staged(on)
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    settings = emulated_settings(on.emulation, on.model, plan, control=hand_control(problem, on.spec, state="kills"))
    rate_per_s = SHARE * capacity(on, plan)
    part = Part(name="replicas", plan=plan, rate_per_s=rate_per_s, left_per_s=rate_per_s)
    with served(settings, plan, port=on.options.port, front=on.options.front) as service:
        return report(on, part, *asyncio.run(_under_load(on, service, part, kill_one_of_each_stage)))


def node_dies(on: Bench) -> dict[str, Any]:
    """A third of the accelerators goes, and does not come back."""
    survival = on.records.outcome(on.thresholds).survival
    problem = on.emulation.problem(survival)
    planned = best_plan(problem, "best", on.records)
    smaller = bench(on.options, {"V100": COUNT - PER_NODE})
    left = best_plan(smaller.emulation.problem(survival), "best", on.records)
    plan = plan_of(planned.stages, on.spec)
    rate_per_s = NODE_SHARE * capacity(on, plan)
    part = Part(
        name="node",
        plan=plan,
        rate_per_s=rate_per_s,
        left_per_s=min(rate_per_s, capacity(smaller, plan_of(left.stages, on.spec))),
    )
    control = control_settings(problem, on.spec, state="kills", period_s=4 * PERIOD_S, watch_s=2.0, start_s=3.0)
    settings = emulated_settings(on.emulation, on.model, plan, control=control)
    with served_on_nodes(
        settings, plan, name="V100", per_node=PER_NODE, num_nodes=COUNT // PER_NODE, port=on.options.port
    ) as (service, nodes):

        async def kill(_: Service) -> dict[str, Any]:
            await asyncio.to_thread(nodes.lose, 0)
            return {"killed": "node 0"}

        return report(on, part, *asyncio.run(_under_load(on, service, part, kill)))


async def _under_load(on: Bench, service: Service, part: Part, kill: Kill) -> tuple[Driven, dict[str, Any]]:
    load = Phase(name=part.name, seconds=SECONDS, keys=on.records.sample_ids, rate_per_s=part.rate_per_s)

    async def later() -> dict[str, Any]:
        await asyncio.sleep(KILL_S)
        return await kill(service)

    driven, told = await asyncio.gather(
        drive(service.url, [load], slo_s=on.emulation.wall_slo_s, seed=on.options.seed), later()
    )
    return driven, told


def report(on: Bench, part: Part, driven: Driven, told: dict[str, Any]) -> dict[str, Any]:
    """Print a part and give its figures."""
    bins = goodput_bins(driven, BIN_S)
    back_s = back_at_s(bins, BIN_S, KILL_S, BACK * part.left_per_s)
    whole, after = figures(driven, 0.0, SECONDS), figures(driven, KILL_S, SECONDS)
    checks = check(driven, on.records, on.thresholds, read_card(on.model).label_names)
    silence_s = longest_silence_s(driven.records, KILL_S, SECONDS)
    print(
        f"{part.name}: {told}\n  requests {whole.requests}, answered {whole.answered}, errors "
        f"{dict(whole.errors) or 'none'}, lost {whole.lost}, every answer right and once: {checks.hold}\n"
        f"  longest silence after it {silence_s:.2f} s; goodput at {BACK:.0%} of {part.left_per_s:.0f}"
        f"/s again after {back_s} s; {after.goodput_per_s:.0f}/s over the rest\n  {usage_words(driven.usage)}"
    )
    return {
        "told": told,
        "whole": asdict(whole),
        "after": asdict(after),
        "back_s": back_s,
        "silence_s": silence_s,
        "bins": bins,
        "checks_hold": checks.hold,
        "usage": asdict(driven.usage),
    }


if __name__ == "__main__":
    main()
