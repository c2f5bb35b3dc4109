from __future__ import annotations

import pytest

from earlyexit.network.boundary import Budget, Split


@pytest.mark.parametrize(
    ("ramps", "expected"),
    [
        pytest.param((), [(2, 6, None)], id="no ramps"),
        pytest.param((3,), [(2, 4, 3), (4, 6, None)], id="inside"),
        pytest.param((5,), [(2, 6, 5)], id="at the end"),
        pytest.param((2, 3, 5), [(2, 3, 2), (3, 4, 3), (4, 6, 5)], id="several"),
    ],
)
def test_segments_end_at_active_ramps(ramps: tuple[int, ...], expected: list[tuple[int, int, int | None]]) -> None:
    segments = Split(first=2, end=6, batch=1, ramps=ramps).segments()
    assert [(segment.first, segment.end, segment.ramp) for segment in segments] == expected


@pytest.mark.parametrize(
    ("tokens", "num_inputs", "num_tokens", "more", "expected"),
    [
        pytest.param(None, 3, 900, 900, True, id="inputs alone"),
        pytest.param(None, 4, 4, 1, False, id="as many inputs as it takes"),
        pytest.param(10, 2, 7, 3, True, id="exactly full"),
        pytest.param(10, 2, 7, 4, False, id="one token too many"),
        pytest.param(10, 0, 0, 11, True, id="a larger one, alone"),
    ],
)
def test_a_budget_has_room_while_inputs_and_tokens_fit(
    tokens: int | None, num_inputs: int, num_tokens: int, more: int, expected: bool
) -> None:
    budget = Split(first=0, end=2, batch=4, tokens=tokens).budget
    assert budget == Budget(inputs=4, tokens=tokens)
    assert budget.room_for(num_inputs, num_tokens, more) == expected
