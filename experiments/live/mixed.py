"""E3's figure 13 live: 6 V100, 8 P100 and 15 K80 against 16 V100, for the same money.

    python -m experiments.live.mixed [--minutes 1.5] [--strategies best,e3,stock]

EMULATED accelerators, batches up to 8, exits as recorded. For each cluster and strategy its plan is served under an
open loop of 10 % more than it is predicted to do; goodput is measured after the first 15 s. No controller. Writes
runs/live/mixed.json. Minutes: 2 for each of the plans.
"""

from __future__ import annotations

from typing import Any, cast

from earlyexit.errors import PlanError
from experiments.live.emulation import Bench, bench
from experiments.live.scenario import command, judged, played
from optimizer.decision import Strategy

EQUAL, MIXED = "16 V100", "6 V100 + 8 P100 + 15 K80"
CLUSTERS = {EQUAL: {"V100": 16}, MIXED: {"V100": 6, "P100": 8, "K80": 15}}
OFFERED = 1.1
WARM_S = 15.0


def run(on: Bench) -> dict[str, Any]:
    """Serve every plan; compare the clusters, predicted and measured."""
    plans: dict[str, dict[str, Any]] = {}
    for strategy in on.options.strategies.split(","):
        for cluster, counts in CLUSTERS.items():
            try:
                plans[f"{strategy} on {cluster}"] = measured(bench(on.options, counts), cluster, strategy)
            except PlanError as error:
                print(f"{cluster}: {error}")
        over, under = (plans.get(f"{strategy} on {cluster}") for cluster in (MIXED, EQUAL))
        if over and under:
            predicted, goodput = (over[name] / under[name] for name in ("predicted_per_s", "goodput_per_s"))
            print(f"{strategy}: {MIXED} over {EQUAL}: predicted {predicted:.2f} x, measured {goodput:.2f} x")
    print("E3 figure 13: its plans on the mixed cluster up to 1.70 x the others")
    return {"plans": plans}


def measured(on: Bench, cluster: str, strategy: str) -> dict[str, Any]:
    """Plan, serve, saturate."""
    plan = on.plan(on.best(cast(Strategy, strategy)).stages)
    predicted = on.predicted(plan)
    seconds = WARM_S + 60 * on.options.minutes
    driven = played(on, plan, [on.steady(strategy, seconds, OFFERED * predicted.rate_per_s)]).driven
    stages = ", ".join(f"{each.replicas} {each.device}: {each.first}-{each.end - 1}" for each in plan.stages)
    title = f"{cluster}, {strategy}: predicted {predicted.rate_per_s:.0f}/s; {stages}"
    told = judged(on, driven, {"served": [(WARM_S, seconds)]}, title=title)
    goodput_per_s = told["windows"]["served"].goodput_per_s
    print(f"{goodput_per_s / predicted.rate_per_s:.0%} of what was predicted")
    return {
        "stages": stages,
        "predicted_per_s": predicted.rate_per_s,
        "usd_per_hour": predicted.usd_per_hour,
        "goodput_per_s": goodput_per_s,
        **told,
    }


if __name__ == "__main__":
    command("mixed", __doc__, run, CLUSTERS[EQUAL], minutes=1.5, strategies="best")
