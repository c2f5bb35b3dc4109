"""First come, first served: what the schemes alone are worth, in TCB's figures 11 and 12."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from experiments.kit import Spread
from experiments.studies.study import Comparison, Effort, StudyResult, Table, ratio
from experiments.tcb import cases, real
from experiments.tcb.cost import Cost, published_v100
from experiments.tcb.device import Side
from experiments.tcb.rates import ANSWERED, SCHEDULED, SIDES, ByRate, by_rate
from experiments.tcb.schemes import layout
from simulator.decisions import IntArray

ALL: Mapping[str, Side] = {
    **SIDES,
    "TCB, slotted": cases.SLOTTED_TCB,
    "TTB, 64 inputs": replace(cases.TNB, scheme="grouped"),
    "slots, 64 inputs": replace(cases.TNB, scheme="slots"),
}
READINGS = {"variance": 1, "deviation": 2}
"""What the paper's "variance" may be, and the power that makes a variance of it."""
PAPER_TNB, PAPER_TTB = 3.33, {20.0: 1.52, 100.0: 1.72}
STEPS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """The CPU's own figures, at one variance."""

    cost: Cost
    over_packed: Mapping[str, Spread]


def study(variance: float, effort: Effort) -> StudyResult:
    """Simulated at rising rates, full batches on three devices, and really computed."""
    drawn, device = cases.lengths(cases.DRAWN, variance), cases.paper_device()
    found = by_rate(drawn, cases.ARRIVAL, device, effort)
    computed = compute(drawn, effort)
    devices = {
        "V100, published": published_v100(),
        "this CPU, MiniLM": computed.cost,
        f"V100 with a fixed part as long as makes TNB's ratio {PAPER_TNB} (variance 20)": with_the_paper_s_ratio(
            device
        ),
    }
    full = {name: capacities(drawn, cost) for name, cost in devices.items()}
    return compare(variance, found, full, computed, bounds(drawn))


def capacities(drawn: IntArray, cost: Cost) -> dict[str, float]:
    """Requests per second of every side, each batch full."""
    return {name: cases.capacity(side, drawn, cost) for name, side in ALL.items()}


def with_the_paper_s_ratio(device: Cost) -> Cost:
    """The device with so long a fixed part per run that TCB has 3.33 times TNB's throughput at variance 20.

    A decoder that gives one token after another takes about as many steps for few requests as for many: its time is
    of this kind. Found by halving between no such part and a hundred times a full batch of TNB's.
    """
    drawn = cases.lengths(cases.DRAWN // 2, 20.0)
    low_s, high_s = 0.0, 100 * cases.BATCH / cases.SATURATED_PER_S
    for _ in range(STEPS):
        fixed_s = (low_s + high_s) / 2
        slow = replace(device, fixed_s=fixed_s)
        over = cases.capacity(cases.TCB, drawn, slow) / cases.capacity(cases.TNB, drawn, slow)
        low_s, high_s = (fixed_s, high_s) if over < PAPER_TNB else (low_s, fixed_s)
    return replace(device, fixed_s=high_s)


def bounds(drawn: IntArray) -> dict[str, float]:
    """Tokens computed by batches of 64 in order of arrival, over the tokens that there are; and requests of a batch."""
    flat = Cost(fixed_s=0.0, token_s=1.0, cell_s=0.0)
    parts = [drawn[at : at + cases.BATCH].tolist() for at in range(0, len(drawn), cases.BATCH)]
    padded = sum(run.work.tokens for part in parts for run in layout("padded", part, flat))
    return {
        "tokens of padded rows over tokens": padded / float(drawn.sum()),
        "requests of TCB's batch over those of TNB's": cases.ROW / float(drawn.mean()),
    }


def compute(drawn: IntArray, effort: Effort) -> Computed:
    """MiniLM's size in full, one thread."""
    torch.set_num_threads(1)
    full = effort == "full"
    timed = real.Timed(real.MODELS["minilm"] if full else real.TINY)
    cost = timed.cost(5 if full else 1)
    parts = [drawn[at * cases.BATCH : (at + 1) * cases.BATCH].tolist() for at in range(2 if full else 1)]
    took_ms = real.compared(timed, parts, real.schemes_of(cost), rounds=5 if full else 1)
    over = {name: each for name, each in real.times_of(took_ms, real.OURS).items() if name != real.OURS}
    return Computed(cost=cost, over_packed=over)


def compare(
    variance: float,
    found: ByRate,
    full: Mapping[str, Mapping[str, float]],
    computed: Computed,
    bound: Mapping[str, float],
) -> StudyResult:
    """The paper's two ratios, as simulated, as computed, and as a device would have them whose time hardly grows."""
    slow = list(full)[-1]
    paper = {"TNB": PAPER_TNB if variance == 20.0 else None, "TTB": PAPER_TTB[variance]}
    measured = {f"{kind}, this CPU, 64 inputs": each for kind, each in computed.over_packed.items()}
    return StudyResult(
        comparisons=(
            *(
                Comparison(f"maximum throughput, TCB / {other}", found.over(SCHEDULED, other), paper[other])
                for other in paper
            ),
            *(
                Comparison(f"the same on a {slow}: TCB / {other}", ratio(full[slow]["TCB"], full[slow][other]), each)
                for other, each in paper.items()
            ),
            *(Comparison(f"bound by count: {name}", each) for name, each in bound.items()),
            *(Comparison(f"packed over {name}", each.median) for name, each in measured.items()),
        ),
        pictures=(
            found.lines(SCHEDULED, f"First come, first served, variance {variance:g}", "scheduled in time per second"),
            found.lines(ANSWERED, "The same, answered by the deadline", "answered in time per second"),
        ),
        figures=_document(found, full, computed, bound),
        tables=(_full_table(full), _readings_table(variance), found.table()),
    )


def _full_table(full: Mapping[str, Mapping[str, float]]) -> Table:
    rows = [
        (device, side, per_s, ratio(per_s, of["TNB"]), ratio(per_s, of["TTB"]))
        for device, of in full.items()
        for side, per_s in of.items()
    ]
    return Table("Every batch full", ("device", "side", "requests/s", "x TNB", "x TTB"), tuple(rows))


def _readings_table(variance: float) -> Table:
    device, rows = cases.paper_device(), []
    for name, power in READINGS.items():
        drawn = cases.lengths(cases.DRAWN // 2, variance**power)
        per_s = {side: cases.capacity(SIDES[side], drawn, device) for side in ("TNB", "TTB", "TCB")}
        over = (ratio(per_s["TCB"], per_s[other]) for other in ("TNB", "TTB"))
        rows.append((f"{variance:g} is a {name}", float(drawn.mean()), float(drawn.std()), *over))
    return Table(
        "What the paper's variance may be: lengths drawn so, every batch full on the V100",
        ("", "mean tokens", "deviation", "TCB / TNB", "TCB / TTB"),
        tuple(rows),
    )


def _document(
    found: ByRate, full: Mapping[str, Mapping[str, float]], computed: Computed, bound: Mapping[str, float]
) -> dict[str, Any]:
    return {
        "by_rate": found.document(),
        "full": full,
        "bounds": bound,
        "cpu": {"cost": computed.cost, "over_packed": {name: tuple(of) for name, of in computed.over_packed.items()}},
    }
