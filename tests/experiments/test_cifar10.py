from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earlyexit.dataset import LabelledRows, read_labelled
from experiments.cifar10 import TEST, TRAIN, run
from experiments.data import data_folder

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parts() -> tuple[LabelledRows, LabelledRows]:
    """The images to learn on, and those to calibrate and count on."""
    folder = data_folder()
    missing = [name for name in (TRAIN, TEST) if folder is None or not (folder / name).is_file()]
    if folder is None or missing:
        pytest.skip(f"{', '.join(missing)} not in OFFRAMP_DATA")
    return read_labelled(folder / TRAIN), read_labelled(folder / TEST)


@pytest.fixture(scope="module")
def figures(parts: tuple[LabelledRows, LabelledRows], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder: Path = tmp_path_factory.mktemp("model") / "resnet20"
    test: dict[str, Any] = run(folder, "resnet20", "mlp", *parts)["test"]
    return test


def test_on_unseen_images_the_promised_agreement_holds(figures: dict[str, Any]) -> None:
    assert figures["agreement"] >= 0.99


def test_answers_are_hardly_less_accurate_than_the_full_models(figures: dict[str, Any]) -> None:
    assert figures["full_accuracy"] == pytest.approx(0.915, abs=0.005)
    assert figures["accuracy"] >= figures["full_accuracy"] - 0.01


def test_a_quarter_of_the_blocks_is_never_run(figures: dict[str, Any]) -> None:
    assert figures["mean_blocks"] <= 7.0
