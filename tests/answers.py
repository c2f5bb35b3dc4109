"""Helpers that read values of answers."""

from __future__ import annotations

from earlyexit.network.boundary import Answer


def label_of(answer: Answer) -> int:
    """Returns the index of the label, if answers are labels."""
    assert isinstance(answer.value, int)
    return answer.value
