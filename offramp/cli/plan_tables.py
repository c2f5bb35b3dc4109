"""Plans and what-ifs as tables, times in milliseconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Column, Table

from offramp.cli.printing import make_table, milliseconds
from offramp.jobs.planning import NoPlanAnswer, PlanAnswer
from optimizer.decision import STRATEGIES, Decision, NoPlan, Planned, Strategy
from optimizer.explain import Comparison
from optimizer.problem import MinimizeCost, PlanProblem
from optimizer.rescore import Rescoring
from optimizer.what_if import Axis

AXIS_TITLES = {
    "slo_s": "SLO ms",
    "batch_limit": "batch limit",
    "usd_per_hour": "budget USD/h",
    "rate_per_s": "rate /s",
    "count": "count",
}


def plan_tables(answer: PlanAnswer) -> list[Table]:
    """Stages, figures, and the other strategies."""
    tables = [_stages(answer), _figures(answer)]
    if answer.rescoring is not None:
        tables.append(_joint(answer.rescoring))
    comparisons = answer.explanation.comparisons
    if comparisons:
        table = comparison_table(comparisons)
        if answer.rescoring is not None:
            table.caption = "Survival nested in all of them: the planner's own choice of each strategy"
        tables.append(table)
    return tables


def comparison_table(comparisons: Sequence[Comparison]) -> Table:
    """What the other strategies reach, and how many times better the best plan is."""
    table = make_table("strategy", "rate /s", "latency ms", "USD/h", "best is better by", title="Other strategies")
    for each in comparisons:
        times = "-" if each.times_better is None else f"{each.times_better:.2f} x"
        table.add_row(each.strategy, *_decision_cells(each.decision), times)
    return table


def no_plan_tables(answer: NoPlanAnswer) -> list[Table]:
    """The other strategies, where one of them has a plan."""
    if not any(isinstance(each.decision, Planned) for each in answer.comparisons):
        return []
    return [comparison_table(answer.comparisons)]


def what_if_table(problem: PlanProblem, axis: Axis, rows: Sequence[tuple[float, Mapping[Strategy, Decision]]]) -> Table:
    """One row per value: what the best plan does, and what every other strategy reaches of the objective."""
    cheapest = axis.name == "rate_per_s" or isinstance(problem.objective, MinimizeCost)
    title = AXIS_TITLES[axis.name] if axis.device is None else f"{axis.device} {AXIS_TITLES[axis.name]}"
    unit = "USD/h" if cheapest else "/s"
    others = [strategy for strategy in STRATEGIES if strategy != "best"]
    names = (title, "best /s", "latency ms", "USD/h", *(f"{each} {unit}" for each in others))
    table = make_table(*names, title="What if", narrow=True)
    for value, decisions in rows:
        shown = value * 1e3 if axis.name == "slo_s" else value
        best = _decision_cells(decisions["best"])
        table.add_row(f"{shown:g}", *best, *(_sought(decisions[each], cheapest=cheapest) for each in others))
    return table


def _stages(answer: PlanAnswer) -> Table:
    table = make_table(
        Column("stage", no_wrap=True),
        *("blocks", "batch", "ramps", "T ms", "wait ms", "fill", "rate /s", "hop ms"),
        title=f"Plan ({answer.planned.strategy})",
        narrow=True,
    )
    planned = answer.planned
    shown: set[int] = set()
    for each in planned.figures.splits:
        stage, bounds = planned.stages[each.stage_index], planned.figures.stages[each.stage_index]
        split = each.split
        own = each.stage_index not in shown  # a stage's own cells stand on the row of its first split
        shown.add(each.stage_index)
        table.add_row(
            f"{each.stage_index}: {stage.replicas} x {stage.device}" if own else "",
            f"{split.first}-{split.end - 1}",
            str(split.batch),
            _ranges(split.ramps) or "-",
            milliseconds(each.seconds),
            milliseconds(each.wait_s),
            f"{each.fill:.0%}",
            *((_rate(bounds.rate_per_s), milliseconds(bounds.hop_s) if bounds.hop_s else "-") if own else ("", "")),
        )
    return table


def _figures(answer: PlanAnswer) -> Table:
    planned, figures, limit_s = answer.planned, answer.planned.figures, answer.problem.slo.limit_s
    table = make_table("", "value", title="Predicted")
    table.add_row("rate", f"{_rate(figures.rate_per_s)}/s")
    if isinstance(answer.problem.objective, MinimizeCost):
        table.add_row("rate asked for", f"{_rate(figures.served_per_s)}/s")
    table.add_row("worst-case latency", f"{milliseconds(figures.latency_s)} ms of {milliseconds(limit_s)} ms allowed")
    table.add_row("cost", f"{figures.usd_per_hour:.2f} USD/h")
    for index, bind in enumerate(answer.explanation.binds):
        table.add_row("" if index else "binds", bind.text)
    proof = "exact: no plan of its space is better" if planned.gap == 0 else f"within {planned.gap:.2%} of the best"
    table.add_row("proof", proof)
    return table


def _joint(rescoring: Rescoring) -> Table:
    """Both views of the plan that was chosen, side by side."""
    shown = rescoring.chosen or rescoring.candidates[0]
    table = make_table("", "nested", "joint", title="By the exit records")
    pairs = (
        ("rate /s", _rate(shown.nested.rate_per_s), _rate(shown.joint.rate_per_s)),
        ("latency ms", milliseconds(shown.nested.latency_s), milliseconds(shown.joint.latency_s)),
    )
    for cells in pairs:
        table.add_row(*cells)
    number = len(rescoring.candidates)
    if rescoring.chosen is None:
        table.caption = f"By the records none of {number} candidates keeps every promise: {'; '.join(shown.broken)}"
    else:
        table.caption = f"candidate {rescoring.candidates.index(shown) + 1} of {number}"
    return table


def _decision_cells(decision: Decision) -> tuple[str, str, str]:
    if isinstance(decision, NoPlan):
        return "no plan", f"{decision.binding} binds", "-"
    figures = decision.figures
    return _rate(figures.rate_per_s), milliseconds(figures.latency_s), f"{figures.usd_per_hour:.2f}"


def _sought(decision: Decision, *, cheapest: bool) -> str:
    if isinstance(decision, NoPlan):
        return "-"
    return f"{decision.figures.usd_per_hour:.2f}" if cheapest else _rate(decision.figures.rate_per_s)


def _rate(per_s: float) -> str:
    return f"{per_s:.1f}" if per_s < 1000 else f"{per_s:.0f}"


def _ranges(ramps: Sequence[int]) -> str:
    """Ramps in few characters: 0-2, 5, 7."""
    starts = [ramp for ramp in ramps if ramp - 1 not in ramps]
    ends = [ramp for ramp in ramps if ramp + 1 not in ramps]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
