"""The last plan changes: what each was expected to give, and what it gave. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IN_FORCE = "in force"


def changes_state(history: Sequence[Mapping[str, Any]], described: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Newest first, as the history is; the plan in force has no figures of its own yet, so those observed are its."""
    return [_change(row, _before(history, index), described) for index, row in enumerate(history)]


def _before(history: Sequence[Mapping[str, Any]], index: int) -> Mapping[str, Any] | None:
    """The plan that was in force until then."""
    return next((row for row in history[index + 1 :] if row["outcome"] == IN_FORCE), None)


def _change(
    row: Mapping[str, Any], before: Mapping[str, Any] | None, described: Mapping[str, Any] | None
) -> dict[str, Any]:
    predicted = _predicted(row)
    expected = predicted.get("rate_per_s")
    is_present = row["outcome"] == IN_FORCE and described is not None and described.get("epoch") == row["epoch"]
    gained = _so_far(described) if is_present and row["gained"] is None else _measured(row["gained"])
    return {
        "epoch": row["epoch"],
        "at_s": row["at_s"],
        "outcome": row["outcome"],
        "is_present": is_present,
        "reason": row["reason"],
        "words": row["words"],
        "expected_per_s": expected,
        "expected_latency_s": predicted.get("latency_s"),
        "expected_gain": _gain(expected, None if before is None else _predicted(before).get("rate_per_s")),
        **gained,
    }


def _predicted(row: Mapping[str, Any]) -> Mapping[str, Any]:
    predicted: Mapping[str, Any] = row["placed"].get("plan", {}).get("predicted") or {}
    return predicted


def _measured(gained: Mapping[str, Any] | None) -> dict[str, Any]:
    measured = gained or {}
    return {
        "goodput_per_s": measured.get("goodput_rps"),
        "offered_per_s": measured.get("offered_rps"),
        "dropped": measured.get("dropped"),
        "seconds": measured.get("seconds"),
    }


def _so_far(described: Mapping[str, Any] | None) -> dict[str, Any]:
    observed = (described or {}).get("observed") or {}
    return {
        "goodput_per_s": observed.get("goodput_per_s"),
        "offered_per_s": observed.get("rate_per_s"),
        "dropped": sum((observed.get("drops") or {}).values()),
        "seconds": observed.get("seconds"),
    }


def _gain(now: float | None, before: float | None) -> float | None:
    """Share by which one rate is above another; None where one is not known."""
    return now / before - 1 if now is not None and before else None
