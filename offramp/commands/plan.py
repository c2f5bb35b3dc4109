"""`offramp plan` and `offramp what-if`: runs the planner, and prints plans as JSON or as tables, in milliseconds."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Column, Table

from cluster.devices import find_device
from earlyexit.errors import InputError, PlanError, raising
from offramp.commands.options import PlanJob, WhatIfJob
from offramp.commands.output import make_table, milliseconds, print_result, rate_text, show
from optimizer.cost.evaluate import ExpectedSplit, merit, predictions
from optimizer.cost.explain import answered_by, bottlenecks, no_plan_text, times_better
from optimizer.cost.rescore import Rescoring, by_networks, joint_reach, rescore
from optimizer.generation.steps import generation_of
from optimizer.plans.plan import Plan, PolicySpec, Stage, chains_of
from optimizer.plans.plan_file import batches_document, chains_document, order_document, stages_document, write_plan
from optimizer.problems.problem import MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem
from optimizer.problems.problem_file import ProblemFile, read_problem, read_problems
from optimizer.problems.what_if import Axis, AxisName, variants, with_batch_limit
from optimizer.search.compiled import cache_folder
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy, strategies_for
from optimizer.search.planner import excess_s, more_devices, solve

if TYPE_CHECKING:
    from matplotlib.axes import Axes


ENDINGS = (".svg", ".png", ".pdf")
BANDS = ("#9ccc9c", "#f2a65a")
"""Alternating colours of stages."""
FUSED, SHRINKING, RAMP = "#3b6ea5", "#c05640", "#555555"


def check_picture(path: Path) -> Any:
    """Returns the result of `load_pyplot`; raises InputError for an unknown ending, or if matplotlib is missing."""
    if path.suffix.lower() not in ENDINGS:
        raise InputError(f"--plot {path}; allowed endings: {', '.join(ENDINGS)}")
    return load_pyplot()


def draw_plan(planned: Planned, path: Path) -> None:
    """Draws a plan in the format of the path's ending. The same plan gives the same file.

    Raises the errors of `check_picture`, and InputError if the file cannot be written.
    """
    pyplot = check_picture(path)
    kind = path.suffix.lower().removeprefix(".")
    with pyplot.rc_context({"svg.hashsalt": "offramp", "svg.fonttype": "none"}):
        figure, (above, below) = pyplot.subplots(2, 1, figsize=(9, 6), sharex=True, constrained_layout=True)
        try:
            _draw_devices(above, planned)
            _draw_batches(below, planned)
            figures = planned.figures
            cost = f", {figures.usd_per_hour:.2f} USD/h" if figures.usd_per_hour else ""
            latency = f"worst case {figures.latency_s * 1e3:.1f} ms"
            figure.suptitle(f"{planned.strategy}: {figures.rate_per_s:.0f}/s, {latency}{cost}")
            with raising(InputError, f"--plot {path}: cannot be written", OSError):
                figure.savefig(path, format=kind, metadata={"Date": None} if kind == "svg" else None)
        finally:
            pyplot.close(figure)


def load_pyplot() -> Any:
    """Returns pyplot, set to draw without a display; raises InputError if matplotlib is missing."""
    try:
        import matplotlib
    except ImportError as error:
        raise InputError("pictures need matplotlib; run in Offramp's clone: pip install '.[demo]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw_devices(axes: Axes, planned: Planned) -> None:
    """Draws a bar per split, in a row per stage, and active ramps as dashed lines."""
    if len(planned.figures.shares) == 1:
        _draw_bands(axes, planned.stages)
    for index, stage in enumerate(planned.stages):
        for split in stage.splits:
            left, width = split.first - 0.42, split.end - split.first - 0.16
            axes.barh(index, width, left=left, height=0.55, color=FUSED, zorder=2)
            middle, size = (split.first + split.end - 1) / 2, split.tokens or split.batch
            axes.text(middle, index, str(size), color="white", ha="center", va="center", zorder=3)
            for ramp in split.ramps:
                axes.axvline(ramp + 0.5, color=RAMP, linewidth=0.8, linestyle="--", zorder=1)
    labels = [f"stage {index}:\n{stage.replicas} x {stage.device}" for index, stage in enumerate(planned.stages)]
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.set_title("Splits, with their batch sizes; active ramps dashed", fontsize=10)


def _draw_bands(axes: Axes, stages: Sequence[Stage]) -> None:
    """Draws each stage as a coloured band over its blocks."""
    for index, stage in enumerate(stages):
        for first, end in stage.ranges:
            axes.axvspan(first - 0.5, end - 0.5, color=BANDS[index % len(BANDS)], alpha=0.25, zorder=0)


def _draw_batches(axes: Axes, planned: Planned) -> None:
    """Draws the batch at every block: as bars, and without fusing, or with a line for each of several chains."""
    figures, first = planned.figures, 0
    axes.set(xlabel="block", ylabel="expected batch")
    axes.set_title("Batch at every block", fontsize=10)
    if len(figures.shares) == 1:
        blocks, fused = _at_blocks(figures.splits)
        sizes = [each.split.tokens or each.split.batch for each in figures.splits]
        entry = sizes[0]  # without fusing, the first batch shrinks (E3 section 2.3)
        without = [
            entry * each.reached_by * batch / size
            for each, size in zip(figures.splits, sizes, strict=True)
            for batch in each.batch_at_block
        ]
        _draw_bands(axes, planned.stages)
        axes.bar(blocks, fused, width=0.7, color=FUSED, label="with fusing")
        axes.plot(blocks, without, color=SHRINKING, marker="o", label=f"one batch of {entry} shrinks")
        axes.set(xticks=blocks, ylim=(0, 1.25 * max(fused)))
        axes.legend(loc="upper right", ncols=2, fontsize=9)
        return
    for share, stages in zip(figures.shares, chains_of(planned.stages), strict=True):
        end = first + len(stages)
        blocks, batches = _at_blocks([each for each in figures.splits if first <= each.stage_index < end])
        axes.step(blocks, batches, where="mid", marker="o", label=f"{share:.0%} by stages {first} to {end - 1}")
        axes.set_xticks(blocks)
        first = end
    axes.set_ylim(bottom=0)
    axes.legend(loc="upper right", fontsize=9)


def _at_blocks(splits: Sequence[ExpectedSplit]) -> tuple[list[int], list[float]]:
    """Returns the blocks of some splits, and the batch at each."""
    blocks = [block for each in splits for block in range(each.split.first, each.split.end)]
    return blocks, [batch for each in splits for batch in each.batch_at_block]


Solve = Callable[..., Decision]
"""`optimizer.search.planner.solve`, called with a problem, a strategy and `time_limit_s`."""
NO_PLAN = 3
"""Exit status if the problem is valid and no plan meets it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAnswer:
    """A plan with its explanation, or the reason why there is none."""

    file: ProblemFile
    decision: Decision | PlanError
    """A PlanError is of a search that neither found a plan nor proved that none exists."""
    baselines: Mapping[Strategy, Mapping[str, Any]]
    """The plans of the other strategies as JSON data, and how many times better the plan of `best` is."""
    rescoring: Rescoring | None = None
    """The plan's scores by exit records or recorded batches; None without them, or without a plan."""

    @property
    def planned(self) -> Planned:
        """The plan; raises PlanError with the reason if there is none."""
        if isinstance(self.decision, PlanError):
            raise self.decision
        if isinstance(self.decision, NoPlan):
            raise PlanError(no_plan_text(self.file.problem, self.decision))
        return self.decision

    def plan(self, policy: PolicySpec | None) -> Plan:
        """Returns the planner's plan with an exit policy, without word pruning; raises PlanError if there is none."""
        problem, planned = self.file.problem, self.planned
        return Plan(
            stages=planned.stages,
            shares=planned.figures.shares,
            policy=policy,
            order=self.file.order,
            predicted=predictions(problem, planned.figures),
            networks=problem.networks,
        )


def announce_compilation() -> None:
    """Tells the user if the first plan on this machine will take longer."""
    if not any(cache_folder().rglob("*.nbi")):
        print("compiling the planner, once on this machine: up to a minute", file=sys.stderr, flush=True)


def answer(
    file: ProblemFile,
    strategy: Strategy,
    solve: Solve = solve,
    *,
    compared: Sequence[Strategy] | None = None,
    time_limit_s: float | None = None,
) -> PlanAnswer:
    """Plans with a strategy and with others for comparison (`compared`; None: all that fit the problem).

    Comparisons use the planner's own model, nested survival. With exit records, `rescoring` has the scores by these
    records, and the plan is the candidate that they prefer. Plans of the compared strategies are candidates for `best`.
    `time_limit_s` is for the search of each strategy, and for the search for missing accelerators; None: no limit.
    """
    announce_compilation()
    problem, rescoring = file.problem, None
    compared = strategies_for(problem) if compared is None else compared
    decisions = {each: _solved(solve, problem, each, time_limit_s) for each in dict.fromkeys((*compared, strategy))}
    decision = decisions[strategy]
    if isinstance(decision, NoPlan):
        more = None if decision.binding == "ingress" else more_devices(problem, strategy, time_limit_s)
        decision = replace(decision, more=more)
    elif isinstance(decision, Planned):
        if strategy == "best":  # exit records may prefer the plan of another strategy
            others = [each.stages for each in decisions.values() if isinstance(each, Planned) and each is not decision]
            decision = replace(decision, candidates=(*decision.candidates, *others))
        rescoring = _rescoring(file, decision)
        if rescoring is not None:
            decision = rescoring.planned
    best = decisions.get("best")
    baselines: dict[Strategy, dict[str, Any]] = {
        each: {**_decision(problem, decisions[each]), "times_better": times_better(problem, best, decisions[each])}
        for each in compared
        if each != "best"
    }
    return PlanAnswer(file=file, decision=decision, baselines=baselines, rescoring=rescoring)


def best_answer(
    files: Sequence[ProblemFile],
    strategy: Strategy,
    solve: Solve = solve,
    *,
    compared: Sequence[Strategy] | None = None,
    time_limit_s: float | None = None,
) -> PlanAnswer:
    """Returns the best plan over several calibrations, the first of equal ones: by `excess_s`, then by `merit`.

    Without any plan, returns the first calibration's reason, or raises the PlanError of a search that proved nothing.
    """
    answers = [answer(file, strategy, solve, compared=compared, time_limit_s=time_limit_s) for file in files]
    plans = [each for each in answers if isinstance(each.decision, Planned)]
    errors = [each.decision for each in answers if isinstance(each.decision, PlanError)]
    if errors and not plans:
        raise errors[0]
    plans.sort(key=lambda each: merit(each.file.problem, each.planned.figures), reverse=True)
    return min(plans, key=lambda each: excess_s(each.file.problem, each.planned), default=answers[0])


def answer_document(answer: PlanAnswer) -> dict[str, Any]:
    """Returns the answer as JSON data: first the plan, then its explanation."""
    problem = answer.file.problem
    if isinstance(answer.decision, NoPlan):
        message = {"message": no_plan_text(problem, answer.decision)}
        no_plan = _no_plan_document(answer.decision) | message
        return {"no_plan": no_plan, "strategy": answer.decision.strategy, "baselines": answer.baselines}
    planned, figures = answer.planned, answer.planned.figures
    chains = {"schema_version": 2, "chains": chains_document(planned.stages, figures.shares)}
    calibration = answer.file.recorded and answer.file.recorded.calibration  # None if no model folder is named
    hop_rates = (each.hop_rate_per_s if math.isfinite(each.hop_rate_per_s) else None for each in figures.stages)
    return {
        **({"networks": list(problem.networks)} if problem.networks else {}),
        **({"stages": stages_document(planned.stages)} if len(figures.shares) == 1 else chains),
        **_decision(problem, planned),
        **order_document(answer.file.order),
        "strategy": planned.strategy,
        "served_per_s": figures.served_per_s,
        "latency_limit_s": problem.slo.limit_s,
        "bound": planned.bound,
        **({"calibration": str(calibration)} if calibration else {}),
        "binds": [
            {"kind": each.kind, "stage": each.stage_index, "text": each.text}
            for each in bottlenecks(problem, planned.stages, figures)
        ],
        "splits": [
            {
                "stage": each.stage_index,
                "seconds": each.seconds.mean_s,
                "wait_s": each.wait_s,
                "reached_by": each.reached_by,
                "batch_at_block": list(each.batch_at_block),
                "fill": each.fill,
                **({"crossing_s": each.crossing_s} if each.crossing_s else {}),
            }
            for each in figures.splits
        ],
        "stage_figures": [
            {"rate_per_s": each.rate_per_s, "hop_s": each.hop_s, "hop_rate_per_s": hop_rate_per_s}
            for each, hop_rate_per_s in zip(figures.stages, hop_rates, strict=True)
        ],
        **({"answered_by": answered_by(problem, planned.stages)} if problem.networks else {}),
        **({"generation": asdict(figures.sequences)} if figures.sequences else {}),
        "baselines": answer.baselines,
        "joint": None if answer.rescoring is None else _joint_document(problem, answer.rescoring),
    }


def serving_plan(answer: PlanAnswer, threshold: float | None = None) -> Plan:
    """Returns the plan for `offramp serve`, with an exit policy.

    Thresholds are those of the problem's exit records, or `threshold`, an entropy in nats, for all ramps. Raises the
    errors of `check_thresholds`, and PlanError for an unknown device.
    """
    file, stages, policy = answer.file, answer.planned.stages, None
    for stage in stages:
        find_device(stage.device)
    ramps = tuple(sorted({ramp for stage in stages for split in stage.splits for ramp in split.ramps}))
    if ramps:
        check_thresholds(file, threshold)
        policy = file.policy(ramps) or PolicySpec(name="entropy", thresholds=threshold)
    plan = answer.plan(policy)
    return replace(plan, prune=file.prune) if len(plan.used) > 1 else plan


def check_thresholds(file: ProblemFile, threshold: float | None) -> None:
    """Raises InputError unless a plan's ramps get thresholds from either the problem's exit records or `threshold`."""
    if file.problem.ramps and (file.recorded is None) == (threshold is None):
        raise InputError("--out: ramps need thresholds, from either --threshold or the problem's exit records")


def _solved(solve: Solve, problem: PlanProblem, strategy: Strategy, limit_s: float | None) -> Decision | PlanError:
    """Returns a strategy's decision, or the error of a search that neither found a plan nor proved that none exists."""
    try:
        return solve(problem, strategy, time_limit_s=limit_s)
    except PlanError as error:
        return error


def what_if(
    problem: PlanProblem, axis: Axis, solve: Solve = solve, *, time_limit_s: float | None = None
) -> Iterator[dict[str, Any]]:
    """Yields the result for each value of an axis as JSON data: the value, and the decisions of all strategies."""
    device = {} if axis.device is None else {"device": axis.device}
    for value, variant in zip(axis.values, variants(problem, axis), strict=True):
        decisions = {each: _solved(solve, variant, each, time_limit_s) for each in strategies_for(variant)}
        errors = [each for each in decisions.values() if isinstance(each, PlanError)]
        if len(errors) == len(decisions):
            raise errors[0]
        strategies = {name: _decision(problem, each) for name, each in decisions.items()}
        yield {**device, axis.name: value, "strategies": strategies}


def _rescoring(file: ProblemFile, planned: Planned) -> Rescoring | None:
    recorded, by_tokens = file.recorded, file.problem.lengths is not None
    if recorded is not None:
        reach = joint_reach(recorded.records, recorded.thresholds, by_tokens=by_tokens)
        if recorded.alone is not None:
            alone = joint_reach(recorded.alone, recorded.thresholds, by_tokens=by_tokens)
            reach = by_networks(file.problem, reach, alone)
        return rescore(file.problem, planned, reach)
    batches = file.problem.batches
    return None if batches is None else rescore(file.problem, planned, batches.survival)


def _no_plan_document(decision: NoPlan) -> dict[str, Any]:
    return {
        "binding": decision.binding,
        "nearest_slo_s": decision.nearest_slo_s,
        "highest_rate_per_s": decision.highest_rate_per_s,
        **({} if decision.more is None else {"more_devices": dict([decision.more])}),
    }


def _decision(problem: PlanProblem, decision: Decision | PlanError) -> dict[str, Any]:
    if isinstance(decision, PlanError):
        return {"no_plan": {"binding": None, "message": str(decision)}}
    if isinstance(decision, NoPlan):
        return {"no_plan": _no_plan_document(decision)}
    note = {"note": decision.note} if decision.note else {}
    return {**predictions(problem, decision.figures), **batches_document(decision.stages), "gap": decision.gap, **note}


def _joint_document(problem: PlanProblem, rescoring: Rescoring) -> dict[str, Any]:
    """Returns the predictions that exit records change, and what they say about the candidates, as JSON data."""
    shown = rescoring.chosen or rescoring.candidates[0]
    figures, names = predictions(problem, shown.joint), ("rate_per_s", "latency_s", "usd_per_hour", "mean_latency_s")
    return {
        **{name: figures[name] if math.isfinite(figures[name]) else None for name in names if name in figures},
        "broken": list(shown.broken),
        "candidates": len(rescoring.candidates),
        "chosen": None if rescoring.chosen is None else rescoring.candidates.index(rescoring.chosen),
    }


def run(job: PlanJob) -> None:
    """Plans, writes the requested files, and prints the plan."""
    if job.plot is not None:
        check_picture(job.plot)
    files = read_problems(job.problem, job.objective)
    if job.batch_limit is not None:
        files = tuple(replace(file, problem=with_batch_limit(file.problem, job.batch_limit)) for file in files)
    files = tuple(replace(file, order=job.order or file.order) for file in files)
    if job.out is not None and job.strategy != "stock":  # its plans have no ramps
        check_thresholds(files[0], job.threshold)
    result = best_answer(files, job.strategy, compared=None if job.compared else (), time_limit_s=job.time_limit_s)
    document, has_plan = answer_document(result), isinstance(result.decision, Planned)
    if has_plan and job.out is not None:
        write_plan(serving_plan(result, job.threshold), job.out)
    if has_plan and job.plot is not None:
        draw_plan(result.planned, job.plot)
    if not has_plan and not job.as_json:
        print(document["no_plan"]["message"], file=sys.stderr)
    print_result(document, lambda: plan_tables(result, document), as_json=job.as_json)
    if not has_plan:
        raise typer.Exit(NO_PLAN)


def run_what_if(job: WhatIfJob) -> None:
    """Plans for each value, and prints the results."""
    axes = {name: values for name in AXIS_TITLES if (values := getattr(job, name)) is not None}
    if len(axes) != 1:
        options = (WhatIfJob.model_fields[name].alias or name for name in axes or AXIS_TITLES)
        names = ", ".join(f"--{option.replace('_', '-')}" for option in options)
        raise InputError(f"give exactly one of the options with values, not {len(axes)}: {names}")
    [(name, values)] = axes.items()
    if name == "count":
        device, _, counts = values.partition("=")
        try:
            axis = Axis(name="count", values=tuple(sorted({int(each) for each in counts.split(",")})), device=device)
        except ValueError as error:
            expected = "it must be an accelerator type and counts, such as V100=4,8,16"
            raise InputError(f"--count {values!r}: {expected}") from error
    else:
        axis = Axis(name=name, values=values)
    problem = read_problem(job.problem).problem
    found = what_if(problem, axis, time_limit_s=job.time_limit_s)
    if not job.as_json:
        show(what_if_table(problem, axis, list(found)))
        return
    for each in found:
        print(json.dumps(each), flush=True)


def _generation_rows(problem: PlanProblem, predicted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields the figures of a model that generates: those of `SequenceFigures`, as JSON data."""
    generation = generation_of(problem)
    mean_ms, most_ms = milliseconds(predicted["token_s"]), milliseconds(predicted["most_token_s"])
    yield "tokens", f"{rate_text(predicted['tokens_per_s'])}/s of {rate_text(predicted['sequences_per_s'])} sequences/s"
    yield "time per token", f"{mean_ms} ms on average, {most_ms} at worst"
    limit_s = None if generation.ttft_s is None else generation.ttft_s * (1 - problem.slo.slack)
    allowed = "" if limit_s is None else f" of {milliseconds(limit_s)} ms allowed"
    yield "first token", f"{milliseconds(predicted['ttft_s'])} ms at worst{allowed}"
    at_most = "" if generation.most_running is None else f", {generation.most_running} run at a time"
    yield "sequences", f"{predicted['running']} keep all batches full{at_most}"
    yield "prompts", f"{predicted['prompt_share']:.1%} of the accelerators' time"
    yield "skipped tokens", f"{predicted['filled']:.2f} per survivor are filled in by {generation.fill}"
    for index, each in enumerate(predicted["pages"] or ()):
        yield f"pages, stage {index}", f"{each['needed']} needed of {each['pages']} per replica"


AXIS_TITLES: Mapping[AxisName, str] = {
    "slo_s": "SLO ms",
    "batch_limit": "batch limit",
    "usd_per_hour": "budget USD/h",
    "count": "count",
    "rate_per_s": "rate /s",
}
"""Titles of the axes, which are the fields of the options."""


def plan_tables(answer: PlanAnswer, document: Mapping[str, Any]) -> list[Table]:
    """Returns tables of stages, figures, and the other strategies; without a plan, of strategies that have one.

    `document`: the answer as JSON data.
    """
    problem, baselines = answer.file.problem, answer.baselines
    strategies: list[dict[str, str]] = []
    for strategy, each in baselines.items():
        better = "-" if each["times_better"] is None else f"{each['times_better']:.2f} x"
        strategies.append({"strategy": strategy, **_decision_cells(problem, each), "best is better by": better})
    compared = map(dict.values, strategies)
    others = [make_table(*strategies[0], title="Other strategies", rows=compared)] if strategies else []
    if isinstance(answer.decision, NoPlan):
        return others if any("no_plan" not in each for each in baselines.values()) else []
    tables = [
        stage_table(f"Plan ({answer.planned.strategy})", answer.planned),
        make_table("", "value", title="Predicted", rows=_figure_rows(answer, document)),
    ]
    if "generation" in document:
        rows = _generation_rows(problem, document["generation"])
        tables.append(make_table("", "value", title="Generation", rows=rows))
    if document["joint"] is not None:
        tables.append(_joint(document))
        for table in others:
            table.caption = "All figures are for nested survival, without the exit records"
    return tables + others


def stage_table(title: str, planned: Planned) -> Table:
    """Returns a table of a plan's stages and splits."""
    names = ("blocks", "batch", "ramps\nafter", "T ms", "wait ms", "fill", "rate /s", "hop ms")
    return make_table(Column("stage", no_wrap=True), *names, title=title, narrow=True, rows=_stage_rows(planned))


def what_if_table(problem: PlanProblem, axis: Axis, found: Sequence[Mapping[str, Any]]) -> Table:
    """Returns a table with a row per value: figures of the best plan, and the objective of every other strategy."""
    problem = replace(problem, objective=variants(problem, axis)[0].objective)  # it may differ from the file's
    title = AXIS_TITLES[axis.name] if axis.device is None else f"{axis.device} {AXIS_TITLES[axis.name]}"
    columns = {MaximizeRate: "rate /s", MinimizeCost: "USD/h", MinimizeLatency: "mean ms"}
    column = columns[type(problem.objective)]  # of `_decision_cells`
    others = [strategy for strategy in found[0]["strategies"] if strategy != "best"]
    first, *further = _decision_cells(problem, found[0]["strategies"]["best"])
    unit = column.removeprefix("rate ")
    names = (title, f"best {first.removeprefix('rate ')}", *further, *(f"{each} {unit}" for each in others))
    rows = []
    for each in found:
        cells = {name: _decision_cells(problem, decision) for name, decision in each["strategies"].items()}
        value = each[axis.name] * 1e3 if axis.name == "slo_s" else each[axis.name]
        objectives = ["-" if "no_plan" in each["strategies"][other] else cells[other][column] for other in others]
        rows.append([f"{value:g}", *cells["best"].values(), *objectives])
    return make_table(*names, title="What if", narrow=True, rows=rows)


def _stage_rows(planned: Planned) -> Iterator[tuple[str, ...]]:
    """Yields a row for each split; the first of a stage also shows the stage."""
    for each in planned.figures.splits:
        stage, bounds = planned.stages[each.stage_index], planned.figures.stages[each.stage_index]
        split, hop = each.split, milliseconds(bounds.hop_s) if bounds.hop_s else "-"
        is_first = split == stage.splits[0]
        yield (
            f"{each.stage_index}: {stage.replicas} x {stage.device}" if is_first else "",
            f"{split.first}-{split.end - 1}",
            str(split.batch) if split.tokens is None else f"{split.tokens} tokens",
            _ranges(split.ramps) or "-",
            milliseconds(each.seconds.mean_s),
            milliseconds(each.wait_s),
            f"{each.fill:.0%}",
            *((rate_text(bounds.rate_per_s), hop) if is_first else ("", "")),
        )


def _figure_rows(answer: PlanAnswer, document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    problem, planned, figures = answer.file.problem, answer.planned, answer.planned.figures
    yield "rate", f"{rate_text(figures.rate_per_s)}/s"
    if problem.required_per_s is not None:
        yield "requested rate", f"{rate_text(figures.served_per_s)}/s"
    if isinstance(problem.objective, MinimizeLatency):
        allowed = "" if problem.ramp_budget is None else f", {problem.ramp_budget:.2%} are allowed"
        yield "mean answer time", f"{milliseconds(figures.mean_latency_s)} ms"
        yield "ramps", f"{figures.ramp_overhead:.2%} of the blocks' time{allowed}"
        stays = planned.stages[0].splits[0].stays
        yield "answered inputs", "run on to the end: every answer is checked" if stays else "stop: they make room"
    limit = milliseconds(problem.slo.limit_s)
    yield "worst-case latency", f"{milliseconds(figures.latency_s)} ms of {limit} ms allowed"
    if problem.max_usd_per_hour:
        yield "cost", f"{figures.usd_per_hour:.2f} USD/h"
    if len(figures.shares) > 1:
        first = 0
        for chain, stages in enumerate(chains_of(planned.stages)):
            named = f"stage {first}" if len(stages) == 1 else f"stages {first} to {first + len(stages) - 1}"
            yield "" if chain else "chains", f"{named}: {figures.shares[chain]:.1%} of the inputs"
            first += len(stages)
    for index, (network, share) in enumerate(document.get("answered_by", {}).items()):
        yield "" if index else "answers", f"{share:.1%} by model {network} of the chain"
    for index, bind in enumerate(document["binds"]):
        yield "" if index else "binds", bind["text"]
    within = f"within {max(planned.gap, 1e-4):.2%} of the best"
    yield "proof", within if planned.gap else "exact: no plan of its space is better"
    if planned.note:
        yield "note", planned.note
    if "calibration" in document:
        yield "calibration", document["calibration"]


def _joint(document: Mapping[str, Any]) -> Table:
    """Returns a table of the plan's figures with nested survival and with the exit records."""
    joint = document["joint"]
    both = (document, joint)
    rows = [
        ("rate /s", *(rate_text(each["rate_per_s"]) for each in both)),
        ("latency ms", *(milliseconds(each["latency_s"] or math.inf) for each in both)),  # JSON has no infinity
    ]
    if "mean_latency_s" in joint:
        rows.append(("mean ms", *(milliseconds(each["mean_latency_s"]) for each in both)))
    caption = f"candidate {(joint['chosen'] or 0) + 1} of {joint['candidates']}"
    if joint["chosen"] is None:
        broken = "; ".join(joint["broken"])
        caption = f"By the records none of {joint['candidates']} candidates keeps every promise: {broken}"
    return make_table("", "nested", "joint", title="By the exit records", rows=rows, caption=caption)


def _decision_cells(problem: PlanProblem, found: Mapping[str, Any]) -> dict[str, str]:
    """Returns cells for the JSON data of a decision, by the titles of their columns."""
    no_plan = found.get("no_plan")
    if no_plan is not None:
        why = f"{no_plan['binding']} binds" if no_plan["binding"] else "none found"
        cells = {"rate /s": "no plan", "latency ms": why, "USD/h": "-"}
    else:
        rate, latency = rate_text(found["rate_per_s"]), milliseconds(found["latency_s"])
        usd_per_hour = f"{found['usd_per_hour']:.2f}" if problem.max_usd_per_hour else "-"
        cells = {"rate /s": rate, "latency ms": latency, "USD/h": usd_per_hour}
    if isinstance(problem.objective, MinimizeLatency):
        mean = "-" if no_plan else milliseconds(found["mean_latency_s"])
        cells |= {"mean ms": mean, "answered": "-" if no_plan else found.get("after_answer", "stop")}
    return cells


def _ranges(ramps: Sequence[int]) -> str:
    """Returns ramps as ranges, such as 0-2, 5, 7."""
    starts = [ramp for ramp in ramps if ramp - 1 not in ramps]
    ends = [ramp for ramp in ramps if ramp + 1 not in ramps]
    return ", ".join(f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True))
