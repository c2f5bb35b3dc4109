"""Plans of inputs that have several lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from earlyexit.network.boundary import Split
from optimizer.decision import NoPlan, Planned
from optimizer.evaluate import evaluate, promised, sought, violations
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import MaximizeRate, MinimizeCost, PlanProblem, Supply
from optimizer.problem_file import parse_problem, problem_document
from optimizer.tokens import in_tokens, token_survival_N
from profiles.lengths import Lengths
from profiles.table import LatencyTable
from tests.exit_records import exit_records
from tests.optimizer.answers import planned, refused
from tests.optimizer.brute_force import Twin
from tests.optimizer.plain_problem import plain_problem
from tests.optimizer.random_problems import random_problem

LENGTH, LONG = 32, 128
MIXED = Lengths.weighted({10: 0.6, 40: 0.3, 100: 0.1})


def with_length(problem: PlanProblem, lengths: Lengths | None, length: int = LENGTH) -> PlanProblem:
    latency = {device: replace(table, length=length) for device, table in problem.latency.items()}
    return replace(problem, latency=latency, lengths=lengths, batches=None)


def one_block(batches: tuple[int, ...] = (1, 4, 16), per_input_s: float = 0.001, **changes: object) -> PlanProblem:
    """A block that takes 1 ms and 1 ms per input of 32 tokens, on four accelerators."""
    block_s = 0.001 + per_input_s * np.array([batches], dtype=float)
    table = LatencyTable(batches=batches, block_s_NB=block_s, ramp_s_EB=np.zeros((0, len(batches))), length=LENGTH)
    devices = {"gpu": Supply(count=4, usd_per_hour=1.0)}
    return plain_problem(**{"survival_N": (1.0,), "latency": {"gpu": table}, "devices": devices, **changes})


def test_inputs_that_all_have_the_latencys_length_are_planned_as_without_lengths() -> None:
    for seed in range(6):
        plain = with_length(random_problem(seed), None)
        mixed = with_length(plain, Lengths.of([LENGTH]))
        without, found = solve(plain), solve(mixed)
        if isinstance(without, NoPlan) or isinstance(found, NoPlan):
            assert type(without) is type(found)
            continue
        assert found.figures.rate_per_s == pytest.approx(without.figures.rate_per_s)
        assert found.figures.latency_s == pytest.approx(without.figures.latency_s)
        assert found.bound == pytest.approx(without.bound)
        budgets = [(split.batch, split.tokens) for stage in found.stages for split in stage.splits]
        assert budgets == [(split.batch, split.batch * LENGTH) for stage in without.stages for split in stage.splits]


def test_batches_have_room_for_the_shortest_inputs_and_rates_of_the_mean_input() -> None:
    found = planned(one_block(lengths=MIXED))
    assert found.stages[0].splits == (Split(first=0, end=1, batch=52, tokens=512),)  # 512 / 10, rounded up
    problem = one_block(lengths=MIXED)
    found = planned(problem)
    held = round(MIXED.filled(512))
    seconds = 0.001 + 0.001 * held / LENGTH
    assert found.figures.rate_per_s == pytest.approx(4 * held / MIXED.mean / seconds)
    assert found.figures.splits[0].fill == held / 512
    assert found.bound == pytest.approx(found.figures.rate_per_s)
    assert promised(problem, found.figures)["tokens_per_input"] == MIXED.mean


def test_rates_are_of_inputs_and_short_ones_come_faster() -> None:
    short, long = (planned(one_block(lengths=Lengths.of([tokens]))) for tokens in (8, 64))
    assert short.figures.rate_per_s == pytest.approx(8 * long.figures.rate_per_s)
    asked = one_block(lengths=Lengths.of([64]), objective=MinimizeCost(rate_per_s=800.0))
    found = planned(asked)
    assert found.figures.served_per_s == pytest.approx(800.0)
    assert found.figures.usd_per_hour == 2.0
    none = refused(replace(asked, objective=MinimizeCost(rate_per_s=1e6)))
    assert none.highest_rate_per_s == pytest.approx(4 * 8 / 0.017)


@pytest.mark.parametrize("seed", range(12))
def test_plans_are_as_good_as_the_best_of_all_budgets_by_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    problem = with_length(random_problem(seed), MIXED if seed % 2 else Lengths(mean=20.5), LONG)
    stays = tuple(np.linspace(1.0, float(rng.uniform(0.6, 1.4)), problem.num_blocks))
    problem = replace(problem, stayers_length_N=(1.0, *stays[1:]))
    best, found = Twin(by_hand(problem, stays)).best("best"), solve(problem)
    assert isinstance(found, Planned) == (best is not None)
    if isinstance(found, Planned) and best is not None:
        by_rate = isinstance(problem.objective, MaximizeRate)
        twin = best.figures.rate_per_s / problem.lengths.mean if by_rate else best.figures.usd_per_hour  # type: ignore[union-attr]
        assert sought(problem, found.figures) == pytest.approx(twin)
        assert not violations(problem, found.stages, found.figures)


def by_hand(problem: PlanProblem, stays: tuple[float, ...]) -> PlanProblem:
    """Every token an input, written anew."""
    lengths = problem.lengths
    assert lengths is not None
    latency = {}
    for device, table in problem.latency.items():
        sizes = np.array([round(lengths.filled(batch * LONG)) for batch in table.batches])
        rows = [np.interp(sizes / LONG, table.batches, row) for row in table.block_s_NB]
        ramps = [np.interp(sizes / LONG, table.batches, row) for row in table.ramp_s_EB]
        latency[device] = LatencyTable(
            batches=tuple(sizes.tolist()),
            block_s_NB=np.array(rows),
            ramp_s_EB=np.array(ramps).reshape(-1, len(sizes)),
        )
    share, survival = 1.0, []
    for by_inputs, longer in zip(problem.survival_N, (1.0, *stays[1:]), strict=True):
        share = min(share, by_inputs * longer)
        survival.append(share)
    plain = replace(problem, lengths=None, stayers_length_N=None, latency=latency, survival_N=tuple(survival))
    plain = replace(plain, bytes_per_sample_N=tuple(each / LONG for each in problem.bytes_per_sample_N))
    asked = problem.asked_per_s
    return plain if asked is None else plain.with_rate(asked * lengths.mean)


def test_inputs_count_by_their_tokens_and_longer_ones_that_stay_too() -> None:
    problem = one_block(lengths=Lengths.of([16, 48]))
    figures = evaluate(problem, (Stage(device="gpu", replicas=1, splits=(Split(first=0, end=1, batch=8),)),))
    assert figures.rate_per_s == pytest.approx(8 / 0.009)
    assert figures.splits[0].batch_at_block == (8.0,)
    problem = one_block(lengths=MIXED)
    assert token_survival_N(problem) == (1.0,)
    wide = with_length(random_problem(3), MIXED)
    longer = tuple(1.0 + 0.1 * block for block in range(wide.num_blocks))
    survival = token_survival_N(replace(wide, stayers_length_N=longer))
    assert survival[0] == 1.0
    assert list(survival) == sorted(survival, reverse=True)
    assert all(by_tokens >= by_inputs for by_tokens, by_inputs in zip(survival, wide.survival_N, strict=True))
    assert in_tokens(replace(wide, stayers_length_N=longer)).survival_N == survival


# Problem files


def document(**changes: object) -> dict[str, object]:
    return {**problem_document(one_block(lengths=MIXED)), **changes}


def test_problem_files_say_lengths_as_a_mean_a_list_shares_or_a_file(tmp_path: Path) -> None:
    problem = one_block(lengths=MIXED, stayers_length_N=(1.0,))
    again = parse_problem(problem_document(problem)).problem
    assert (again.lengths, again.stayers_length_N, again.latency["gpu"].length) == (MIXED, (1.0,), LENGTH)
    assert "lengths" not in problem_document(one_block())
    assert "length" not in problem_document(one_block())["latency"]["gpu"]
    (tmp_path / "lengths.txt").write_text("16\n48\n", encoding="utf-8")
    exit_records(np.zeros((2, 0)), score="entropy", tokens_N=np.array([16, 48])).save(tmp_path / "records.npz")
    for given in ([16, 48], {16: 1, 48: 1}, "lengths.txt", "records.npz"):
        problem = parse_problem(document(lengths=given), folder=tmp_path).problem
        assert problem.lengths == Lengths.of([16, 48])
    assert parse_problem(document(lengths=32)).problem.lengths == Lengths(mean=32)
