from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from profiles.catalogue import published_profile, published_profiles, read_catalogue
from profiles.latency import LatencyProfile
from tests.data import data_folder

BERT_BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 64, 128)
DATA = data_folder()
needs_data = pytest.mark.skipif(DATA is None, reason="the published tables are not in OFFRAMP_DATA")


def whole_ms(model: str, device: str, length: int, batch: int) -> float:
    table = published_profile(model, device).at(length)
    return float(table.block_s_NB[:, table.batches.index(batch)].sum()) * 1e3


def test_the_catalogue_names_models_accelerators_and_sources() -> None:
    devices: dict[str, list[str]] = {}
    for model, device in published_profiles():
        devices.setdefault(model, []).append(device)
    assert {model: " ".join(names) for model, names in devices.items()} == {
        "bert-base": "A100 A30 K80 L4 L40S P100 T4 V100",
        "bert-large": "A100 A30 K80 L4 L40S P100 T4 V100",
        "distilbert-base": "A6000 P100",
        "resnet50": "A100 A30 K80 P100 T4 V100",
    }
    profile = published_profile("bert-base", "V100")
    assert (profile.num_blocks, profile.lengths, profile.at(128).batches) == (12, (128, 384), BERT_BATCHES)
    assert (profile.backend, profile.kind) == ("TensorRT", "published")
    source = profile.provenance["source"]
    assert (source["repo"], source["path"]) == ("NVIDIA/TensorRT", "demo/BERT/README.md")
    assert source["commit"] == "ab20a8ac26da03df5e434b4f9d1da0156ca019b6"


def test_different_blocks_share_the_time_by_their_operations() -> None:
    table = published_profile("resnet50", "V100").at(224)
    work_N = np.array([349, 218, 218, 372, 218, 218, 218, 372, 218, 218, 218, 218, 218, 372, 218, 220])
    assert table.block_s_NB[:, 0] == pytest.approx(3.48e-3 * work_N / work_N.sum())
    assert table.ramp_s_EB[:, 0] == pytest.approx(np.full(15, 0.053 * 3.48e-3 / 16))
    assert published_profile("resnet50", "V100").provenance["blocks"] == (
        "the latency of the whole model spread by multiply-adds over its 16 residual blocks"
    )


def test_published_layers_become_blocks_with_embedding_and_head() -> None:
    profile = published_profile("distilbert-base", "A6000")
    table = profile.at(128)
    assert table.batches == (1,)
    assert table.block_s_NB[:, 0] == pytest.approx(
        np.array([2.7427, 2.3287, 2.3287, 2.3287, 2.3287, 2.6627]) * 1e-3, rel=1e-4
    )
    assert float(table.block_s_NB.sum()) == pytest.approx(14.720145e-3)
    assert table.ramp_s_EB[:, 0] == pytest.approx(np.full(5, 0.123478e-3))


def test_accelerators_that_were_not_measured_are_scaled_by_a_common_model() -> None:
    assert whole_ms("bert-base", "P100", 128, 8) == pytest.approx(3.32 * 7.787265 / 4.888324)
    assert whole_ms("resnet50", "K80", 224, 32) == pytest.approx(11.02 * 7.787265 / 1.236569)
    profile = published_profile("bert-base", "P100")
    assert profile.kind == "derived"
    assert "times 1.593" in profile.provenance["derived"]
    assert profile.provenance["base"]["source"]["repo"] == "NVIDIA/TensorRT"
    assert whole_ms("resnet50", "A30", 224, 32) == pytest.approx(4.70 * 4.51 / 2.45)
    profile = published_profile("resnet50", "A30")
    assert profile.kind == "derived"
    assert profile.at(224).batches == (1, 2, 4, 8, 16, 32, 64, 128, 256)


def test_a_latency_that_falls_with_the_batch_is_raised_and_noted() -> None:
    profile = published_profile("resnet50", "T4")  # published: 7.61 ms at batch 1, 7.20 ms at batch 2
    assert whole_ms("resnet50", "T4", 224, 2) == pytest.approx(7.61)
    assert profile.provenance["smoothed"]["batches_by_length"] == {"224": [2]}
    assert "smoothed" not in published_profile("resnet50", "V100").provenance


def test_seconds_of_published_profiles_never_fall_with_the_batch(tmp_path: Path) -> None:
    for profile in published_profiles().values():
        assert profile.ramps == tuple(range(profile.num_blocks - 1))
        for table in profile.tables.values():
            assert (np.diff(table.block_s_NB, axis=1) >= 0).all(), (profile.model, profile.device)
            assert (np.diff(table.ramp_s_EB, axis=1) >= 0).all(), (profile.model, profile.device)
        profile.save(tmp_path / "profile.json")
        assert LatencyProfile.load(tmp_path / "profile.json").provenance == profile.provenance


def quoted() -> Iterator[tuple[str, ...]]:
    """Returns model, accelerator, framework, precision, length, commit, line, batch and milliseconds of every quote."""
    document = read_catalogue()
    plain = ("line", "latency_ms")
    tables = [(each, each["device"], table, *plain) for each in document["whole"] for table in each["tables"]]
    tables += [(each, each["device"], each, *plain) for each in document["compared"]]
    tables += [(each, each["base"], each, "base_line", "base_ms") for each in document["compared"]]
    for entry, device, table, line, row in tables:
        source = document["sources"][entry["source"]]
        for batch, ms in zip(table["batch"], table[row], strict=True):
            at = entry["model"], device, source["backend"], entry["precision"]
            yield *at, str(table["length"]), source["commit"], str(table[line]), str(batch), f"{ms:.3f}"


def published(path: Path) -> Iterator[tuple[str, ...]]:
    """Returns the same fields of the collected tables, in which ResNet-50 is `resnet50v1.5` without a length."""
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            at = row["model"].removesuffix("v1.5"), row["gpu"], row["framework"], row["precision"]
            length = "224" if row["model"] == "resnet50v1.5" else str(int(float(row["seq_len"] or 0)))
            ms = f"{float(row['latency_ms'] or 0):.3f}"
            yield *at, length, row["commit"], row["line"], row["batch"], ms


@needs_data
def test_every_quoted_number_is_in_the_published_tables() -> None:
    assert DATA is not None
    numbers = list(quoted())
    assert len(numbers) == 293
    assert set(numbers) - set(published(DATA / "profiles" / "gpu_latency_tidy.csv")) == set()
    with gzip.open(DATA / "profiles" / "gavel_simulation_throughputs.json.gz") as file:
        steps_per_s = json.load(file)
    for each in read_catalogue()["scaled"]:
        job = f"('{each['job']}', 1)"
        assert each["base_steps_per_s"] == round(steps_per_s[each["base"].lower()][job]["null"], 6)
        assert each["steps_per_s"] == round(steps_per_s[each["device"].lower()][job]["null"], 6)
    recorded = json.loads((DATA / "exit_traces" / "apparate_distilbert_imdb_a6000.json").read_text())
    (layers,) = read_catalogue()["layers"]
    assert layers["until_ms"] == [round(until_ms, 6) for until_ms, _ in recorded["ramps"]]
    assert [layers["ramp_ms"]] == sorted({round(ramp_ms, 6) for _, ramp_ms in recorded["ramps"]})
    assert layers["whole_ms"] == round(recorded["vanilla_total_ms"], 6)
    assert read_catalogue()["sources"][layers["source"]]["commit"] == recorded["source"]["commit"]
