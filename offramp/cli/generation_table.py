"""What a plan does for sequences, as a table."""

from __future__ import annotations

from rich.table import Table

from offramp.cli.printing import make_table, milliseconds
from optimizer.evaluate import Evaluation, step_figures
from optimizer.generation.figures import sequence_figures
from optimizer.generation.steps import demand_of
from optimizer.plan import Stage
from optimizer.problem import PlanProblem


def generation_table(problem: PlanProblem, stages: tuple[Stage, ...], figures: Evaluation) -> Table:
    """Of a plan of steps."""
    said, generation = sequence_figures(problem, stages, **step_figures(figures)), demand_of(problem)
    table = make_table("", "value", title="Generation")
    table.add_row("tokens", f"{said.tokens_per_s:.1f}/s, of {said.sequences_per_s:.2f} sequences/s")
    table.add_row(
        "time per token", f"{milliseconds(said.token_s)} ms on average, {milliseconds(said.most_token_s)} at worst"
    )
    allowed = "" if generation.ttft_s is None else _of(generation.ttft_s * (1 - problem.slo.slack))
    table.add_row("first token", f"{milliseconds(said.ttft_s)} ms at worst{allowed}")
    table.add_row("sequences", f"{said.running} keep all batches full{_at_most(generation.most_running)}")
    table.add_row("prompts", f"{said.prompt_share:.1%} of the accelerators' time")
    table.add_row("skipped tokens", f"{said.filled:.2f} per survivor are filled in by {generation.fill}")
    for index, each in enumerate(said.pages or ()):
        table.add_row(f"pages, stage {index}", f"{each.needed} needed of {each.pages} per replica")
    return table


def _of(seconds: float) -> str:
    return f" of {milliseconds(seconds)} ms allowed"


def _at_most(most_running: int | None) -> str:
    return "" if most_running is None else f", {most_running} run at a time"
