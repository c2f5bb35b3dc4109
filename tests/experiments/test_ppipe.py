"""Tests of PPipe's problems: plans compared with the published ones, and plans with a wrong figure."""

from __future__ import annotations

import json
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
MODEL = {
    "name": "m", "weight": 2.0, "sla_us": 8000, "max_parts": 2, "same_batch": True,
    "transfer_us_per_input": [500.0], "assumed_rate_per_s": 1000.0, "batch_build_factor": 1.5, "margin_us": 100,
    "whole_gpus": True, "gpus_per_server": [2, 1], "shares": {"A": 2, "B": 1},
}  # fmt: skip
TINY = {"id": "tiny", "gpus": {"A": 2, "B": 1}, "models": [MODEL]}
"""One model of two blocks on two types."""
WRONG = [("xput", 1e6), ("lat_infer", 1.0), ("num_gpu", 0.3), ("num_gpu", 50.0), ("layers", [0, 1]), ("bs", 2)]


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
    answer = solve(TINY, TABLES)
    answer["pipelines"][0][0][-1][field] = value
    with pytest.raises(ValueError, match=r"m: |tiny: "):
        check(TINY, TABLES, answer)
