"""Helpers that read values of answers."""

from __future__ import annotations

from earlyexit.network.boundary import Answer, ExitResult


def label_of(answer: Answer | ExitResult) -> int:
    """Returns the index of the label, if answers are labels."""
    assert isinstance(answer.value, int)
    return answer.value
