"""What the live comparison of budgets serves on either side."""

from __future__ import annotations

from deployments.settings import ServeSettings
from earlyexit.split import Budget
from experiments.live.token_batches import ROWS, TOKENS, WIDE, Case, stage
from experiments.tokens.budgets import num_batches
from optimizer.plan import Plan

LENGTHS = (6, 4, 12, 1, 1, 9, 3, 5)


def test_both_sides_make_as_many_batches_of_the_same_texts() -> None:
    plan = Plan(stages=(stage("cpu", (0, 3, 6), (), 2),))
    settings = ServeSettings(model="m", plan=plan, slo_s=1.0)
    case = Case(settings=settings, slo_s=1.0, texts=("",) * len(LENGTHS), keys=None, lengths=LENGTHS)
    assert case.of(ROWS).plan == plan
    for split in case.of(TOKENS).plan.splits:
        assert split.budget.inputs == 2 * WIDE
        assert num_batches(LENGTHS, split.budget) == num_batches(LENGTHS, Budget(inputs=2)) == 4
        # The rows' batch times the mean length, 10, would not do: what does not fit waits.
        assert num_batches(LENGTHS, Budget(inputs=2 * WIDE, tokens=round(2 * case.mean_tokens))) > 4
