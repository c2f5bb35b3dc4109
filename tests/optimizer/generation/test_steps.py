"""Steps of generations: what they cost, by hand, and plans for them beside every plan there is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.cost.evaluate import evaluate, merit, objective_value, violations
from optimizer.cost.explain import no_plan_text
from optimizer.generation.demand import Generation, KvSpec
from optimizer.generation.seconds import DecoderSeconds, at_context, without_head
from optimizer.generation.steps import chunk_of, running_sequences, step_table
from optimizer.plans.plan import Stage
from optimizer.problems.problem import MinimizeCost, MinimizeLatency, PlanProblem, Slo
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned, Strategy
from optimizer.search.planner import solve
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from tests.optimizer.answers import planned, refused
from tests.optimizer.generation.sequences import BATCHES, GENERATION, asking, every_plan, two_blocks
from tests.optimizer.plain_problem import random_problem


def one_split(batch: int, ramps: tuple[int, ...] = ()) -> tuple[Stage, ...]:
    return (Stage(device="gpu", replicas=1, splits=(Split(first=0, end=2, batch=batch, ramps=ramps),)),)


def two_splits(first: int, second: int) -> tuple[Stage, ...]:
    splits = (Split(first=0, end=1, batch=first, ramps=(0,)), Split(first=1, end=2, batch=second))
    return (Stage(device="gpu", replicas=1, splits=splits),)


def seconds(problem: PlanProblem, stages: tuple[Stage, ...]) -> list[float]:
    return [each.seconds.mean_s for each in evaluate(problem, stages).splits]


def test_only_tokens_without_a_later_survivor_are_never_filled_in() -> None:
    rng = np.random.default_rng(1)
    share, steps = 0.3, 6
    reached = []
    for _ in range(20_000):
        [survivors] = np.nonzero(rng.random(steps) < share)
        reached.append(survivors[-1] + 1 if len(survivors) else 0)
    generation = Generation(prompt=Lengths(mean=1), output=Lengths(mean=steps + 1))
    assert generation.tokens_per_step(share) == pytest.approx(np.mean(reached) / steps, rel=0.01)
    assert generation.tokens_per_step(1.0) == 1.0
    assert generation.tokens_per_step(0.0) == 0.0
    mixed = replace(GENERATION, output=Lengths.weighted({2: 0.5, 4: 0.5}))
    short, long = (replace(GENERATION, output=Lengths(mean=mean)) for mean in (2, 4))
    assert mixed.num_steps == 2
    assert 4 * mixed.tokens_per_step(0.4) == pytest.approx(short.tokens_per_step(0.4) + 3 * long.tokens_per_step(0.4))


def test_an_exit_saves_work_only_if_batches_are_not_full() -> None:
    problem = asking(two_blocks(per_token_s=0.01), output=Lengths(mean=10_001))
    table = replace(problem.latency["gpu"], block_s_NB=0.01 * np.array([BATCHES, BATCHES], dtype=float))
    problem = asking(replace(problem, latency={"gpu": table}), prompt=Lengths(mean=1))
    alone = evaluate(problem, one_split(8)).rate_per_s
    # Half leave, and all that left are run by the second block later: what is won is the tail of a long sequence.
    assert evaluate(problem, one_split(8, (0,))).rate_per_s <= alone
    assert evaluate(problem, two_splits(8, 8)).rate_per_s <= alone
    problem = asking(two_blocks(), output=Lengths(mean=10_001))
    prompts = 16 * 0.02 / 16 / 10_000  # of each step, one prompt of a batch of 16
    assert seconds(problem, one_split(8)) == pytest.approx([0.02 + 8 * prompts])
    assert seconds(problem, two_splits(8, 8)) == pytest.approx([0.011 + 8 * prompts / 2, 0.01 + 16 * prompts / 2])
    assert evaluate(problem, two_splits(8, 8)).rate_per_s == pytest.approx(8 / (0.016 + 8 * prompts))


def test_a_batch_includes_the_time_to_fill_in_tokens_and_to_regroup() -> None:
    problem = asking(two_blocks(per_token_s=0.001), output=Lengths(mean=3), prompt=Lengths(mean=1))
    reached = 1 - (0.5 + 0.25) / 2  # of two steps: the last skips with 1/2, both with 1/4
    prompt_s = 0.011 / 2
    [first_s, second_s] = seconds(problem, two_splits(4, 4))
    assert first_s == pytest.approx(0.01 + 0.004 + 0.001 + 4 * prompt_s)
    assert second_s == pytest.approx(0.01 + 0.001 * 8 * reached + 8 * prompt_s)
    copied = asking(problem, fill="copy", copy_share=0.2)
    assert seconds(copied, two_splits(4, 4))[1] == pytest.approx(
        0.01 + 0.001 * 8 * (0.5 + 0.2 * (reached - 0.5)) + 8 * prompt_s
    )
    plain, dear = two_blocks(), asking(two_blocks(), regroup_s=0.003)
    before, after = seconds(plain, two_splits(8, 8)), seconds(dear, two_splits(8, 8))
    assert after == pytest.approx([before[0], before[1] + 0.003])


def test_a_batch_without_survivors_ends() -> None:
    block_s = np.array([np.full(5, 0.01), 0.01 + 0.002 * np.array(BATCHES)])
    table = LatencyTable(batches=BATCHES, block_s_NB=block_s, ramp_s_EB=np.zeros((1, 5)))
    body, head_s_B = without_head(table)
    assert body.block_s_NB.tolist() == np.full((2, 5), 0.01).tolist()
    assert head_s_B == pytest.approx(0.002 * np.array(BATCHES))
    problem = asking(two_blocks(latency={"gpu": table}), prompt=Lengths(mean=1), output=Lengths(mean=101))
    prompt_s = (0.02 + 0.002) / 100
    some = 1 - 0.5**8  # chance that not all leave
    assert seconds(problem, one_split(8, (0,))) == pytest.approx([0.01 + some * 0.01 + 0.002 * 4 + 8 * prompt_s])
    problem = asking(two_blocks(per_token_s=0.001), output=Lengths(mean=1e6), prompt=Lengths(mean=1))
    # Of single steps half have no survivor; where one has, there is another token to fill in, on average.
    assert seconds(problem, one_split(1, (0,))) == pytest.approx([0.011 + 0.001 + 0.5 * (0.01 + 0.002)], rel=1e-4)


def test_a_late_head_runs_once_for_all_inputs_that_leave() -> None:
    head_s = 0.003 + 0.0005 * np.array(BATCHES)
    block_s = np.array([np.full(5, 0.01), 0.01 + head_s])
    table = LatencyTable(batches=BATCHES, block_s_NB=block_s, ramp_s_EB=0.001 + head_s[None])
    early = asking(two_blocks(latency={"gpu": table}), prompt=Lengths(mean=1), output=Lengths(mean=1e6))
    late, some, half = asking(early, late_head=True), 1 - 0.5**8, 0.003 + 0.0005 * 8
    assert seconds(late, one_split(8, (0,))) == pytest.approx([0.011 + some * 0.01 + half], rel=1e-4)
    ramp_s, head_of_survivors_s = 0.001 + half, some * 0.003 + 0.0005 * 4
    assert seconds(early, one_split(8, (0,))) == pytest.approx(
        [0.01 + ramp_s + some * 0.01 + head_of_survivors_s], rel=1e-4
    )
    assert seconds(late, two_splits(8, 4)) == pytest.approx([0.011 + head_of_survivors_s, 0.01 + 0.005], rel=1e-4)


def test_prompts_are_cut_into_chunks_and_unmeasured_batches_refused() -> None:
    problem = asking(two_blocks(per_token_s=0.001), prompt=Lengths(mean=40))
    table = problem.latency["gpu"]
    assert chunk_of(table, None) == 16
    assert chunk_of(table, 8) == 8
    assert step_table(problem, "gpu").prompt_s_N == pytest.approx([0.03 + 0.04, 0.03 + 0.04])  # 16, 16 and 8
    assert step_table(asking(problem, chunk=8), "gpu").prompt_s_N == pytest.approx([0.05 + 0.04] * 2)
    own = LatencyTable(batches=(1,), block_s_NB=np.full((2, 1), 0.007), ramp_s_EB=np.zeros((1, 1)), length=64)
    assert step_table(asking(problem, prefill={"gpu": own}), "gpu").prompt_s_N == pytest.approx([0.007, 0.007])
    problem = asking(two_blocks(), output=Lengths(mean=1001))
    with pytest.raises(PlanError, match=r"blocks 1 to 1 run 31\.9\d+ tokens at once at batch 16, .* is 16"):
        evaluate(problem, two_splits(16, 16))


def test_without_exits_steps_are_planned_like_inputs_except_for_prompts() -> None:
    table = replace(two_blocks().latency["gpu"], ramp_s_EB=np.zeros((0, len(BATCHES))))
    problem = two_blocks(ramps=(), survival_N=(1.0, 1.0), latency={"gpu": table})
    problem = asking(problem, output=Lengths(mean=1e6))
    steps, inputs = planned(problem), planned(replace(problem, generation=None))
    assert steps.stages == inputs.stages
    assert steps.figures.rate_per_s == pytest.approx(inputs.figures.rate_per_s, rel=1e-4)


SIZES = (1, 2, 4)
BLOCK_S = 10.0 + np.array([SIZES, SIZES], dtype=float)
STEPS = LatencyTable(batches=SIZES, block_s_NB=BLOCK_S, ramp_s_EB=np.array([[0.5, 0.6, 0.7]]), length=1)
PROMPTS = LatencyTable(batches=(1, 2), block_s_NB=np.array([[11.0, 12.0]] * 2), ramp_s_EB=np.zeros((1, 2)), length=4)


def rows(number: float) -> np.ndarray:
    return np.full(2, number)


def test_steps_prompts_and_the_head_take_what_was_measured() -> None:
    decoder = DecoderSeconds(STEPS, PROMPTS)
    assert decoder.blocks(rows(3)).tolist() == [13.0, 13.0]
    assert decoder.blocks(rows(1.5)).tolist() == [11.5, 11.5]
    assert decoder.blocks(np.array([1.0, 4.0])).tolist() == [11.0, 14.0]
    assert decoder.blocks(rows(0), 8).tolist() == [12.0, 12.0]
    assert decoder.blocks(rows(0), 6).tolist() == [11.5, 11.5]
    assert decoder.blocks(rows(0), 2).tolist() == [11.0, 11.0]
    assert DecoderSeconds(STEPS).blocks(rows(0), 2).tolist() == [12.0, 12.0]
    assert decoder.blocks(rows(2), 8).tolist() == [12.0 + 2.0] * 2
    free = replace(PROMPTS, block_s_NB=np.zeros((2, 2)))
    assert DecoderSeconds(STEPS, free).blocks(rows(2), 8).tolist() == [12.0, 12.0]  # nothing is taken off
    assert decoder.blocks(rows(8)).tolist() == [28.0, 28.0]
    assert decoder.blocks(rows(0), 16).tolist() == [24.0, 24.0]
    last = BLOCK_S + np.array([[0.0], [3.0]])
    decoder = DecoderSeconds(replace(STEPS, block_s_NB=last), PROMPTS, slowness=2.0)
    assert decoder.blocks(rows(1)).tolist() == [22.0, 22.0]
    assert (decoder.head(1), decoder.head(4), decoder.head(8)) == (6.0, 6.0, 12.0)
    assert decoder.ramp(0, 3) == pytest.approx(1.3)


def test_contexts_cost_time_per_token_and_the_cost_model_uses_the_mean() -> None:
    decoder = DecoderSeconds(replace(STEPS, context=10, context_s=0.25))
    assert decoder.blocks(rows(2), steps=2, context=24).tolist() == [13.0, 13.0]
    assert decoder.blocks(rows(2), steps=2, context=16).tolist() == [11.0, 11.0]
    longer = at_context(replace(STEPS, context=10, context_s=0.25), 14.0)
    assert longer.block_s_NB.tolist() == (BLOCK_S + np.array(SIZES)).tolist()
    assert at_context(STEPS, 14.0) is STEPS
    generation = replace(GENERATION, prompt=Lengths(mean=10), output=Lengths.weighted({2: 0.5, 6: 0.5}))
    assert generation.mean_context == 10 + (1 * 0 + 5 * 2) / 6  # of six steps one is the first, five after 0 to 4 more
    problem = asking(two_blocks(), prompt=Lengths(mean=10), output=Lengths(mean=5))
    table = replace(problem.latency["gpu"], context=1, context_s=1e-4)
    later = replace(problem, latency={"gpu": table})
    [before_s], [after_s] = (seconds(each, one_split(4)) for each in (problem, later))
    assert after_s - before_s == pytest.approx(4 * 2 * 1e-4 * (10 + 1.5 - 1))  # of four steps in both blocks


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
        plans = (figures for _, figures in every_plan(problem, strategy))
        best = max(plans, key=lambda each: merit(problem, each), default=None)
        found = solve(problem, strategy)
        assert isinstance(found, Planned) == (best is not None), strategy
        if isinstance(found, Planned) and best is not None:
            value = objective_value(problem, best)
            assert objective_value(problem, found.figures) == pytest.approx(value, rel=1e-9), strategy
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
def test_with_few_sequences_the_plan_is_within_its_gap_of_the_optimum(most: int) -> None:
    problem = asking(two_blocks(count=2, half=0.4, per_token_s=2e-4), most_running=most)
    best = max(figures.rate_per_s for _, figures in every_plan(problem, "best"))
    found = planned(problem)
    assert not violations(problem, found.stages, found.figures)
    assert found.bound >= best * (1 - 1e-9)
    assert found.bound * (1 - found.gap) <= best * (1 + 1e-9)
    assert found.figures.rate_per_s >= 0.9 * best


def with_memory(memory_bytes: float) -> PlanProblem:
    kv = KvSpec(bytes_per_token=100.0, memory_bytes={"gpu": memory_bytes}, weights_bytes=5000.0, page_tokens=7)
    return asking(two_blocks(), kv=kv)


def test_broken_promises_of_memory_and_first_tokens_are_reported() -> None:
    free, tight = planned(with_memory(1e9)), planned(with_memory(5000.0 + 8 * 24 * 100))
    assert tight.figures.rate_per_s < free.figures.rate_per_s
    assert running_sequences(tight.stages) <= 8
    assert tight.bound == free.bound
    assert tight.gap > 0
    problem = with_memory(5001.0)
    assert no_plan_text(problem, refused(problem)).endswith("of the accelerators is too small for keys and values")
    for rate_per_s in (100, 1e6):  # two sequences do 70/s, the accelerators more
        few = replace(asking(two_blocks(), most_running=2), objective=MinimizeCost(rate_per_s=rate_per_s))
        assert no_plan_text(few, refused(few)).endswith(f"are too few for {rate_per_s:.6g}/s")
    slow = asking(two_blocks(per_token_s=0.001), prompt=Lengths(mean=64))
    free, quick = planned(slow), planned(asking(slow, ttft_s=0.9))
    assert quick.figures.latency_s < free.figures.latency_s
    for ttft_s in (0.05, 0.3):
        none = asking(slow, ttft_s=ttft_s)
        assert no_plan_text(none, refused(none)).startswith(f"no plan: the TTFT of {1000 * ttft_s:.0f} ms binds")
    for ttft_s, nearest_s in ((0.3, None), (0.5, pytest.approx(0.0698, rel=1e-2))):  # 0.3 s need shorter steps
        none = replace(asking(slow, ttft_s=ttft_s), slo=Slo(latency_s=0.02, slack=0.0))
        assert refused(none).nearest_slo_s == nearest_s


def test_a_model_that_is_too_large_for_one_accelerator_is_planned_in_stages() -> None:
    kv = KvSpec(bytes_per_token=1.0, memory_bytes={"gpu": 900.0}, weights_bytes=1000.0)
    problem = asking(two_blocks(count=2), kv=kv)
    found, best = planned(problem), max(figures.rate_per_s for _, figures in every_plan(problem, "best"))
    assert [stage.end - stage.first for stage in found.stages] == [1, 1]
    assert found.figures.rate_per_s == pytest.approx(best)


def test_figures_of_sequences_follow_littles_law() -> None:
    problem = with_memory(5000.0 + 700 * 100.5)
    figures = planned(problem).figures
    said = figures.sequences
    assert said is not None
    assert said.token_s == pytest.approx(said.running / figures.rate_per_s)
    assert said.tokens_per_s == pytest.approx(figures.rate_per_s * 5 / 4)
    assert said.sequences_per_s == pytest.approx(figures.rate_per_s / 4)
    assert said.most_token_s == figures.latency_s
    assert said.ttft_s == pytest.approx(figures.latency_s + 0.02)  # one chunk of 16 tokens in two blocks
    assert said.pages is not None
    assert said.pages[0].pages == 100
    assert said.pages[0].needed == -(-said.running * 24 // 7)  # 16 + 5 tokens, and 3 of the last page
