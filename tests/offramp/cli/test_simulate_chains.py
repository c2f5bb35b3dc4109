"""`offramp simulate` of a chain: a small network that returns most inputs before one four times as slow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offramp.cli.runs import Captured, played, run, written

CASCADE = """
models:
  - name: small
    blocks: 2
    latency: {cpu: {batch: [1, 4], block_s: [[0.001, 0.001], [0.001, 0.001]], ramp_s: []}}
  - name: large
    blocks: 2
    latency: {cpu: {batch: [1, 4], block_s: [[0.004, 0.004], [0.004, 0.004]], ramp_s: []}}
survival: [1.0, 1.0, 0.25, 0.25]
crossing_s: 0.001
devices: {cpu: {count: 3, usd_per_hour: 1.0}}
link: {bandwidth_bytes_per_s: 1.0e9}
slo: {latency_s: 0.1}
objective: {maximize: rate}
"""
ALONE = """
networks: [2, 4]
stages:
  - device: cpu
    replicas: 3
    splits: [{first: 2, end: 4, batch: 4}]
"""


@pytest.fixture
def cascade(tmp_path: Path) -> Path:
    path = tmp_path / "cascade.yaml"
    written(path, CASCADE)
    return path


def test_both_networks_are_planned_and_most_answers_small_ones(cascade: Path, capsys: Captured, tmp_path: Path) -> None:
    found = played(capsys, cascade, arrivals="uniform:200")
    assert found["plan"]["networks"] == [2, 4]
    small, large = found["simulated"]["networks"]
    assert (small["used"], small["first"], small["end"]) == (True, 0, 2)
    assert small["answers"] / small["reached"] == pytest.approx(0.75, abs=0.1)
    assert large["reached"] == large["answers"] == small["reached"] - small["answers"]
    assert found["predicted"]["exits"] == {"1": 0.75, "3": 0.25}
    assert run("simulate", cascade, "--arrivals", "uniform:200", "--duration", 2) == 0
    assert "Answers by network" in capsys.readouterr().out
    assert run("plan", cascade, "--json") == 0
    answer = tmp_path / "answer.json"
    answer.write_text(capsys.readouterr().out, encoding="utf-8")
    found = played(capsys, cascade, "--plan", answer, arrivals="uniform:100")
    assert [each["used"] for each in found["simulated"]["networks"]] == [True, True]


def test_a_plan_may_leave_the_small_network_out(cascade: Path, tmp_path: Path, capsys: Captured) -> None:
    plan = tmp_path / "plan.yaml"
    written(plan, ALONE)
    found = played(capsys, cascade, "--plan", plan, arrivals="uniform:100")
    small, large = found["simulated"]["networks"]
    assert (small["used"], small["reached"], small["answers"]) == (False, 0, 0)
    assert large["answers"] == found["simulated"]["answered"]
    assert found["simulated"]["p50_s"] == pytest.approx(0.008)
