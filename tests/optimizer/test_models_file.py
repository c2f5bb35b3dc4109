from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from earlyexit.network.boundary import Split
from offramp.commands.plan import PlanAnswer, serving_plan
from optimizer.plans.plan import Stage
from optimizer.problems.problem_file import parse_problem, problem_document, read_problem
from profiles.networks import ALONE_FILE
from tests.exit_records import exit_records, share_card
from tests.offramp.cli.runs import written
from tests.optimizer.answers import planned
from tests.optimizer.plain_problem import DOCUMENT, random_chain
from tests.profiles.test_records import remaining

TWO = (Path(__file__).parent / "files/models.yaml").read_text(encoding="utf-8")


def test_blocks_of_several_models_are_numbered_through(tmp_path: Path) -> None:
    path = written(tmp_path / "problem.yaml", TWO)
    problem = read_problem(path).problem
    assert (problem.num_blocks, problem.ramps, problem.networks) == (5, (0, 1), (2, 5))
    assert problem.bytes_per_sample_N == (1000.0, 8.0, 2000.0, 3000.0, 0.0)
    table = problem.latency["V100"]
    assert table.batches == (1, 4)  # measured with both models
    assert table.block_s_NB.tolist() == [[0.001, 0.002]] * 2 + [[0.01, 0.03]] * 3
    assert table.ramp_s_EB.tolist() == [[0.0001, 0.0002], [0.0, 0.0]]  # the last block contains its end
    assert problem.crossing_tokens == (1.0, 0.86)
    assert problem.crossing_s == 0.001
    assert problem.survival_of == {(1,): (1.0,) * 5}
    small = TWO.replace("  crossing_bytes: 8\n", "").split("- name: large")[0]
    rest = "devices:" + TWO.split("devices:")[1]
    path.write_text(f"{small}survival: [1.0, 0.8]\n{rest}")
    problem = read_problem(path).problem
    assert (problem.num_blocks, problem.ramps, problem.networks) == (2, (0,), ())


@pytest.mark.parametrize("seed", range(8))
def test_a_chains_problem_is_read_back_as_it_was_written(seed: int) -> None:
    problem = random_chain(seed)
    document: dict[str, Any] = problem_document(problem)
    again = parse_problem(document).problem
    assert problem_document(again) == document
    assert (again.networks, again.survival_of, again.crossing_s) == (
        problem.networks,
        problem.survival_of or None,
        problem.crossing_s,
    )
    assert again.crossing_tokens == problem.crossing_tokens


def of_three_inputs(path: Path, sure: float, **facts: Any) -> None:
    """Returns exit records of the chain. At 0.5, no input leaves at ramp 0, and some at the small network's end."""
    path.parent.mkdir(exist_ok=True)
    exit_records([[0.1, sure], [0.1, 0.1], [0.1, 0.1]], num_blocks=5, provenance=facts).save(path)


def recorded(path: Path, records: str) -> Path:
    """Returns the problem with survival from exit records."""
    document = yaml.safe_load(TWO)
    del document["survival_of"]
    del document["models"][1]["kept"]
    document["survival"] = {"records": records, "thresholds": 0.5}
    return written(path, yaml.safe_dump(document, sort_keys=False))


def test_plans_of_ensembles_and_pruned_texts_use_the_records_beside_their_own(tmp_path: Path) -> None:
    path = recorded(tmp_path / "problem.yaml", "r.npz")
    of_three_inputs(tmp_path / "r.npz", 0.9, weights={1: 0.3})
    of_three_inputs(tmp_path / ALONE_FILE, 0.1)
    file = read_problem(path)
    assert file.problem.survival_of == {(1,): (1, 1, 1, 1, 1), (0, 1): pytest.approx((1, 1, 2 / 3, 2 / 3, 2 / 3))}
    assert serving_plan(PlanAnswer(file=file, decision=planned(file.problem), baselines={})).prune == {}
    path = recorded(tmp_path / "problem.yaml", "pruned/r.npz")
    facts = {"prune": {1: 0.6}, "tokens_kept": [1.0, 0.5], "measuring": [1.25]}
    of_three_inputs(tmp_path / "pruned" / "r.npz", 0.9, **facts)
    of_three_inputs(tmp_path / "r.npz", 0.9)
    file = read_problem(path)
    assert file.problem.crossing_tokens == (1.0, 0.5)
    assert file.problem.latency["V100"].block_s_NB.tolist() == [[0.00125, 0.0025]] * 2 + [[0.01, 0.03]] * 3
    found = planned(file.problem)
    answer = PlanAnswer(file=file, decision=found, baselines={})
    plan = serving_plan(answer)
    assert (plan.used, plan.prune) == ((0, 1), {1: 0.6})
    reference = replace(found, stages=(Stage(device="V100", replicas=1, splits=(Split(first=2, end=5, batch=1),)),))
    assert serving_plan(replace(answer, decision=reference)).prune == {}


LATENCY = {"V100": {"batch": [1, 2], "block_s": [[0.001] * 2] * 3, "ramp_s": [[0.0] * 2] * 2}}
THREE: dict[str, Any] = {**DOCUMENT, "blocks": 3, "ramps": [0, 1], "survival": [1.0, 0.5, 0.25], "latency": LATENCY}
"""Three blocks, two ramps."""


@pytest.mark.parametrize(
    "batches",
    [
        {"size": 2, "losses": [[1, 0], [None, None], [None, 1]]},
        {"size": 3, "losses": [[0.5, 0.0], [None, None], [None, 1.0]]},
    ],
    ids=["lost or not", "losses"],
)
def test_what_is_written_is_read_back(batches: dict[str, Any]) -> None:
    survival = [1, 2 / 3, 1 / 3]
    document = problem_document(parse_problem({**THREE, "survival": survival, "batches": batches}).problem)
    assert document["batches"] == batches
    assert problem_document(parse_problem(document).problem) == document


BATCHES = {"size": 2, "losses": [[0, 0], [None, None], [None, 0], [None, None]]}
"""One of four leaves after block 0, another after block 1."""


def test_an_input_has_a_loss_at_each_ramp_that_lets_it_leave() -> None:
    assert parse_problem({**THREE, "survival": [1.0, 0.752, 0.499], "batches": BATCHES}).problem.batches is not None
    batches = parse_problem(
        {
            **THREE,
            "survival": [1, 0.75, 0.25],
            "batches": {"size": 2, "losses": [[1, 0], [None, None], [None, 1], [None, 0]]},
        }
    ).problem.batches
    assert batches is not None
    assert remaining(batches, (0, 1)).tolist() == [[1, 1], [2, 0]]
    assert batches.losses_NR.tolist() == [[1, 0], [0, 0], [0, 1], [0, 0]]
    assert "batches" not in problem_document(parse_problem(THREE).problem)


def test_exit_records_provide_batches_and_must_match_the_calibration(tmp_path: Path) -> None:
    scores = [[0.1, 0.9], [0.9, 0.1], [0.1, 0.1], [0.9, 0.9]]
    exit_records(scores, score="entropy").save(tmp_path / "records.npz")
    survival = {"records": "records.npz", "thresholds": 0.4}
    problem = parse_problem({**THREE, "survival": survival}, folder=tmp_path).problem
    assert problem.batches is not None
    assert problem.batches.size == 2  # the largest that is measured
    assert remaining(problem.batches, (0, 1)).tolist() == [[1, 0], [1, 1]]
    assert problem_document(parse_problem(problem_document(problem)).problem) == problem_document(problem)
    shares = exit_records(np.zeros((2, 2)), score="share", confidences={0: 0.7, 1: 0.7})
    shares.save(tmp_path / "exit_records.npz")
    survival = {"folder": "."}
    (tmp_path / "calibration.json").write_text(share_card(0.7).to_json(), encoding="utf-8")
    assert parse_problem({**THREE, "survival": survival}, folder=tmp_path).problem.survival_N == (1, 1, 1)
