"""Plans of steps: as good as any, within what sequences were promised."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimizer.decision import Planned, Strategy
from optimizer.evaluate import evaluate, merit, sought, step_figures, violations
from optimizer.explain import no_plan_text
from optimizer.generation.demand import Generation, KvMemory
from optimizer.generation.figures import running_sequences, sequence_figures
from optimizer.planner import solve
from optimizer.problem import MinimizeLatency, PlanProblem
from optimizer.what_if import with_batch_limit
from profiles.lengths import Lengths
from tests.optimizer.answers import planned, refused
from tests.optimizer.generation.sequences import asking, every_plan, two_blocks
from tests.optimizer.plain_problem import random_problem

STRATEGIES: tuple[Strategy, ...] = ("best", "stock", "early-exit", "e3", "serial")


def random_generation(seed: int) -> PlanProblem:
    """Three blocks at most; batches up to half of what was measured, so that fills have room."""
    rng, problem = np.random.default_rng((seed, 5)), random_problem(seed)
    while problem.num_blocks > 3 or isinstance(problem.objective, MinimizeLatency):
        seed += 1000
        problem = random_problem(seed)
    generation = Generation(
        prompt=Lengths(mean=float(rng.integers(1, 40))),
        output=Lengths(mean=float(rng.uniform(1.5, 30))),
        fill="compute" if rng.random() < 0.6 else "copy",
        copy_share=float(rng.uniform(0, 0.3)),
        regroup_s=float(rng.choice([0.0, 1e-3])),
        late_head=bool(rng.random() < 0.5),
    )
    return replace(problem, generation=generation)


QUICK = (1, 2, 3, 4, 5, 7)
"""Seeds of problems with few plans; the others take seconds each."""


@pytest.mark.parametrize(
    "seed", [seed if seed in QUICK else pytest.param(seed, marks=pytest.mark.slow) for seed in range(60)]
)
def test_plans_are_the_best_of_all_by_brute_force(seed: int) -> None:
    problem = random_generation(seed)
    for strategy in STRATEGIES:
        best = max(
            (figures for _, figures in every_plan(problem, strategy)),
            key=lambda each: merit(problem, each),
            default=None,
        )
        found = solve(problem, strategy)
        assert isinstance(found, Planned) == (best is not None), strategy
        if isinstance(found, Planned) and best is not None:
            assert sought(problem, found.figures) == pytest.approx(sought(problem, best), rel=1e-9), strategy
            assert not violations(problem, found.stages, found.figures)
            assert found.gap == pytest.approx(0, abs=1e-9)


def test_full_batches_are_chosen_where_they_pay() -> None:
    found = planned(with_batch_limit(two_blocks(half=0.5), 8))
    assert len(found.stages[0].splits) == 2
    found = planned(two_blocks(half=0.5))
    assert [split.batch for split in found.stages[0].splits] == [16]


@pytest.mark.parametrize("dear", [{"regroup_s": 0.02}, {"most_running": 16}], ids=["regrouping", "few sequences"])
def test_where_full_batches_lose_they_are_not_chosen(dear: dict[str, object]) -> None:
    problem = asking(two_blocks(half=0.5), **dear)
    found, stock = planned(problem), planned(problem, "stock")
    assert len(found.stages[0].splits) == 1
    assert found.figures.rate_per_s >= stock.figures.rate_per_s


def test_best_is_never_below_another_strategy_at_any_number_of_sequences() -> None:
    for most in (1, 2, 3, 5, 8, 12, 16, 24, 32):
        problem = asking(two_blocks(half=0.4, per_token_s=2e-4), most_running=most)
        plans = {strategy: planned(problem, strategy) for strategy in STRATEGIES}
        assert max(running_sequences(each.stages) for each in plans.values()) <= most
        rates = {strategy: each.figures.rate_per_s for strategy, each in plans.items()}
        assert rates["best"] == max(rates.values()), (most, rates)
        assert rates["serial"] >= max(rates["stock"], rates["early-exit"]), (most, rates)
    found = planned(asking(two_blocks(count=3), most_running=1))
    assert running_sequences(found.stages) == 1


@pytest.mark.parametrize("most", [2, 6, 9, 15])
def test_with_few_sequences_the_plan_is_within_its_gap_of_the_best(most: int) -> None:
    problem = asking(two_blocks(count=2, half=0.4, per_token_s=2e-4), most_running=most)
    best = max(figures.rate_per_s for _, figures in every_plan(problem, "best"))
    found = planned(problem)
    assert not violations(problem, found.stages, found.figures)
    assert found.bound >= best * (1 - 1e-9)
    assert found.bound * (1 - found.gap) <= best * (1 + 1e-9)
    assert found.figures.rate_per_s >= 0.9 * best


def with_memory(memory_bytes: float) -> PlanProblem:
    kv = KvMemory(bytes_per_token=100.0, memory_bytes={"gpu": memory_bytes}, weights_bytes=5000.0, page_tokens=7)
    return asking(two_blocks(), kv=kv)


def test_keys_and_values_have_room_and_first_tokens_time_or_that_is_said() -> None:
    free, tight = planned(with_memory(1e9)), planned(with_memory(5000.0 + 8 * 24 * 100))
    assert tight.figures.rate_per_s < free.figures.rate_per_s
    assert running_sequences(tight.stages) <= 8
    assert tight.bound == free.bound
    assert tight.gap > 0
    problem = with_memory(5001.0)
    assert "the memory of the accelerators is too small for keys and values" in no_plan_text(problem, refused(problem))
    slow = asking(two_blocks(per_token_s=0.001), prompt=Lengths(mean=64))
    free, quick = planned(slow), planned(asking(slow, ttft_s=0.9))
    assert quick.figures.latency_s < free.figures.latency_s
    for ttft_s in (0.05, 0.5):
        none = asking(slow, ttft_s=ttft_s)
        assert no_plan_text(none, refused(none)).startswith(f"no plan: the TTFT of {1000 * ttft_s:.0f} ms binds")


def test_figures_of_sequences_are_those_of_little() -> None:
    problem = with_memory(5000.0 + 700 * 100.5)
    stages = planned(problem).stages
    figures = evaluate(problem, stages)
    said = sequence_figures(problem, stages, **step_figures(figures))
    assert said.token_s == pytest.approx(said.running / figures.rate_per_s)
    assert said.tokens_per_s == pytest.approx(figures.rate_per_s * 5 / 4)
    assert said.sequences_per_s == pytest.approx(figures.rate_per_s / 4)
    assert said.most_token_s == figures.latency_s
    assert said.ttft_s == pytest.approx(figures.latency_s + 0.02)  # one chunk of 16 tokens in two blocks
    assert said.pages is not None
    assert said.pages[0].pages == 100
    assert said.pages[0].needed == -(-said.running * 24 // 7)  # 16 + 5 tokens, and 3 of the last page
