from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import PlanError
from optimizer.plan import PolicySpec
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problem_file import parse_problem, problem_document, read_problem
from profiles.catalogue import published_profile
from profiles.latency import LatencyProfile
from profiles.records import ExitRecords
from profiles.table import LatencyTable

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
SURVIVAL, OBJECTIVE = "[1.0, 0.5, 0.25]", "{maximize: rate}"
TABLE = LatencyTable(batches=(1, 2), block_s_NB=np.array([[0.001, 0.0015]] * 3), ramp_s_EB=np.array([[1e-4, 1e-4]] * 2))


def write(folder: Path, text: str) -> Path:
    path = folder / "problem.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def read(folder: Path, text: str) -> PlanProblem:
    return read_problem(write(folder, text)).problem


def refused(folder: Path, text: str) -> str:
    """What is said of a problem, from the line on."""
    path = write(folder, text)
    with pytest.raises(PlanError) as caught:
        read_problem(path)
    said = str(caught.value)
    assert said.startswith(f"{path}:")
    assert said.count(str(path)) == 1
    return said.removeprefix(f"{path}:")


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


def test_a_cost_objective_and_a_budget_are_read(tmp_path: Path) -> None:
    text = changed("{maximize: rate}", "{minimize: cost, rate_per_s: 6000}") + "budget: {usd_per_hour: 40}\n"
    problem = read(tmp_path, text)
    assert (problem.objective, problem.budget_usd_per_hour) == (MinimizeCost(rate_per_s=6000), 40)


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


FORMS = "Input should be one number, or a list of numbers, one per block, not"
REFUSALS = (
    ("blocks: 3", "blocks: 0", "1: blocks: "),
    ("blocks: 3", "blocks: three", "1: blocks: Input should be a valid integer, not 'three'"),
    ("blocks: 3", "blocks: 3\nblocks: 4", "2: not YAML: 'blocks' stands twice in one mapping"),
    ("blocks: 3", "blocks: 10001", "1: blocks: "),
    ("blocks: 3", f"blocks: {10**19}", "1: blocks: "),
    ("blocks: 3", "blocks: 3\nschema_version: 2", "2: schema_version: "),
    ("blocks: 3", "blocks: 3\nschema_version: true", "2: schema_version: Input should be a valid integer, not true"),
    ("blocks: 3", "blocks: 3\nbudget: {usd_per_hour: -1}", "2: budget.usd_per_hour: "),
    ("blocks: 3", "blocks: 3\nbudget: {usd: 1}", "2: budget.usd: unknown field; known are usd_per_hour"),
    ("blocks: 3", "blocks: 3\nmodel: bert", "2: model: unknown field; known are schema_version, blocks, ramps,"),
    ("ramps: [0, 1]", "ramps: [1, 0]", "2: ramps must ascend without repeats, not [1, 0]"),
    ("ramps: [0, 1]", "ramps: [0, 2]", "2: ramps [2] are not after blocks 0 to 1"),
    (SURVIVAL, "[1.0, 0.25, 0.5]", "3: survival rises at block 2, from 0.25 to 0.5; it may only fall"),
    (SURVIVAL, "[0.9, 0.5, 0.25]", "3: survival must start at 1: every input reaches block 0, not 0.9"),
    (SURVIVAL, "[1.0, 0.5]", "3: survival needs 3 values, one per block, not 2"),
    (SURVIVAL, "[1.0, 0.5, -0.1]", "3: survival must hold shares between 0 and 1"),
    (SURVIVAL, "[1.0, .nan, 0.1]", "3: survival.1: "),
    (SURVIVAL, "half", "3: survival: Input should be a list of shares, one per block, or a mapping with records, "),
    (SURVIVAL, "3", "3: survival: Input should be a list of shares, one per block, or a mapping with records, "),
    ("batch: [1, 2]", f"batch: [1, {2**70}]", "6: latency.V100.batch.1: "),
    ("batch: [1, 2]", "batch: [1, 2, 4]", "8: latency.V100.block_s.0 has 2 values; 3 are needed, one for each batch"),
    ("batch: [1, 2]", "batch: [2, 1]", "6: latency.V100.batch: batch sizes must ascend from at least 1, not [2, 1]"),
    ("batch: [1, 2]", "batches: [1, 2]", "6: latency.V100.batches: unknown field; known are batch, block_s, ramp_s"),
    ("    batch: [1, 2]\n", "", "6: latency.V100.batch: "),
    ("      - [0.001, 0.0015]\n    ramp_s", "    ramp_s", "8: latency.V100.block_s has 2 rows; 3 are needed"),
    (", [1e-4, 1e-4]]", "]", "11: latency.V100.ramp_s has 1 rows; 2 are needed, one per ramp"),
    ("[[1.0e-4, 1.0e-4]", "[[-1.0, 1.0e-4]", "11: latency.V100.ramp_s.0.0: "),
    ("[[1.0e-4, 1.0e-4]", "[[.inf, 1.0e-4]", "11: latency.V100.ramp_s.0.0: "),
    ("      - [0.001, 0.0015]\n      - [0.001", "      - [0.0, 0.0015]\n      - [0.001", "6: latency of V100: a block"),
    ("V100: {count", "T4: {count", "13: no latency for devices ['T4']; latency is given for ['V100']"),
    ("{count: 4, usd_per_hour: 2.93}", "4", "13: devices.V100: Input should be a mapping with count and usd"),
    ("count: 4", "count: -1", "13: devices.V100.count: "),
    ("count: 4", "count: 4.5", "13: devices.V100.count: "),
    ("count: 4", "count: 1000001", "13: devices.V100.count: "),
    ("usd_per_hour: 2.93", "price: 2.93", "13: devices.V100.price: unknown field; known are count, usd_per_hour"),
    ("devices:\n  V100: {count: 4, usd_per_hour: 2.93}", "devices: {}", "12: devices: "),
    (", usd_per_hour: 2.93}", "}\nbudget: {usd_per_hour: 9}", "13: plans are made by cost, and V100 has no usd"),
    ("{bandwidth_bytes_per_s: 1.25e9, delay_s: 1.0e-4}", "3", "14: link: Input should be a mapping with bandwidth_"),
    ("1.25e9", "0", "14: link.bandwidth_bytes_per_s: "),
    ("delay_s: 1.0e-4", "delay_s: .nan", "14: link.delay_s: "),
    ("[10, 20, 30]", "null", f"15: bytes_per_sample: {FORMS} null"),
    ("[10, 20, 30]", "true", f"15: bytes_per_sample: {FORMS} true"),
    ("[10, 20, 30]", "[10]", "15: bytes_per_sample has 1 values; allowed are one number, 3 (one per block) or 2"),
    ("[10, 20, 30]", "-1", "15: bytes_per_sample: "),
    ("[10, 20, 30]", "[10, 20, 30", "16: not YAML: "),
    ("slack: 0.25", "slack: 1", "16: slo.slack: "),
    ("slack: 0.25", "slak: 0.25", "16: slo.slak: unknown field; known are latency_s, slack"),
    (OBJECTIVE, "{maximize: rate, minimize: cost}", "17: objective says both maximize and minimize; allowed"),
    (OBJECTIVE, "{}", "17: objective says neither maximize nor minimize; allowed are {maximize: rate},"),
    (OBJECTIVE, "{maximize: rate, rate_per_s: 5}", "17: objective maximizes the rate and names a rate_per_s"),
    (OBJECTIVE, "{minimize: cost}", "17: objective minimizes the cost of no rate_per_s; allowed are"),
    (OBJECTIVE, "{maximize: joy}", "17: objective.maximize: "),
    ("slo: {latency_s: 0.1, slack: 0.25}\n", "", "1: slo: "),
    (GOOD, "- 1\n", "1: the problem: Input should be a mapping with schema_v"),
)
"""What is written instead of what, and what is said: the line, then the field or what is allowed."""


def test_a_mistake_is_said_with_its_line(tmp_path: Path) -> None:
    for before, after, said in REFUSALS:
        assert before in GOOD
        assert refused(tmp_path, GOOD.replace(before, after, 1)).startswith(said), after


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


def test_a_profile_that_does_not_fit_is_refused_at_its_line(tmp_path: Path) -> None:
    for stored, said in (
        (None, "no such file"),
        (profile(num_blocks=4), "has 4 blocks and ramps [0, 1], wanted are 3 blocks"),
        (profile(ramps=(0,)), "has 3 blocks and ramps [0], wanted are"),
    ):
        if stored is not None:
            stored.save(tmp_path / "v100.json")
        message = refused(tmp_path, PROFILED)
        assert message.startswith("6: latency.V100: ")
        assert said in message


def test_a_profile_that_cannot_be_read_is_refused_at_its_line(tmp_path: Path) -> None:
    said = refused(tmp_path, PROFILED.replace("v100.json", "p" * 300))
    assert said.startswith("6: latency.V100: ")
    assert said.endswith(": cannot be read: File name too long")


def test_a_profile_of_batches_beyond_all_bounds_is_refused_at_its_line(tmp_path: Path) -> None:
    table = LatencyTable(batches=(1, 2**70), block_s_NB=np.ones((3, 2)), ramp_s_EB=np.ones((2, 2)))
    replace(profile(), tables={32: table}).save(tmp_path / "v100.json")
    said = refused(tmp_path, PROFILED)
    assert said == f"6: latency.V100: a batch size is at most 1000000, not {2**70}"


def test_the_forms_of_a_latency_are_named(tmp_path: Path) -> None:
    assert refused(tmp_path, PUBLISHED.replace("{published: bert-base, length: 128}", "fast")) == (
        "5: latency.V100: Input should be a mapping with batch, block_s, ramp_s, length, context and context_s, or "
        "with published and length, or with profile and length, not 'fast'"
    )


def test_a_profile_of_another_schema_or_length_is_refused_at_its_line(tmp_path: Path) -> None:
    profile().save(tmp_path / "v100.json")
    with pytest.raises(PlanError, match=r"problem.yaml:6: latency.V100: .*not measured for 64"):
        read(tmp_path, PROFILED.replace("length: 32", "length: 64"))
    stored = (tmp_path / "v100.json").read_text(encoding="utf-8")
    (tmp_path / "v100.json").write_text(stored.replace('"schema_version": 1', '"schema_version": 9'), encoding="utf-8")
    with pytest.raises(PlanError, match=r"problem.yaml:6: latency.V100: .*schema_version: Input should be 1"):
        read(tmp_path, PROFILED)


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


def test_published_figures_that_do_not_fit_are_refused_at_their_line(tmp_path: Path) -> None:
    for before, after, said in (
        ("bert-base", "bert-tiny", "no published figures of model 'bert-tiny'"),
        ("bert-base", "bert-large", "the latency profile of 'bert-large' has 24 blocks"),
        ("length: 128", "length: 7", "bert-base on V100: not measured for 7 tokens"),
        ("  V100: {pub", "  B200: {pub", "no published figures of bert-base on 'B200'"),
    ):
        message = refused(tmp_path, PUBLISHED.replace(before, after))
        assert message.startswith("5: latency.")
        assert said in message


def records(*, ramps: tuple[int, ...] = (0, 1)) -> ExitRecords:
    """Four inputs: one is sure at ramp 0, one at ramp 1 only, one at both, one never."""
    scores = np.array([[0.1, 0.9], [0.9, 0.1], [0.1, 0.1], [0.9, 0.9]], dtype=np.float32)[:, : len(ramps)]
    return ExitRecords.of_answers(
        np.column_stack([np.zeros(scores.shape, dtype=np.int64), np.zeros(4, dtype=np.int64)]),
        score="entropy",
        num_blocks=3,
        ramps=ramps,
        sample_ids=("a", "b", "c", "d"),
        scores_NR=scores,
    )


def recorded(thresholds: str) -> str:
    return changed("[1.0, 0.5, 0.25]", f"\n  records: records.npz\n  thresholds: {thresholds}")


def test_survival_is_taken_from_exit_records_with_every_ramp_active(tmp_path: Path) -> None:
    records().save(tmp_path / "records.npz")
    file = read_problem(write(tmp_path, recorded("0.4")))
    assert file.problem.survival_N == (1.0, 0.5, 0.25)
    assert file.records is not None
    assert len(file.records) == 4
    assert file.policy((1,)) == PolicySpec(name="entropy", thresholds={1: 0.4})


def test_survival_is_taken_from_exit_records_with_a_threshold_per_ramp(tmp_path: Path) -> None:
    records().save(tmp_path / "records.npz")
    file = read_problem(write(tmp_path, recorded("{0: 0.0, 1: 0.4}")))
    assert file.problem.survival_N == (1.0, 1.0, 0.5)


def test_thresholds_of_ramps_are_read_from_json_whose_keys_are_strings(tmp_path: Path) -> None:
    records().save(tmp_path / "records.npz")
    document = problem_document(read(tmp_path, GOOD))
    document["survival"] = {"records": "records.npz", "thresholds": {0: 0.0, 1: 0.4}}
    path = tmp_path / "problem.json"
    path.write_text(json.dumps(document), encoding="utf-8")
    assert read_problem(path).thresholds == {0: 0.0, 1: 0.4}


def test_a_problem_without_records_has_no_policy(tmp_path: Path) -> None:
    assert read_problem(write(tmp_path, GOOD)).policy((0,)) is None


def test_records_that_do_not_fit_are_refused_at_their_line(tmp_path: Path) -> None:
    assert "does not hold exit records" in refused(tmp_path, recorded("0.4"))
    records(ramps=(0,)).save(tmp_path / "records.npz")
    assert refused(tmp_path, recorded("0.4")) == (
        "4: survival.records: records.npz holds 3 blocks and ramps [0]; the problem has 3 blocks and ramps [0, 1]"
    )
    records().save(tmp_path / "records.npz")
    assert refused(tmp_path, recorded("{1: 0.4}")) == (
        "5: survival.thresholds names ramps [1]; allowed are one number, or one for each ramp of the problem, [0, 1]"
    )
    assert refused(tmp_path, recorded(".nan")).startswith("5: survival.thresholds: Input should be")
    assert refused(tmp_path, recorded("high")) == (
        "5: survival.thresholds: Input should be one number, or a mapping with a number for each ramp, not 'high'"
    )
