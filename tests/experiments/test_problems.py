from __future__ import annotations

from pathlib import Path

import pytest

from cluster.devices import find_device
from experiments.data import data_folder
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from optimizer.problems.problem_file import read_problem

FOLDER = Path(__file__).parents[2] / "examples" / "problems"
BERT_BASE = read_problem(FOLDER / "bert_base_16_v100.yaml").problem


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in sorted(FOLDER.glob("*.yaml"))])
def test_problems_have_known_accelerators_at_the_cost_of_e3s_clusters(path: Path) -> None:
    problem = read_problem(path).problem
    assert all(map(find_device, problem.devices))
    if problem.generation is not None:
        return
    usd_per_hour = sum(supply.count * supply.usd_per_hour for supply in problem.devices.values())
    assert usd_per_hour / 3600 == pytest.approx(0.013, abs=0.0005)
    blocks = {"bert_base": 12, "bert_base_before_large": 36, "bert_large": 24, "resnet50": 16}
    assert problem.num_blocks == blocks[max(filter(path.stem.startswith, blocks), key=len)]
    assert problem.ramps == tuple(range(problem.num_blocks - 1))


def test_the_survival_of_bert_base_is_the_recorded_one() -> None:
    folder = data_folder()
    if folder is None or not (folder / BERT12_SST2).exists():
        pytest.skip(f"{BERT12_SST2} is not there")
    outcome = bert12_sst2("entropy").outcome(dict.fromkeys(range(11), 0.4))
    assert BERT_BASE.survival_N == tuple(round(share, 4) for share in outcome.survival)
