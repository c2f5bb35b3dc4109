from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from optimizer.plan import PolicySpec
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.problem_file import parse_problem, problem_document, read_problem
from profiles.catalogue import published_profile
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from tests.exit_records import exit_records
from tests.latency_profile import latency_profile
from tests.offramp.cli.runs import written

GOOD = """\
blocks: 3
ramps: [0, 1]
survival: [1.0, 0.5, 0.25]
latency:
  V100:
    batch: [1, 2]
    block_s:
      - [0.001, 0.0015]
      - [0.001, 0.0015]
      - [0.001, 0.0015]
    ramp_s: [[1.0e-4, 1.0e-4], [1e-4, 1e-4]]
devices:
  V100: {count: 4, usd_per_hour: 2.93}
link: {bandwidth_bytes_per_s: 1.25e9, delay_s: 1.0e-4}
bytes_per_sample: [10, 20, 30]
slo: {latency_s: 0.1, slack: 0.25}
objective: {maximize: rate}
"""
TABLE = LatencyTable(batches=(1, 2), block_s_NB=np.array([[0.001, 0.0015]] * 3), ramp_s_EB=np.array([[1e-4, 1e-4]] * 2))


def read(folder: Path, text: str) -> PlanProblem:
    return read_problem(written(folder / "problem.yaml", text)).problem


def changed(before: str, after: str) -> str:
    assert before in GOOD
    return GOOD.replace(before, after)


def test_a_problem_is_read_from_yaml_and_from_json(tmp_path: Path) -> None:
    problem = read(tmp_path, GOOD)
    assert (problem.num_blocks, problem.ramps, problem.survival_N) == (3, (0, 1), (1.0, 0.5, 0.25))
    assert dict(problem.devices) == {"V100": Supply(count=4, usd_per_hour=2.93)}
    assert problem.link == Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4)
    assert (problem.slo, problem.objective) == (Slo(latency_s=0.1, slack=0.25), MaximizeRate())
    assert (problem.bytes_per_sample_N, problem.budget_usd_per_hour) == ((10.0, 20.0, 30.0), None)
    assert list(problem.latency) == ["V100"]
    assert problem.latency["V100"].batches == (1, 2)
    np.testing.assert_array_equal(problem.latency["V100"].block_s_NB, TABLE.block_s_NB)
    np.testing.assert_array_equal(problem.latency["V100"].ramp_s_EB, TABLE.ramp_s_EB)
    assert read_problem(written(tmp_path / "problem.yaml", GOOD)).policy((0,)) is None
    problem = read(tmp_path, changed("[1.0, 0.5, 0.25]", "[1.0, 1.0, 0.0]").replace("count: 4", "count: 0"))
    assert problem.devices["V100"] == Supply(count=0, usd_per_hour=2.93)
    assert [problem.share_after(ramp) for ramp in (None, 0, 1)] == [1.0, 1.0, 0.0]
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem_document(read(tmp_path, GOOD))), encoding="utf-8")
    assert problem_document(read_problem(path).problem) == problem_document(read(tmp_path, GOOD))


@pytest.mark.parametrize(
    "text",
    [
        GOOD,
        changed("{maximize: rate}", "{minimize: cost, rate_per_s: 6000}"),
        GOOD + "budget: {usd_per_hour: 40}\n",
        changed("ramps: [0, 1]", "ramps: []").replace("[[1.0e-4, 1.0e-4], [1e-4, 1e-4]]", "[]"),
    ],
    ids=["rate", "cost", "budget", "no ramps"],
)
def test_what_is_written_is_read_back(text: str, tmp_path: Path) -> None:
    document = problem_document(read(tmp_path, text))
    assert document["schema_version"] == 1
    assert problem_document(parse_problem(document).problem) == document


@pytest.mark.parametrize(
    ("given", "read_as"),
    [("7", (7.0, 7.0, 7.0)), ("[1, 2]", (1.0, 2.0, 0.0)), ("[1, 2, 3]", (1.0, 2.0, 3.0))],
    ids=["one for all", "none after the last block", "one per block"],
)
def test_bytes_per_sample_come_in_three_forms(given: str, read_as: tuple[float, ...], tmp_path: Path) -> None:
    assert read(tmp_path, changed("[10, 20, 30]", given)).bytes_per_sample_N == read_as


PROFILED = (
    GOOD[: GOOD.index("    batch:")] + "    profile: v100.json\n    length: 32\n" + GOOD[GOOD.index("devices:") :]
)


def test_latency_is_taken_from_a_profile_beside_the_problem_or_from_published_figures(tmp_path: Path) -> None:
    latency_profile().save(tmp_path / "v100.json")
    table = read(tmp_path, PROFILED).latency["V100"]
    assert (table.batches, table.block_s_NB.tolist()) == ((1, 2), [[0.001, 0.001]] * 3)
    table = read(tmp_path, PUBLISHED).latency["V100"]
    assert table.block_s_NB.tolist() == published_profile("bert-base", "V100").at(128).block_s_NB.tolist()


PUBLISHED = """\
blocks: 12
ramps: [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
survival: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
latency:
  V100: {published: bert-base, length: 128}
devices: {V100: {count: 1}}
link: {bandwidth_bytes_per_s: 1}
bytes_per_sample: 0
slo: {latency_s: 1}
objective: {maximize: rate}
"""


def problem_records(*, ramps: tuple[int, ...] = (0, 1)) -> ExitRecords:
    """Four inputs: one is sure at ramp 0, one at ramp 1 only, one at both, one never."""
    scores = np.array([[0.1, 0.9], [0.9, 0.1], [0.1, 0.1], [0.9, 0.9]], dtype=np.float32)[:, : len(ramps)]
    answers_NE = np.zeros((4, len(ramps) + 1), dtype=np.int64)
    return exit_records(scores, answers_NE=answers_NE, score="entropy", num_blocks=3, ramps=ramps)


def recorded(thresholds: str) -> str:
    return changed("[1.0, 0.5, 0.25]", f"\n  records: records.npz\n  thresholds: {thresholds}")


def test_survival_is_taken_from_exit_records_with_one_threshold_or_one_per_ramp(tmp_path: Path) -> None:
    problem_records().save(tmp_path / "records.npz")
    file = read_problem(written(tmp_path / "problem.yaml", recorded("0.4")))
    assert file.problem.survival_N == (1.0, 0.5, 0.25)
    assert file.records is not None
    assert len(file.records) == 4
    assert file.policy((1,)) == PolicySpec(name="entropy", thresholds={1: 0.4})
    problem_records().save(tmp_path / "records.npz")
    file = read_problem(written(tmp_path / "problem.yaml", recorded("{0: 0.0, 1: 0.4}")))
    assert file.problem.survival_N == (1.0, 1.0, 0.5)
