"""A plan change of every kind under load: what is lost, and what it does to latency.

    python -m experiments.live.changes [--minutes 5] [--every 10]

Constant load at 60 % of what the weakest plan of the sequence does. A minute without changes, `--minutes` with one
every `--every` seconds (batch, ramps, thresholds, split points, stages, accelerator type, replicas up and down, by
`controller.apply`), back to the first plan, and a minute without again. Requests around changes are compared with those
between them, which meet the same plans. EMULATED accelerators (9 V100, 4 P100). Writes runs/live/changes.json.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Any

from earlyexit.network.split import Split
from experiments.kit import show
from experiments.live.emulation import Bench, emulated
from experiments.live.load import Driven, Span, between, figures
from experiments.live.scenario import command, judged, milliseconds, played
from experiments.live.service import Service, hand_control
from optimizer.evaluate import evaluate
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.rescore import joint_reach

# A sequence of plans that changes one thing at a time: every kind of change there is, there and back.

COUNTS = {"V100": 9, "P100": 4}
"""What the plans of this file need at most."""
NUM_BLOCKS = 12
ENTROPIES = (0.4, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """What can be changed; every kind of change turns one of them."""

    batch: int = 8
    every_ramp: bool = True
    entropy: float = ENTROPIES[0]
    cut: int = 4
    """Where the second stage begins."""
    stages: int = 2
    """With 3, the second is cut in two."""
    last_on: str = "V100"
    """Where the last stage runs."""
    replicas: int = 4
    """Of the first stage."""


KINDS: Mapping[str, tuple[str, tuple[Any, Any]]] = {
    "batch": ("batch", (8, 4)),
    "ramps": ("every_ramp", (True, False)),
    "thresholds": ("entropy", ENTROPIES),
    "split points": ("cut", (4, 5)),
    "stages": ("stages", (2, 3)),
    "accelerator type": ("last_on", ("V100", "P100")),
    "replicas": ("replicas", (4, 5)),
}
"""By the kind of change, the knob that it turns and between what."""


def turned(knobs: Knobs, kind: str) -> Knobs:
    """The knobs after a change of that kind; the same kind again turns back."""
    knob, (one, other) = KINDS[kind]
    return replace(knobs, **{knob: other if getattr(knobs, knob) == one else one})


def plan_at(knobs: Knobs, spec: PolicySpec) -> Plan:
    """The plan; `spec` gives the policy all but its thresholds."""
    ramps = tuple(range(NUM_BLOCKS - 1)) if knobs.every_ramp else tuple(range(0, NUM_BLOCKS - 1, 2))
    bounds = (0, knobs.cut, NUM_BLOCKS) if knobs.stages == 2 else (0, knobs.cut, 8, NUM_BLOCKS)
    replicas = (knobs.replicas, 3) if knobs.stages == 2 else (knobs.replicas, 2, 2)
    stages = []
    for (first, end), count in zip(pairwise(bounds), replicas, strict=True):
        split = Split(first=first, end=end, batch=knobs.batch, ramps=tuple(r for r in ramps if first <= r < end))
        device = emulated(knobs.last_on if end == NUM_BLOCKS else "V100")
        more = 1 if device == emulated("P100") else 0  # which is slower
        stages.append(Stage(device=device, replicas=count + more, splits=(split,)))
    return Plan(stages=tuple(stages), policy=replace(spec, thresholds=dict.fromkeys(ramps, knobs.entropy)))


def changes(spec: PolicySpec) -> Iterator[tuple[str, Plan]]:
    """What changes, and the plan after it, without end: every kind there, then every kind back, and so on."""
    knobs = Knobs()
    for kind in cycle(KINDS):
        before, knobs = knobs, turned(knobs, kind)
        up_or_down = {-1: " down", 0: "", 1: " up"}[knobs.replicas - before.replicas]
        yield f"{kind}{up_or_down}", plan_at(knobs, spec)


def all_plans(spec: PolicySpec) -> list[Plan]:
    """Every plan that `changes` comes to."""
    stream = changes(spec)
    return [plan_at(Knobs(), spec), *(next(stream)[1] for _ in range(2 * len(KINDS)))]


SHARE_OF_CAPACITY = 0.6
WARM_S = 10.0
"""Left out: connections open, the first batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One change as it went; seconds after the load began."""

    kind: str
    from_s: float
    until_s: float
    """When the new plan was in force and the old one had drained."""
    error: str | None = None

    def around(self, slo_s: float) -> Span:
        """When requests were sent that it may have met: those under way when it began, and those right after it."""
        return self.from_s - slo_s, self.until_s + slo_s


def run(on: Bench) -> dict[str, Any]:
    """A minute of peace, changes, a minute of peace."""
    rate_per_s = SHARE_OF_CAPACITY * least_rate(on)
    first = plan_at(Knobs(), on.spec)
    quiet_s, changing_s = 60 * on.options.quiet_minutes, 60 * on.options.minutes
    end_s = 2 * (WARM_S + quiet_s) + changing_s

    async def event(service: Service) -> list[Change]:
        return await change_all(on, service, WARM_S + quiet_s, WARM_S + quiet_s + changing_s)

    result = played(
        on,
        first,
        [on.steady("all", end_s, rate_per_s)],
        hand_control(on.problem, on.spec, state="changes"),
        event=event,
        probe_share=0.0,
    )
    driven, done = result.driven, result.meanwhile
    around = [each.around(driven.slo_s) for each in done]
    windows = {
        "before": [(WARM_S, WARM_S + quiet_s)],
        "around changes": around,
        "between them": between(around, WARM_S + quiet_s, end_s - quiet_s),
        "after": [(end_s - quiet_s, end_s)],
    }
    loosest = dict.fromkeys(on.records.ramps, max(ENTROPIES))
    told = judged(on, driven, windows, title=f"{rate_per_s:.0f} inputs/s", thresholds=loosest)
    by_kind(driven, done)
    return {"changes": done, **told}


def least_rate(on: Bench) -> float:
    """Inputs per second of the weakest plan of the sequence."""
    rates = []
    for plan in all_plans(on.spec):
        assert plan.policy is not None
        assert isinstance(plan.policy.thresholds, dict)
        reach = joint_reach(on.records, plan.policy.thresholds)
        rates.append(evaluate(on.problem, plan.stages, reach).rate_per_s)
    return min(rates)


async def change_all(on: Bench, service: Service, from_s: float, until_s: float) -> list[Change]:
    """One every so many seconds; a change that takes longer puts off the next."""
    began_s, done = time.monotonic(), list[Change]()
    await asyncio.sleep(from_s)
    for kind, plan in changes(on.spec):
        if time.monotonic() - began_s >= until_s:
            break
        done.append(await change(service, kind, plan, began_s))
        await asyncio.sleep(max(0.0, on.options.every - (done[-1].until_s - done[-1].from_s)))
    return [*done, await change(service, "back to the first", plan_at(Knobs(), on.spec), began_s)]


async def change(service: Service, kind: str, plan: Plan, began_s: float) -> Change:
    """To a plan, held."""
    from_s, error = time.monotonic() - began_s, None
    try:
        await service.apply(plan, hold=True)
    except Exception as failure:  # counted: whatever a change fails with is a finding
        error = repr(failure)
    return Change(kind=kind, from_s=from_s, until_s=time.monotonic() - began_s, error=error)


def by_kind(driven: Driven, done: list[Change]) -> None:
    """Print what changes of each kind did."""
    rows = []
    for kind in dict.fromkeys(each.kind for each in done):
        mine = [each for each in done if each.kind == kind]
        during = [figures(driven, each.around(driven.slo_s)) for each in mine]
        failed = [each.error for each in mine if each.error]
        slowest_s = max(each.until_s - each.from_s for each in mine)
        p99 = milliseconds(max((each.p99_s or 0.0 for each in during), default=0.0))
        rows.append((kind, len(mine), f"{slowest_s:.1f}", p99, sum(each.lost for each in during), len(failed)))
    show("", ("change", "times", "s at most", "p99 ms around it", "lost", "failed"), rows)
    for error in dict.fromkeys(each.error for each in done if each.error):
        print(f"a change failed: {error}")


if __name__ == "__main__":
    command("changes", __doc__, run, COUNTS, time_scale=10.0, minutes=5.0, quiet_minutes=1.0, every=10.0)
