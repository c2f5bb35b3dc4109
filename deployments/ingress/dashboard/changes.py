"""The last plan changes: what each was expected to give, and what it gave. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IN_FORCE = "in force"


def changes_state(history: Sequence[Mapping[str, Any]], described: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """Newest first, as the history is; the plan in force has no figures of its own yet, so those observed are its."""
    return [_change(row, described) for row in history]


def _change(row: Mapping[str, Any], described: Mapping[str, Any] | None) -> dict[str, Any]:
    """What it was expected to gain is in the verdict's words: plans before were predicted for another survival."""
    predicted = row["placed"].get("plan", {}).get("predicted") or {}
    is_present = row["outcome"] == IN_FORCE and described is not None and described.get("epoch") == row["epoch"]
    gained = _so_far(described) if is_present and row["gained"] is None else _measured(row["gained"])
    return {
        "epoch": row["epoch"],
        "at_s": row["at_s"],
        "outcome": row["outcome"],
        "is_present": is_present,
        "reason": row["reason"],
        "words": row["words"],
        "expected_per_s": predicted.get("rate_per_s"),
        "expected_latency_s": predicted.get("latency_s"),
        **gained,
    }


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
