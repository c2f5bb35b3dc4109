from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from profiles.lengths import GROUPS, Lengths, grouped, read_lengths, read_sequences


def mean_filled(lengths_N: list[int], budget: int) -> float:
    """Returns the mean fill of batches that are filled one after the other."""
    batches, held = [], 0
    for tokens in lengths_N:
        if held and held + tokens > budget:
            batches.append(held)
            held = 0
        held += tokens
    return float(np.mean(batches))


def test_lengths_have_a_mean_and_bounds_also_if_stretched() -> None:
    lengths = Lengths.of([2, 2, 8])
    assert lengths.mean == pytest.approx(4.0)
    assert (lengths.shortest, lengths.longest) == (2, 8)
    assert lengths == Lengths.weighted({8: 1, 2: 2})
    lengths = Lengths(mean=7.5)
    assert (lengths.filled(100), lengths.shortest, lengths.longest) == (100.0, 1, None)
    lengths = Lengths.of([10, 10, 40])
    assert lengths.stretched(40.0, most=512) == Lengths.of([20, 20, 80])
    assert lengths.stretched(40.0, most=50) == Lengths.of([20, 20, 50])
    assert Lengths(mean=3.0).stretched(9.5, most=512) == Lengths(mean=9.5)


def test_one_or_two_lengths_fill_a_budget_as_counted_by_hand() -> None:
    lengths = Lengths.of([30])
    assert [lengths.filled(budget) for budget in (10, 30, 89, 90)] == [30.0, 30.0, 60.0, 90.0]
    # Of 1 and 2 in equal parts, budget 2. After a first 1, another 1 fits, or a 2 begins the next batch. After a first
    # 2, anything begins the next.
    filled = Lengths.weighted({1: 0.5, 2: 0.5}).filled(2)
    first = np.linalg.matrix_power(np.array([[0.25, 0.75], [0.5, 0.5]]), 50)[0]
    assert filled == pytest.approx(first @ [0.5 * 2 + 0.5 * 1, 2.0])
    # Every other input runs alone. Between two of them are n short inputs, at most 170, with probability 1 / 2^(n + 1).
    lengths = Lengths.weighted({12: 0.5, 1_000_000: 0.5})
    short = sum((12 * n) / 2 ** (n + 1) for n in range(1, 60))
    assert lengths.filled(2048) == pytest.approx((1_000_000 + short) / 1.5, rel=1e-9)


@pytest.mark.parametrize("budget", [5, 40, 100, 250, 1000])
def test_the_expected_tokens_of_a_batch_are_those_of_simulated_batches(budget: int) -> None:
    rng = np.random.default_rng(4)
    kinds = np.concatenate([rng.integers(3, 20, 40), rng.integers(60, 120, 10)])
    expected = Lengths.of(kinds.tolist()).filled(budget)
    assert expected == pytest.approx(mean_filled(rng.choice(kinds, 60_000).tolist(), budget), rel=0.01)


def test_lengths_with_a_common_divisor_fill_far_larger_budgets_as_their_quotients_do() -> None:
    # Sums of 70 and 126 are multiples of 14, so 5 of 18,009 tokens are never filled.
    filled = Lengths.weighted({70: 0.3, 126: 0.7}).filled(18_009)
    assert filled == pytest.approx(14 * Lengths.weighted({5: 0.3, 9: 0.7}).filled(1286))
    drawn = np.random.default_rng(5).choice([70, 126], 400_000, p=[0.3, 0.7]).tolist()
    assert 18_009 - filled == pytest.approx(18_009 - mean_filled(drawn, 18_009), abs=2.0)


def test_lengths_are_read_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("12\n\n7\n30\n", encoding="utf-8-sig")
    assert read_lengths(path).tolist() == [12, 7, 30]


HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, *lines: str) -> Path:
    path = folder / "azure.csv"
    path.write_bytes("\r\n".join(lines).encode() + b"\r\n")
    return path


def test_sequences_are_read_in_their_order(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER, "2023-11-16 18:17:03.97,4808,10", "2023-11-16 18:17:04.03,3180,8")
    assert read_sequences(path) == ((4808, 10), (3180, 8))


def test_many_lengths_are_reduced_to_few_of_nearly_the_same_mean() -> None:
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
