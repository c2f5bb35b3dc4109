from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from earlyexit.errors import DataError
from experiments.data import data_folder
from experiments.recorded_exits import BERT12_SST2, bert12_sst2, binary_entropy, read_bert12
from experiments.studies.fig21_forecast import (
    ENTROPY,
    TWO_SWITCHES,
    WORKLOADS,
    Kinds,
    bursts,
    cuts_of,
    cycle,
    draw_reach,
    easy_and_hard,
    forecast_batches,
    gradual,
    switching,
    wandering,
)
from profiles.outcome import ExitOutcome

KINDS = Kinds(easy_K=np.array([0.5, 0.5, 0]), hard_K=np.array([0, 0.2, 0.8]))


def test_workloads_are_what_they_are_called() -> None:
    assert switching(10, 2).tolist() == [0.8, 0.8, 0.5, 0.5, 0.2, 0.2, 0.5, 0.5, 0.8, 0.8]
    assert gradual(7, 3) == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.4, 0.6, 0.8])
    assert cycle(5, 4) == pytest.approx([0.5, 0.8, 0.5, 0.2, 0.5])
    assert set(bursts(200, np.random.default_rng(1))) == {0.2, 0.8}
    walk_W = wandering(2000, np.random.default_rng(1))
    assert 0.2 <= walk_W.min() < 0.25 < 0.75 < walk_W.max() <= 0.8
    assert np.abs(np.diff(walk_W)).max() < 0.1


def test_a_mix_has_its_share_of_each_kind() -> None:
    np.testing.assert_allclose(KINDS.exits(np.array([1.0, 0.5])), [[0.5, 0.5, 0], [0.25, 0.35, 0.4]])


def test_easy_inputs_leave_in_the_first_half() -> None:
    exits_N = np.array([0, 1, 1, 2, 3, 3, 3, 3])
    kinds = easy_and_hard(
        ExitOutcome(
            num_blocks=4,
            exits_N=exits_N,
            losses_N=np.zeros(8),
            answers_N=None,
            true_losses_N=None,
            full_true_losses_N=None,
        )
    )
    assert kinds.easy_K.tolist() == [1 / 3, 2 / 3, 0, 0]
    assert kinds.hard_K.tolist() == [0, 0, 0.2, 0.8]


def test_drawn_counts_never_rise_and_start_with_all_inputs() -> None:
    reach_WK = draw_reach(KINDS.exits(np.array([0.8, 0.2])), np.array([100_000, 50]), np.random.default_rng(0))
    assert reach_WK[:, 0].tolist() == [100_000, 50]
    assert (np.diff(reach_WK, axis=1) <= 0).all()
    # 0.4 leave after block 0, 0.44 after block 1.
    np.testing.assert_allclose(reach_WK[0] / 100_000, [1, 0.6, 0.16], atol=0.01)


def exits_file(path: Path) -> Path:
    """Two samples; at exit k the first is sure to 0.5 + 0.04 k of class 1, the second to 0.9 of class 0."""
    rows = [f"0,{k},{0.5 + 0.04 * k},1,1" for k in range(12)] + [f"1,{k},0.9,0,1" for k in range(12)]
    path.write_text("\n".join(["Sample_ID,Exit,Confidence,Prediction,Label", *rows]) + "\n")
    return path


def test_recorded_exits_become_ramps_after_the_same_block(tmp_path: Path) -> None:
    records = read_bert12(exits_file(tmp_path / "e.csv"), "confidence")
    assert (records.num_blocks, records.ramps, records.sample_ids) == (12, tuple(range(11)), ("0", "1"))
    assert records.scores_NR[0, :2] == pytest.approx([0.54, 0.58])
    assert records.answers()[:, -1].tolist() == [1, 0]
    assert records.outcome({}).full_accuracy == 0.5
    entropy = read_bert12(tmp_path / "e.csv", "entropy")
    assert entropy.scores_NR[1, 0] == pytest.approx(0.3251, abs=1e-4)  # -0.9 ln 0.9 - 0.1 ln 0.1


def test_entropy_is_none_where_sure_and_ln_2_where_even() -> None:
    assert binary_entropy(np.array([1.0, 0.5])) == pytest.approx([0, np.log(2)])


def test_files_of_other_exits_are_refused(tmp_path: Path) -> None:
    path = exits_file(tmp_path / "e.csv")
    header, *rows = path.read_text().splitlines()
    for lines, message in {
        ("Sample,Exit", *rows): "needs the columns",
        (header, *rows[1:]): "12 exits for every sample",
        (header, *reversed(rows)): "in one piece",
        (header, "0,0,sure,1,1"): "could not convert",
    }.items():
        path.write_text("\n".join(lines))
        with pytest.raises(DataError, match=message):
            read_bert12(path, "confidence")


def needs_recorded_exits() -> None:
    folder = data_folder()
    if folder is None or not (folder / BERT12_SST2).is_file():
        pytest.skip(f"{BERT12_SST2} is not in OFFRAMP_DATA")


def test_the_recorded_bert_is_the_one_described() -> None:
    needs_recorded_exits()
    records = bert12_sst2("confidence")
    assert len(records) == 872
    assert records.true_losses_NE is not None
    accuracy_R = 1 - records.true_losses_NE.mean(0)
    assert accuracy_R[[0, 10]] == pytest.approx([0.791, 0.903], abs=0.001)
    assert records.outcome(dict.fromkeys(records.ramps, 0.8)).accuracy == pytest.approx(0.880, abs=0.001)


@pytest.mark.slow
def test_in_figure_21_no_workload_is_forecast_much_worse_than_by_its_last_value() -> None:
    needs_recorded_exits()
    records = bert12_sst2("entropy")
    kinds = easy_and_hard(records.outcome(dict.fromkeys(records.ramps, ENTROPY)))
    cuts, usual = cuts_of(kinds), []
    for workload in (*WORKLOADS, TWO_SWITCHES):
        found = [forecast_batches(workload, kinds, 12_000, cuts, seed) for seed in range(3)]
        forecast, last = (np.mean([getattr(each, f"{name}_error") for each in found]) for name in ("forecast", "last"))
        assert forecast <= 1.05 * last, workload.name
        usual += [forecast] if workload in WORKLOADS else []
    assert np.mean(usual) <= 0.4
