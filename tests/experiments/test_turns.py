from __future__ import annotations

from functools import partial

import pytest

from experiments.turns import Figures, in_turns, tell


def test_every_side_is_measured_once_a_round_and_another_one_first_each_time() -> None:
    log: list[str] = []

    def measure(name: str) -> Figures:
        log.append(name)
        return {"s": float(len(log))}

    found = in_turns({name: partial(measure, name) for name in "abc"}, 2)
    assert "".join(log) == "abcbcacab", "the first round only warms up"
    assert found == {"a": {"s": [6.0, 8.0]}, "b": {"s": [4.0, 9.0]}, "c": {"s": [5.0, 7.0]}}


def test_ratios_are_taken_within_rounds_before_their_median(capsys: pytest.CaptureFixture[str]) -> None:
    # The ratio of the medians would be 30 / 10; a figure that only the other side has is left out.
    tell("", {"old": {"s": [10.0, 20.0, 5.0]}, "new": {"s": [30.0, 40.0, 5.0], "t": [1.0]}})
    words = capsys.readouterr().out.split()
    assert words[-7:] == ["s", "new", "30", "2", "(1", "to", "3)"]
    assert "t" not in words
