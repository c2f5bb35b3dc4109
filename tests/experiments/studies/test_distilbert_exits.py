from __future__ import annotations

import json
from pathlib import Path

import pytest

from earlyexit.errors import DataError
from experiments.data import data_folder
from experiments.studies.distilbert_exits import DISTILBERT_IMDB, RAMPS, exit_counts, read_imdb_runs


def test_counts_are_found_from_the_shares_that_they_give() -> None:
    # Of 997 inputs 101 leave at ramp 1, of them 7 with another answer, and 53 at ramp 3, of them 2.
    num_inputs, exits = exit_counts(154 / 997, 1 - 9 / 997, {1: 1 - 7 / 101, 3: 1 - 2 / 53})
    assert (num_inputs, exits) == (997, {1: 101, 3: 53})


def test_shares_in_lowest_terms_are_multiplied_out() -> None:
    # 100 and 60 of 1000, with 50 and 20 other answers: a half and two thirds.
    num_inputs, exits = exit_counts(160 / 1000, 1 - 70 / 1000, {0: 0.5, 2: 2 / 3})
    assert num_inputs == 100, "the fewest inputs that give the same shares"
    assert exits == {0: 10, 2: 6}


def test_ramps_whose_answers_all_agree_are_counted_too() -> None:
    assert exit_counts(11 / 97, 1 - 1 / 97, {0: 1 - 1 / 7, 1: 1.0}) == (97, {0: 7, 1: 4})


def test_shares_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(DataError, match="no counts of fewer than"):
        exit_counts(0.5, 1.0, {0: 0.9})


def test_shares_that_say_too_little_are_refused() -> None:
    with pytest.raises(DataError, match="sets of counts"):
        exit_counts(15 / 16, 10 / 16, {0: 3 / 5, 1: 3 / 5})  # 15 of 16: 5 and 10, or 10 and 5


def test_a_run_is_read_with_the_survival_of_its_counts(tmp_path: Path) -> None:
    run = {
        "qps": 30,
        "config": "baseline (plain Apparate)",
        "overall_accuracy_pct": 100 * (1 - 9 / 997),
        "latency_improvement_pct": 8.0,
        "exit_rate": 154 / 997,
        "ramp_accuracy": {"1": 1 - 7 / 101, "3": 1 - 2 / 53, "5": 1.0},
    }
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"runs": [run]}), encoding="utf-8")
    (found,) = read_imdb_runs(path)
    assert found.is_plain
    assert found.saving == pytest.approx(0.08)
    assert found.survival_N == pytest.approx((1, 1, 896 / 997, 896 / 997, 843 / 997, 843 / 997))


def test_another_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(DataError, match="holds no runs of Apparate"):
        read_imdb_runs(path)


@pytest.mark.skipif(
    data_folder() is None or not (data_folder() or Path()).joinpath(DISTILBERT_IMDB).is_file(),
    reason="needs Apparate's runs of OFFRAMP_DATA",
)
def test_the_counts_save_what_apparate_printed_and_what_a_ramp_takes() -> None:
    folder = data_folder()
    assert folder is not None
    document = json.loads((folder / DISTILBERT_IMDB).read_text(encoding="utf-8"))
    whole_ms = document["vanilla_total_ms"]
    for run in read_imdb_runs(folder / DISTILBERT_IMDB):
        saved_ms = sum(run.exits.get(ramp, 0) * (whole_ms - document["ramps"][ramp][0]) for ramp in RAMPS)
        over_printed = saved_ms / run.num_inputs / whole_ms - run.saving
        # About one ramp was active at a time; it takes 0.84 % of the model.
        assert 0.5 < over_printed / (document["ramps"][0][1] / whole_ms) < 1.1
