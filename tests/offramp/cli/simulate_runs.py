"""A problem and a plan that are simulated, and what `offramp simulate` says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.cli.app import main
from profiles.records import ExitRecords

Captured = pytest.CaptureFixture[str]
PROBLEM = """\
blocks: 2
ramps: [0]
survival: [1.0, 0.5]
latency:
  V100: {batch: [1, 2, 4], block_s: [[0.001, 0.001, 0.001], [0.001, 0.001, 0.001]], ramp_s: [[0.0, 0.0, 0.0]]}
devices:
  V100: {count: 1, usd_per_hour: 3}
link: {bandwidth_bytes_per_s: 1.0e9}
bytes_per_sample: 0
slo: {latency_s: 0.1, slack: 0.2}
objective: {maximize: rate}
"""
"""A block takes 1 ms at any batch. Without exits 4 inputs take 2 ms: 2000/s on the one device."""
PLAN = """\
stages:
  - {device: V100, replicas: 1, splits: [{first: 0, end: 1, batch: 4, ramps: [0]}, {first: 1, end: 2, batch: 4}]}
policy: {name: entropy, thresholds: 0.4}
"""


def written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def records(path: Path, *scores: float, num_blocks: int = 2, ramps: tuple[int, ...] = (0,)) -> Path:
    """Entropies of as many inputs, the same at every ramp, which answer 0, 1, 0, 1, ... from ramp to ramp."""
    num, labels_R = len(scores), np.arange(len(ramps)) % 2
    found = ExitRecords.of_answers(
        np.column_stack([np.repeat(labels_R[None, :], num, axis=0), np.zeros(num, dtype=np.int64)]),
        score="entropy",
        num_blocks=num_blocks,
        ramps=ramps,
        sample_ids=tuple(map(str, range(num))),
        scores_NR=np.repeat(np.array(scores, dtype=np.float32)[:, None], len(ramps), axis=1),
    )
    found.save(path)
    return path


def status(*arguments: object) -> int:
    """The exit status of a command."""
    with pytest.raises(SystemExit) as ended:
        main([str(argument) for argument in arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def played(captured: Captured, problem: Path, *options: object, arrivals: str = "uniform:100") -> Any:
    """The JSON of two seconds, of which the first is not counted."""
    assert status("simulate", problem, "--arrivals", arrivals, "--duration", 2, *options, "--json") == 0
    found = captured.readouterr()
    assert found.err == ""
    return json.loads(found.out)


def refused(captured: Captured, problem: Path, *options: object, arrivals: str = "uniform:100") -> str:
    """What the command says as it refuses its input: one line."""
    assert status("simulate", problem, "--arrivals", arrivals, *options) == 2
    found = captured.readouterr()
    [line] = found.err.splitlines()
    assert found.out == ""
    assert isinstance(line, str)
    return line.removeprefix("offramp: ")
