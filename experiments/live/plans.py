"""A sequence of plans that changes one thing at a time: every kind of change there is, there and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Any

from earlyexit.split import Split
from experiments.live.emulation import emulated
from optimizer.plan import Plan, PolicySpec, Stage

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
