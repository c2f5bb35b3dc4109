from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from optimizer.plan import PolicySpec
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.problem_file import parse_problem, problem_document, read_problem
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from tests.exit_records import exit_records

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


def write(folder: Path, text: str) -> Path:
    path = folder / "problem.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> PlanProblem:
    return read_problem(write(folder, text)).problem


def changed(before: str, after: str) -> str:
    assert before in GOOD
    return GOOD.replace(before, after)


def test_a_problem_is_read_from_yaml(tmp_path: Path) -> None:
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


def test_a_problem_is_read_from_json(tmp_path: Path) -> None:
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(problem_document(read(tmp_path, GOOD))), encoding="utf-8")
    assert problem_document(read_problem(path).problem) == problem_document(read(tmp_path, GOOD))


@pytest.mark.parametrize(
    "text",
    [
        pytest.param(GOOD, id="rate"),
        pytest.param(changed("{maximize: rate}", "{minimize: cost, rate_per_s: 6000}"), id="cost"),
        pytest.param(GOOD + "budget: {usd_per_hour: 40}\n", id="budget"),
        pytest.param(
            changed("ramps: [0, 1]", "ramps: []").replace("[[1.0e-4, 1.0e-4], [1e-4, 1e-4]]", "[]"), id="no ramps"
        ),
    ],
)
def test_what_is_written_is_read_back(text: str, tmp_path: Path) -> None:
    document = problem_document(read(tmp_path, text))
    assert document["schema_version"] == 1
    assert problem_document(parse_problem(document).problem) == document


@pytest.mark.parametrize(
    ("given", "read_as"),
    [
        pytest.param("7", (7.0, 7.0, 7.0), id="one for all"),
        pytest.param("[1, 2]", (1.0, 2.0, 0.0), id="none after the last block"),
        pytest.param("[1, 2, 3]", (1.0, 2.0, 3.0), id="one per block"),
    ],
)
def test_bytes_per_sample_come_in_three_forms(given: str, read_as: tuple[float, ...], tmp_path: Path) -> None:
    assert read(tmp_path, changed("[10, 20, 30]", given)).bytes_per_sample_N == read_as


PROFILED = (
    GOOD[: GOOD.index("    batch:")] + "    profile: v100.json\n    length: 32\n" + GOOD[GOOD.index("devices:") :]
)


def profile(*, num_blocks: int = 3, ramps: tuple[int, ...] = (0, 1)) -> LatencyProfile:
    table = LatencyTable(
        batches=(1, 2), block_s_NB=np.full((num_blocks, 2), 0.001), ramp_s_EB=np.full((len(ramps), 2), 1e-4)
    )
    return LatencyProfile(
        model="m",
        num_blocks=num_blocks,
        ramps=ramps,
        device="V100",
        backend="torch",
        dtype="float16",
        kind="measured",
        tables={32: table},
        provenance={},
    )


def test_latency_is_taken_from_a_profile_beside_the_problem(tmp_path: Path) -> None:
    profile().save(tmp_path / "v100.json")
    table = read(tmp_path, PROFILED).latency["V100"]
    assert (table.batches, table.block_s_NB.tolist()) == ((1, 2), [[0.001, 0.001]] * 3)


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


def test_latency_is_taken_from_published_figures(tmp_path: Path) -> None:
    table = read(tmp_path, PUBLISHED).latency["V100"]
    assert table.block_s_NB.tolist() == published_profile("bert-base", "V100").at(128).block_s_NB.tolist()


def problem_records(*, ramps: tuple[int, ...] = (0, 1)) -> ExitRecords:
    """Four inputs: one is sure at ramp 0, one at ramp 1 only, one at both, one never."""
    scores = np.array([[0.1, 0.9], [0.9, 0.1], [0.1, 0.1], [0.9, 0.9]], dtype=np.float32)[:, : len(ramps)]
    answers_NE = np.zeros((4, len(ramps) + 1), dtype=np.int64)
    return exit_records(scores, answers_NE=answers_NE, score="entropy", num_blocks=3, ramps=ramps)


def recorded(thresholds: str) -> str:
    return changed("[1.0, 0.5, 0.25]", f"\n  records: records.npz\n  thresholds: {thresholds}")


def test_survival_is_taken_from_exit_records_with_every_ramp_active(tmp_path: Path) -> None:
    problem_records().save(tmp_path / "records.npz")
    file = read_problem(write(tmp_path, recorded("0.4")))
    assert file.problem.survival_N == (1.0, 0.5, 0.25)
    assert file.records is not None
    assert len(file.records) == 4
    assert file.policy((1,)) == PolicySpec(name="entropy", thresholds={1: 0.4})


def test_survival_is_taken_from_exit_records_with_a_threshold_per_ramp(tmp_path: Path) -> None:
    problem_records().save(tmp_path / "records.npz")
    file = read_problem(write(tmp_path, recorded("{0: 0.0, 1: 0.4}")))
    assert file.problem.survival_N == (1.0, 1.0, 0.5)


def test_a_problem_without_records_has_no_policy(tmp_path: Path) -> None:
    assert read_problem(write(tmp_path, GOOD)).policy((0,)) is None


def test_survival_may_stay_and_end_at_nothing_and_devices_may_be_absent(tmp_path: Path) -> None:
    problem = read(tmp_path, changed("[1.0, 0.5, 0.25]", "[1.0, 1.0, 0.0]").replace("count: 4", "count: 0"))
    assert problem.devices["V100"] == Supply(count=0, usd_per_hour=2.93)
    assert [problem.share_after(ramp) for ramp in (None, 0, 1)] == [1.0, 1.0, 0.0]
