from __future__ import annotations

from typing import Any

from deployments.ops.dashboard.state import changes_state


def row(epoch: int, rate_per_s: float | None, *, outcome: str = "in force", **fields: Any) -> dict[str, Any]:
    predicted = {} if rate_per_s is None else {"rate_per_s": rate_per_s, "latency_s": 0.05}
    placed = {"plan": {"predicted": predicted}}
    others = {"at_s": float(epoch), "reason": "period", "words": "because", "gained": None}
    return {"epoch": epoch, "outcome": outcome, "placed": placed} | others | fields


def test_what_was_expected_is_what_the_plan_carries() -> None:
    changes = changes_state([row(3, 125.0), row(3, 500.0, outcome="proposed"), row(1, None)], None)
    assert [change["expected_per_s"] for change in changes] == [125.0, 500.0, None]
    assert [change["expected_latency_s"] for change in changes] == [0.05, 0.05, None]
    assert [change["words"] for change in changes] == ["because"] * 3


def test_what_a_plan_gave_is_what_was_measured_until_it_was_replaced() -> None:
    gained = {"seconds": 60.0, "offered_rps": 90.0, "goodput_rps": 88.5, "dropped": 2}
    [_, replaced] = changes_state([row(2, 100.0), row(1, 80.0, gained=gained)], None)
    assert (replaced["goodput_per_s"], replaced["offered_per_s"], replaced["dropped"]) == (88.5, 90.0, 2)
    assert not replaced["is_present"]


def test_the_plan_in_force_gave_so_far_what_is_observed() -> None:
    observed = {"seconds": 5.0, "rate_per_s": 50.0, "goodput_per_s": 49.0, "drops": {"deadline": 1, "admission": 2}}
    described = {"epoch": 2, "observed": observed}
    [present, before] = changes_state([row(2, 100.0), row(1, 80.0)], described)
    assert (present["is_present"], present["goodput_per_s"], present["dropped"]) == (True, 49.0, 3)
    assert (before["is_present"], before["goodput_per_s"], before["dropped"]) == (False, None, None)


def test_a_plan_that_was_turned_down_gave_nothing() -> None:
    described = {"epoch": 2, "observed": {"goodput_per_s": 49.0}}
    [proposed] = changes_state([row(2, 100.0, outcome="proposed")], described)
    assert (proposed["is_present"], proposed["goodput_per_s"]) == (False, None)


def test_there_are_no_changes_without_a_history() -> None:
    assert changes_state([], None) == []
