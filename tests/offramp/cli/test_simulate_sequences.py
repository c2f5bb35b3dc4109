"""`offramp simulate` of a problem whose inputs are steps of sequences."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.offramp.cli import runs
from tests.offramp.cli.runs import Captured, printed, run, written

PROBLEM = (
    runs.PROBLEM.replace("slo: {latency_s: 0.1, slack: 0.2}\n", "")
    + """\
generation:
  lengths: azure.csv
  tpot_s: 0.1
  ttft_s: 1.0
  chunk: 4
"""
)
"""A block takes 1 ms at any batch, up to four tokens."""
TRACE = "TIMESTAMP,ContextTokens,GeneratedTokens\nx,4,3\nx,2,5\n"
ONE_BY_ONE = ("--arrivals", "uniform:10", "--duration", 2, "--warm-up", 0, "--strategy", "stock")


@pytest.fixture
def problem(tmp_path: Path) -> Path:
    written(tmp_path / "azure.csv", TRACE)
    return written(tmp_path / "problem.yaml", PROBLEM)


def test_sequences_have_the_lengths_of_their_trace_in_turn(problem: Path, capsys: Captured) -> None:
    found = printed(capsys, "simulate", problem, *ONE_BY_ONE)
    simulated = found["simulated"]
    assert (simulated["sequences"], simulated["whole"], simulated["in_slo"], simulated["refused"]) == (20, 20, 20, 0)
    assert simulated["exits"] == {"1": 10 * (3 + 5)}
    times = [simulated[name] for name in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")]
    assert times == pytest.approx([0.002] * 4)
    assert found["predicted_sequences"]["tokens_per_s"] > 0
    assert found["slo_s"] == 0.1
    assert run("simulate", problem, *ONE_BY_ONE[:-1], "early-exit") == 0
    said = capsys.readouterr().out
    assert "20 sequences" in said
    assert "per token p50" in said
    assert "Tokens by exit" in said


def test_what_takes_too_long_is_refused_or_counted(problem: Path, capsys: Captured) -> None:
    written(problem, PROBLEM.replace("ttft_s: 1.0", "ttft_s: 0.02"))
    busy = ("--arrivals", "uniform:800", *ONE_BY_ONE[2:])
    kept = printed(capsys, "simulate", problem, *busy)["simulated"]
    unrefused = printed(capsys, "simulate", problem, *busy, "--no-admission")["simulated"]
    assert (kept["refused"] > 0, unrefused["refused"], unrefused["whole"]) == (True, 0, 1600)
    assert unrefused["ttft_p99_s"] > kept["ttft_p99_s"]
