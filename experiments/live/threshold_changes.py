"""How fast other thresholds reach every replica, and what that costs.

    python -m experiments.live.threshold_changes [--changes 18] [--every 2.7]

Two stages on five EMULATED V100, kept busy by requests of one input. Every `--every` seconds the controller puts other
thresholds in force: nobody leaves (what an alarm does), and back to E3's. Three times are told, all from the moment at
which the controller decides: until every ingress and every replica has said that it follows; until the last answer that
the old thresholds gave reached its client (an input that left although nobody leaves any more), the running batch among
them; and until the first answer by the new ones came. The load goes on 2 s after the last change. Every request must
have one outcome, and every answer be one that the records allow. Writes runs/live/threshold_changes.json.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from earlyexit.network.split import Split
from experiments.kit import show
from experiments.live.emulation import Bench, emulated
from experiments.live.load import Driven
from experiments.live.scenario import command, judged, milliseconds, played
from experiments.live.service import Service, hand_control
from optimizer.live.tuning.rows import never
from optimizer.plan import Plan, Stage

COUNTS = {"V100": 5}
NUM_BLOCKS, CUT = 12, 4
WARM_S = 3.0
AFTER_S = 2.0
SEEN_S = 0.9
"""Answers are looked at for so long after a decision: the next one comes later."""
SLO_S = 1.0
"""Emulated: nothing is dropped for its deadline, where other work on the machine holds a process up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """One change; seconds from the controller's decision."""

    epoch: int
    to_safe: bool
    told_s: float
    """Until all ingresses and replicas had said that they follow."""
    last_old_s: float | None
    """Until the last answer by the old thresholds; None where nobody leaves by them, and none can be told from new."""
    first_new_s: float | None
    """Until the first by the new, to tell by its exit; None where nobody leaves by those."""


def run(on: Bench) -> dict[str, Any]:
    """So many changes there and back, under load."""
    on = replace(on, emulation=replace(on.emulation, slo_s=SLO_S))
    usual, safe = two_stages(on, on.thresholds), two_stages(on, never("entropy", on.records.ramps))
    seconds = WARM_S + on.options.changes * on.options.every + AFTER_S

    async def event(service: Service) -> None:
        await asyncio.sleep(WARM_S)
        for index in range(on.options.changes):
            await service.apply((safe, usual)[index % 2], hold=True)
            await asyncio.sleep(on.options.every)

    async def after(service: Service) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return await service.history(on.options.changes), await service.describe()

    result = played(
        on,
        usual,
        [on.steady("all", seconds, on.options.rate)],
        hand_control(on.problem, on.spec, state="threshold_changes"),
        event=event,
        after=after,
        inputs_per_request=1,
        probe_share=0.0,
    )
    history, described = result.after
    told = judged(on, result.driven, {"all": [(0.0, seconds)]}, title=f"{on.options.rate:g} inputs/s")
    reached = [reached_by(result.driven, row, said_at(described)) for row in reversed(history)]
    figures = summary(reached)
    show("", ("milliseconds after the decision", "median", "largest"), figures)
    late_s = np.percentile([record.lateness_s for record in result.driven.records], [50, 99]).tolist()
    print(
        f"for comparison: the load's own client, which only has to wake up, was late by {milliseconds(late_s[0])} ms "
        f"(median; 99th percentile {milliseconds(late_s[1])} ms)"
    )
    return {"changes": [asdict(each) for each in reached], "figures": figures, "client_late_s": late_s, **told}


def two_stages(on: Bench, thresholds: Mapping[int, float]) -> Plan:
    """Every ramp on."""
    ramps = tuple(range(NUM_BLOCKS - 1))
    stages = tuple(
        Stage(
            device=emulated("V100"),
            replicas=replicas,
            splits=(Split(first=first, end=end, batch=8, ramps=tuple(r for r in ramps if first <= r < end)),),
        )
        for first, end, replicas in ((0, CUT, 2), (CUT, NUM_BLOCKS, 3))
    )
    return Plan(stages=stages, policy=replace(on.spec, thresholds=dict(thresholds)))


def said_at(described: Mapping[str, Any]) -> dict[int, float]:
    """When the controller said of each epoch that it is in force: everybody had answered."""
    said = [event for event in described["events"] if event["kind"] == "plan"]
    return {int(str(event["words"]).split()[1]): float(event["at_s"]) for event in said}


def reached_by(driven: Driven, row: Mapping[str, Any], said_s: Mapping[int, float]) -> Reached:
    """Where no later change came in between, an answer tells by its exit what it was decided by."""
    decided_s, epoch = float(row["at_s"]), int(row["epoch"])
    thresholds = row["placed"]["plan"]["policy"]["thresholds"].values()
    to_safe = all(threshold < 0 for threshold in thresholds)
    early_s = [at_s - decided_s for at_s in early_answers_s(driven)]
    window_s = SEEN_S
    after_s = [at_s for at_s in early_s if 0 <= at_s < window_s]
    return Reached(
        epoch=epoch,
        to_safe=to_safe,
        told_s=said_s.get(epoch, float("nan")) - decided_s,
        last_old_s=max(after_s, default=0.0) if to_safe else None,
        first_new_s=None if to_safe else min(after_s, default=float("nan")),
    )


def early_answers_s(driven: Driven) -> list[float]:
    """When inputs that left before the end were answered, by the wall's clock."""
    return [
        driven.began_s + record.done_s
        for record in driven.records
        if record.error is None and record.predictions[0].exit < NUM_BLOCKS - 1
    ]


def summary(reached: Sequence[Reached]) -> list[tuple[str, str, str]]:
    """Median and largest of what can be told."""
    figures: dict[str, list[float | None]] = {
        "all ingresses and replicas follow": [each.told_s for each in reached],
        "last answer by the old ones, nobody leaving": [each.last_old_s for each in reached],
        "first answer by the new ones, leaving again": [each.first_new_s for each in reached],
    }
    rows = []
    for name, values in figures.items():
        known = [value for value in values if value is not None and np.isfinite(value)]
        rows.append((name, milliseconds(float(np.median(known))), milliseconds(max(known))))
    return rows


if __name__ == "__main__":
    command("threshold_changes", __doc__, run, COUNTS, time_scale=6.0, changes=18, every=2.7, rate=40.0)
