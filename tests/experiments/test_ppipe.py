"""PPipe's problems: plans beside the published ones, and of tiny problems beside every set of pipelines."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise, product
from math import ceil
from typing import Any

import pytest

from experiments.planning.ppipe import check, solve
from tests.data import data_folder

SMALLEST = (
    "ablation/colorization-v2_L4-T4_25-75_bw-gbps-10_sla-multiplier-5",
    "maf19/apcnet_r101-d8_4xb2-40k_cityscapes-512x1024-atss",
    "maf21/colorization-v2-googlenet-v3-pytorch-repvgg-b3_1.0",
)
TABLES = {
    "m-A-1": [[1000, 1500], [3000, 5000]],
    "m-A-2": [[1500, 2500], [5000, 9000]],
    "m-B-1": [[4000, 5000], [4000, 7000]],
}
"""Microseconds of both blocks at batches of 1 and 2."""
WRONG = [("xput", 1e6), ("lat_infer", 1.0), ("num_gpu", 0.3), ("num_gpu", 50.0), ("layers", [0, 1]), ("bs", 2)]


def tiny(sla_us: float, gpus: dict[str, int], *, whole_gpus: bool = True) -> dict[str, Any]:
    """One model of two blocks on two types."""
    model = {
        "name": "m", "weight": 2.0, "sla_us": sla_us, "max_parts": 2, "same_batch": True,
        "transfer_us_per_input": [500.0], "assumed_rate_per_s": 1000.0, "batch_build_factor": 1.5, "margin_us": 100,
        "whole_gpus": whole_gpus, "gpus_per_server": [2, 1], "shares": {"A": 2, "B": 1},
    }  # fmt: skip
    return {"id": "tiny", "gpus": gpus, "models": [model]}


def pipelines(problem: dict[str, Any]) -> Iterator[tuple[float, dict[tuple[int, str], float]]]:
    """Every pipeline with every number of shares: its rate, and GPUs by partition number and type."""
    (model,) = problem["models"]
    hosts = [(name, n) for name in problem["gpus"] for n in range(1, model["shares"][name] + 1)]
    for batch, bounds in product((1, 2), ((0, 2), (0, 1, 2))):
        for chosen in product(hosts, repeat=len(bounds) - 1):
            latency_us = model["margin_us"] + model["batch_build_factor"] * (batch - 1) * 1000
            seconds = []
            for (first, end), (name, n) in zip(pairwise(bounds), chosen, strict=True):
                infer_us = sum(row[batch - 1] for row in TABLES[f"m-{name}-{n}"][first:end])
                moved_us = 500.0 if len(chosen) > 1 else 0.0
                latency_us += infer_us + (batch * 500.0 if end == 1 else 0.0)
                seconds.append(max(infer_us / batch, moved_us * n * {"A": 2, "B": 1}[name]) / 1e6)
            if latency_us > model["sla_us"]:
                continue
            for counts in product(*(range(1, problem["gpus"][name] * n + 1) for name, n in chosen)):
                rate = min(count / each for count, each in zip(counts, seconds, strict=True))
                yield rate, {(k, chosen[k][0]): count / chosen[k][1] for k, count in enumerate(counts)}


def best_rate(problem: dict[str, Any]) -> float:
    found, rounded = list(pipelines(problem)), ceil if problem["models"][0]["whole_gpus"] else float
    best: dict[tuple[tuple[tuple[int, str], float], ...], float] = {(): 0.0}
    left = list(best)
    while left:
        used = left.pop()
        for rate, taken in found:
            total = {key: dict(used).get(key, 0.0) + taken.get(key, 0.0) for key in {*dict(used), *taken}}
            after = tuple(sorted(total.items()))
            counts = dict(problem["gpus"])
            for (_, name), count in total.items():
                counts[name] -= rounded(count)
            if min(counts.values()) >= 0 and best[used] + rate > best.get(after, 0.0) + 1e-9:
                best[after] = best[used] + rate
                left.append(after)
    return max(best.values())


@pytest.mark.parametrize("sla_us", [1000, 6000, 8000, 10_000, 20_000])
@pytest.mark.parametrize("gpus", [{"A": 1, "B": 1}, {"A": 2, "B": 1}, {"A": 1, "B": 2}], ids=str)
@pytest.mark.parametrize("whole_gpus", [True, False], ids=["whole GPUs", "shares"])
def test_no_set_of_pipelines_of_a_tiny_problem_is_better(sla_us: float, gpus: dict[str, int], whole_gpus: bool) -> None:
    problem = tiny(sla_us, gpus, whole_gpus=whole_gpus)
    answer = solve(problem, TABLES)
    check(problem, TABLES, answer)
    assert answer["objective"] == pytest.approx(best_rate(problem) / 2, rel=1e-6)


@pytest.mark.parametrize("name", SMALLEST, ids=lambda name: name[:16])
def test_a_plan_is_as_good_as_the_published_one_and_both_keep_the_rules(name: str) -> None:
    folder = data_folder()
    if folder is None:
        pytest.skip("the shared data is absent")
    tables = json.loads((folder / "ppipe" / "tables.json").read_text())["tables_us"]
    problems = json.loads((folder / "ppipe" / "problems.json").read_text())
    problem = next(each for each in problems if each["id"].startswith(name))
    answer, v4 = solve(problem, tables), problem["reference"]["objective"]["v4"]
    check(problem, tables, answer)
    check(problem, tables, {"id": name, "objective": v4, "pipelines": problem["reference"]["pipelines"]})
    assert answer["objective"] >= 0.999 * v4
    assert 0 <= answer["gap"] < 0.01


@pytest.mark.parametrize(("field", "value"), WRONG, ids=str)
def test_a_plan_with_a_wrong_figure_is_refused(field: str, value: Any) -> None:
    problem = tiny(8000, {"A": 2, "B": 1})
    answer = solve(problem, TABLES)
    answer["pipelines"][0][0][-1][field] = value
    with pytest.raises(ValueError, match=r"m: |tiny: "):
        check(problem, TABLES, answer)
