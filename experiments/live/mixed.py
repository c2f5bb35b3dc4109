"""E3's figure 13 live: 6 V100, 8 P100 and 15 K80 against 16 V100, for the same money.

    python -m experiments.live.mixed [--minutes 1.5] [--strategies best,e3,stock]

EMULATED accelerators, batches up to 8, exits as recorded. For each cluster and strategy its plan is served under an
open loop of 10 % more than it is predicted to do; goodput is measured after the first 15 s. No controller. Writes
runs/live/mixed.json. Minutes: 2 for each of the plans.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict, dataclass
from typing import Any, cast

from earlyexit.errors import PlanError
from earlyexit.store import read_card
from experiments.live.emulation import best_plan, plan_of
from experiments.live.figures import EMULATED, Figures, check, figures, milliseconds, usage_words, write
from experiments.live.load import drive
from experiments.live.options import Bench, bench, parser
from experiments.live.phases import Phase
from experiments.live.service import emulated_settings, served
from optimizer.decision import Strategy
from optimizer.evaluate import evaluate
from optimizer.rescore import joint_reach

CLUSTERS = {"16 V100": {"V100": 16}, "6 V100 + 8 P100 + 15 K80": {"V100": 6, "P100": 8, "K80": 15}}
OFFERED = 1.1
WARM_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One plan on one cluster."""

    cluster: str
    strategy: str
    stages: str
    predicted_per_s: float
    usd_per_hour: float
    served: Figures
    checks_hold: bool
    usage: str

    @property
    def kept(self) -> float:
        """Measured goodput over the predicted rate."""
        return self.served.goodput_per_s / self.predicted_per_s


def main() -> None:
    """Serve every plan, print the table, write it."""
    made = parser("mixed", __doc__)
    made.add_argument("--minutes", type=float, default=1.5)
    made.add_argument("--strategies", default="best")
    options = made.parse_args()
    print(f"{EMULATED} {options.time_scale:g} times")
    results = []
    for cluster, counts in CLUSTERS.items():
        on = bench(options, counts)
        for strategy in options.strategies.split(","):
            try:
                each = measure(on, cluster, cast(Strategy, strategy))
            except PlanError as error:
                print(f"{cluster}: {error}")
                continue
            results.append(each)
            _print(each)
    compare(results)
    write("mixed", {"time_scale": options.time_scale, "plans": [asdict(each) for each in results]})


def measure(on: Bench, cluster: str, strategy: Strategy) -> Measured:
    """Plan, serve, saturate."""
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    planned = best_plan(problem, strategy, on.records)
    predicted = evaluate(problem, planned.stages, joint_reach(on.records, on.thresholds))
    plan = plan_of(planned.stages, on.spec)
    settings = emulated_settings(on.emulation, on.model, plan)
    load = Phase(
        name=strategy,
        seconds=WARM_S + 60 * on.options.minutes,
        keys=on.records.sample_ids,
        rate_per_s=OFFERED * predicted.rate_per_s,
    )
    with served(settings, plan, port=on.options.port, front=on.options.front) as service:
        driven = asyncio.run(drive(service.url, [load], slo_s=on.emulation.wall_slo_s, seed=on.options.seed))
    return Measured(
        cluster=cluster,
        strategy=strategy,
        stages=", ".join(f"{each.replicas} {each.device}: {each.first}-{each.end - 1}" for each in planned.stages),
        predicted_per_s=predicted.rate_per_s,
        usd_per_hour=predicted.usd_per_hour,
        served=figures(driven, WARM_S, load.seconds),
        checks_hold=check(driven, on.records, on.thresholds, read_card(on.model).label_names).hold,
        usage=usage_words(driven.usage),
    )


def compare(results: list[Measured]) -> None:
    """The mixed cluster over the equal one, predicted and measured."""
    equal, mixed = CLUSTERS
    by: dict[tuple[str, str], Measured] = {(each.cluster, each.strategy): each for each in results}
    for strategy in dict.fromkeys(each.strategy for each in results):
        pair: list[Any] = [by.get((cluster, strategy)) for cluster in (mixed, equal)]
        if None not in pair:
            predicted, measured = (
                pair[0].predicted_per_s / pair[1].predicted_per_s,
                pair[0].served.goodput_per_s / pair[1].served.goodput_per_s,
            )
            print(f"{strategy}: {mixed} over {equal}: predicted {predicted:.2f} x, measured {measured:.2f} x")
    print("E3 figure 13: its plans on the mixed cluster up to 1.70 x the others")


def _print(each: Measured) -> None:
    print(
        f"{each.cluster}, {each.strategy}: predicted {each.predicted_per_s:.0f}/s, goodput "
        f"{each.served.goodput_per_s:.0f}/s ({each.kept:.0%}), p99 {milliseconds(each.served.p99_s)} ms, errors "
        f"{dict(each.served.errors) or 'none'}, answers right: {each.checks_hold}\n  {each.stages}\n  {each.usage}"
    )


if __name__ == "__main__":
    main()
