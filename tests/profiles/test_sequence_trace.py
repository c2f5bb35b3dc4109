from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from profiles.lengths import GROUPS, grouped, read_sequences

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "azure.csv"
    path.write_bytes("\r\n".join(lines).encode() + b"\r\n")
    return path


def test_sequences_are_read_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, "2023-11-16 18:17:03.97,4808,10", "2023-11-16 18:17:04.03,3180,8")
    assert read_sequences(path) == ((4808, 10), (3180, 8))


def test_many_lengths_become_few_of_nearly_the_same_mean() -> None:
    tokens = np.random.default_rng(0).geometric(0.005, 5000)
    few = grouped(tokens.tolist())
    assert few.shares is not None
    assert len(few.shares) <= GROUPS
    assert few.mean == pytest.approx(tokens.mean(), rel=0.01)
    assert grouped([7, 7, 9]).shares == ((7, 2 / 3), (9, 1 / 3))


@pytest.mark.skipif("OFFRAMP_DATA" not in os.environ, reason="the published traces are not here")
def test_the_published_traces_are_read() -> None:
    folder = Path(os.environ["OFFRAMP_DATA"]) / "traces"
    found = {name: read_sequences(folder / f"AzureLLMInferenceTrace_{name}.csv") for name in ("code", "conv")}
    assert {name: len(pairs) for name, pairs in found.items()} == {"code": 8819, "conv": 19366}
    assert np.median(np.array(found["conv"]), axis=0).tolist() == [1020, 129]
