"""What the live comparison of a cascade makes of what its sides answered."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest

from experiments.live.cascade import Bench, Ran, table, told_answers
from experiments.live.cascade_sides import CASCADE, ENDS, LARGE, LARGE_RAMPS, SIDES
from experiments.peers.rounds import Comparison, RoundRate

SAID: dict[str, list[tuple[int, str, int]]] = {
    LARGE: [(0, "a", 5), (1, "b", 5), (2, "a", 5), (3, "b", 5)],
    LARGE_RAMPS: [(0, "a", 3), (1, "b", 5), (2, "a", 5)],
    ENDS: [(0, "a", 1), (1, "a", 1), (2, "a", 5), (3, "b", 5)],
    CASCADE: [(0, "a", 0), (1, "b", 2), (2, "b", 3), (3, "b", 5)],
}
"""Line of the input, label, exit; of a chain of two and four blocks."""


def test_agreement_is_with_the_large_model_alone_and_accuracy_with_the_labels(tmp_path: Path) -> None:
    for place, side in enumerate(SIDES):
        rows = [{"input": at, "label": label, "exit": block} for at, label, block in SAID[side]]
        (tmp_path / f"{place}.answers").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    bench = Bench(options=Namespace(), sides=(), slo_s=1.0, bounds=(2, 6), folder=tmp_path)
    said = told_answers(bench, ("a", "a"), (0, 1, 0, 1))
    assert [said[side]["agreement"] for side in SIDES] == [1.0, 1.0, 0.75, 0.75]
    assert [said[side]["accuracy"] for side in SIDES] == [0.5, pytest.approx(2 / 3), 0.75, 0.25]
    assert said[LARGE]["by_network"] == [0.0, 1.0]
    assert (said[ENDS]["by_network"], said[CASCADE]["by_network"]) == ([0.5, 0.5], [0.25, 0.75])


def test_ratios_to_the_large_model_are_within_rounds() -> None:
    rates = {LARGE: (100.0, 110.0), LARGE_RAMPS: (150.0, 165.0), ENDS: (200.0, 220.0), CASCADE: (250.0, 275.0)}
    rounds = tuple(
        RoundRate(round_index=index, side=side, sustained_per_s=rates[side][index], ending="bracketed")
        for index in range(2)
        for side in SIDES
    )
    at_rate = {
        side: [
            {"mean_s": 0.01 * times, "p50_s": 0.01, "p99_s": 0.02 * times, "cpu_s": {"stages": 0.003, "ingress": 0.001}}
            for _ in range(2)
        ]
        for side, times in zip(SIDES, (1.0, 0.9, 0.8, 0.5), strict=True)
    }
    said = {side: {"agreement": 1.0, "accuracy": 0.5, "by_network": [0.5, 0.5]} for side in SIDES}
    rows = table(Comparison(rounds=rounds, probes=()), at_rate, said)
    name, rate, times, *latency = rows[3]
    assert (name, rate, times) == (CASCADE, 262.5, 2.5)
    assert latency[3:7] == pytest.approx([0.5, 0.5, 4.0, 3.0])


def test_what_a_network_ran_is_told_by_request_and_by_input() -> None:
    ran = Ran(batches=30, inputs=120, busy_s=2.5).since(Ran(batches=10, inputs=40, busy_s=0.5))
    assert ran.document(100) == pytest.approx({"mean_batch": 4.0, "s_per_request": 0.02, "s_per_input": 0.025})
    assert Ran(0, 0, 0.0).document(0) == {"mean_batch": 0.0, "s_per_request": 0.0, "s_per_input": 0.0}
