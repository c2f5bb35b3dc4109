"""E3's figures 10 to 12: models that generate."""

from __future__ import annotations

import gzip
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from experiments.studies import decoding
from experiments.studies.decoding import Rates
from tests.experiments.studies.cases import ours


def rates(case: str, e3: float) -> Rates:
    per_s = {"stock": (10.0, 20.0), "early-exit": (8.0, 25.0), "e3": (10 * e3, 20 * e3), "best": (30.0, 50.0)}
    return Rates(case=case, batches=(1, 8), per_s=per_s, splits=dict.fromkeys(per_s, ("a", "b")))


def test_layers_alone_allow_what_the_paper_is_held_against() -> None:
    assert decoding.layers_allow(decoding.ONE_EXIT, 2) == pytest.approx(2.105, abs=1e-3)
    assert decoding.layers_allow(decoding.LLAMA_EXITS, 25) == pytest.approx(1.123, abs=1e-3)
    assert decoding.all_allow(decoding.EVERY_LAYER) == pytest.approx(decoding.FIG10_PAPER, abs=0.01)


def test_a_static_batch_runs_as_long_as_its_longest_answer() -> None:
    longest = np.random.default_rng(0).geometric(1 / 18, (20_000, 4)).max(axis=1).mean()
    assert decoding.longest_over_mean(4) == pytest.approx(longest / 18, rel=0.02)
    assert decoding.longest_over_mean(1) == pytest.approx(1.0)


def test_layers_are_read_without_the_embedding_and_never_get_quicker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "times.csv.gz"
    head = "time_stats.emb.median,time_stats.a.median,time_stats.b.median,time_stats.b.mean,num_tokens"
    rows = ["9,1.5,0.5,7,4,1", "9,1,,7,1,1", "9,1,0.5,7,8,1", "9,9,9,9,8,2"]
    text = "\n".join([f"{head},num_tensor_parallel_workers", *rows])
    path.write_bytes(gzip.compress(text.encode()))
    monkeypatch.setattr(decoding, "require_data", lambda name: tmp_path / name)
    decoding.layer_times.cache_clear()
    assert decoding.layer_s("times.csv.gz", [1, 2.5, 4, 8]) == pytest.approx([0.001, 0.0015, 0.002, 0.002])
    decoding.layer_times.cache_clear()


def test_10_every_case_is_beside_the_papers() -> None:
    result = decoding.fig10_compare([rates("one exit", 2.0), rates("other", 1.5)])
    found = ours(result)
    assert found["e3 / stock, largest"] == 2.0
    assert found["e3 / early-exit, batch 8"] == 1.6
    assert found["other: best / stock, batch 8"] == 2.5
    assert result.e3.over_stock == 2.0


def test_12_checks_at_every_layer_stand_beside_those_at_splits() -> None:
    found = ours(decoding.fig12_compare([rates("head paid", 1.0)]))
    assert found["head paid: early-exit / stock, batch 1"] == 0.8
    assert found["head paid: e3 / stock, batch 8"] == 1.0


def test_an_exit_of_a_decoder_is_worth_no_more_than_its_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.array([1.0, 4096.0])
    monkeypatch.setattr(decoding, "layer_times", lambda name: (tokens, np.array([0.001, 0.001])))
    problem = partial(decoding.t5, decoding.ONE_EXIT)
    copied = decoding.rates("", problem(), (8,)).times("best", "stock", 8)
    paid = decoding.rates("", problem(with_head=True), (8,)).times("best", "stock", 8)
    assert copied == pytest.approx(2.105, rel=1e-2)
    assert paid is not None
    assert 1.1 < paid < 1.3
