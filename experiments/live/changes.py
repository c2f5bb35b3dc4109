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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from earlyexit.store import read_card
from experiments.live.figures import (
    EMULATED,
    Figures,
    between,
    check,
    figures,
    figures_over,
    milliseconds,
    usage_words,
    write,
)
from experiments.live.load import Driven, drive
from experiments.live.options import Bench, bench, parser
from experiments.live.phases import Phase
from experiments.live.plans import COUNTS, ENTROPIES, Knobs, all_plans, changes, plan_at
from experiments.live.service import Service, emulated_settings, hand_control, served
from optimizer.evaluate import evaluate
from optimizer.plan import Plan
from optimizer.rescore import joint_reach

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


def main() -> None:
    """Run it, print the table, write the figures."""
    made = parser("changes", __doc__, time_scale=10.0)
    made.add_argument("--minutes", type=float, default=5.0)
    made.add_argument("--quiet-minutes", type=float, default=1.0, help="before and after")
    made.add_argument("--every", type=float, default=10.0)
    options = made.parse_args()
    on = bench(options, COUNTS)
    rate_per_s = SHARE_OF_CAPACITY * least_rate(on)
    first = plan_at(Knobs(), on.spec)
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    settings = emulated_settings(
        on.emulation, on.model, first, control=hand_control(problem, on.spec, state="changes"), probe_share=0.0
    )
    print(f"{EMULATED} {options.time_scale:g} times; SLO {on.emulation.wall_slo_s:g} s, {rate_per_s:.0f} inputs/s")
    with served(settings, first, port=options.port, front=options.front) as service:
        driven, done = asyncio.run(_load_and_changes(on, service, rate_per_s))
    report(on, driven, done)


def least_rate(on: Bench) -> float:
    """Inputs per second of the weakest plan of the sequence."""
    problem = on.emulation.problem(on.records.outcome(on.thresholds).survival)
    rates = []
    for plan in all_plans(on.spec):
        assert plan.policy is not None
        assert not isinstance(plan.policy.thresholds, (float, int, type(None)))
        reach = joint_reach(on.records, plan.policy.thresholds)
        rates.append(evaluate(problem, plan.stages, reach).rate_per_s)
    return min(rates)


async def _load_and_changes(on: Bench, service: Service, rate_per_s: float) -> tuple[Driven, list[Change]]:
    options = on.options
    quiet_s = WARM_S + 60 * options.quiet_minutes
    load = Phase(
        name="all",
        seconds=2 * quiet_s + 60 * options.minutes,
        keys=on.records.sample_ids,
        rate_per_s=rate_per_s,
    )
    began_s = time.monotonic()
    driven, done = await asyncio.gather(
        drive(service.url, [load], slo_s=on.emulation.wall_slo_s, seed=options.seed),
        _changes(on, service, began_s=began_s, from_s=quiet_s, until_s=quiet_s + 60 * options.minutes),
    )
    return driven, done


async def _changes(on: Bench, service: Service, *, began_s: float, from_s: float, until_s: float) -> list[Change]:
    """One every so many seconds; a change that takes longer puts off the next."""
    done: list[Change] = []
    await asyncio.sleep(from_s)
    for kind, plan in changes(on.spec):
        if time.monotonic() - began_s >= until_s:
            break
        done.append(await _change(service, kind, plan, began_s))
        await asyncio.sleep(max(0.0, on.options.every - (done[-1].until_s - done[-1].from_s)))
    return [*done, await _change(service, "back to the first", plan_at(Knobs(), on.spec), began_s)]


async def _change(service: Service, kind: str, plan: Plan, began_s: float) -> Change:
    from_s = time.monotonic() - began_s
    error = None
    try:
        await service.apply(plan, hold=True)
    except Exception as failure:  # counted: whatever a change fails with is a finding
        error = repr(failure)
    return Change(kind=kind, from_s=from_s, until_s=time.monotonic() - began_s, error=error)


def span_around(change: Change, slo_s: float) -> tuple[float, float]:
    """When requests were sent that a change may have met: those under way when it began, and those right after it."""
    return change.from_s - slo_s, change.until_s + slo_s


def report(on: Bench, driven: Driven, done: Sequence[Change]) -> None:
    """Print and write what became of the run."""
    quiet_s = 60 * on.options.quiet_minutes
    end_s = driven.phases[0].seconds
    around = [span_around(each, driven.slo_s) for each in done]
    windows = {
        "before": figures(driven, WARM_S, WARM_S + quiet_s),
        "around changes": figures_over(driven, around),
        "between them": figures_over(driven, between(around, WARM_S + quiet_s, end_s - quiet_s)),
        "after": figures(driven, end_s - quiet_s, end_s),
    }
    print("window          requests  answered  lost  p50 ms  p99 ms  in SLO  errors")
    for name, each in windows.items():
        _print(name, each)
    for kind in dict.fromkeys(each.kind for each in done):
        mine = [each for each in done if each.kind == kind]
        took_s = [each.until_s - each.from_s for each in mine]
        during = [figures(driven, *span_around(each, driven.slo_s)) for each in mine]
        worst_s = max((each.p99_s or 0.0 for each in during), default=0.0)
        failed = sum(each.error is not None for each in mine)
        print(
            f"  {kind:<18} {len(mine)} changes, {max(took_s):5.1f} s at most, p99 around it {worst_s * 1e3:5.0f} ms, "
            f"lost {sum(each.lost for each in during)}, failed {failed}"
        )
    for error in dict.fromkeys(each.error for each in done if each.error):
        print(f"  a change failed: {error}")
    loosest = dict.fromkeys(on.records.ramps, max(ENTROPIES))
    checks = check(driven, on.records, loosest, read_card(on.model).label_names)
    print(f"sent {checks.sent}, outcomes {checks.outcomes}, twice {checks.twice}, wrong answers {len(checks.wrong)}")
    print(usage_words(driven.usage))
    document: dict[str, Any] = {
        "time_scale": on.options.time_scale,
        "slo_s": driven.slo_s,
        "windows": {name: asdict(each) for name, each in windows.items()},
        "changes": [asdict(each) for each in done],
        "checks": asdict(checks),
        "usage": asdict(driven.usage),
    }
    write("changes", document)


def _print(name: str, each: Figures) -> None:
    share = each.in_slo / each.requests if each.requests else 0.0
    print(
        f"{name:<14} {each.requests:9} {each.answered:9} {each.lost:5} {milliseconds(each.p50_s):>7} "
        f"{milliseconds(each.p99_s):>7} {share:7.2%}  {dict(each.errors) or 'none'}"
    )


if __name__ == "__main__":
    main()
