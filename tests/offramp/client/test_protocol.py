from __future__ import annotations

import pytest

from earlyexit.errors import (
    DeadlineError,
    ExecutionError,
    InputError,
    OfframpError,
    OverloadedError,
    PlanError,
    StageUnavailableError,
    UnknownModelError,
    UnprocessableInputError,
)
from offramp.client.protocol import ERRORS_BY_KIND, NoReply, Reply, error_of, read_predictions, read_reply, retry_wait_s


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (400, "input", InputError),
        (404, "unknown_model", UnknownModelError),
        (418, "teapot", InputError),
        (422, "plan", PlanError),
        (422, "", UnprocessableInputError),
        (500, "execution", ExecutionError),
        (500, "", OfframpError),
        (502, "", OfframpError),
        (503, "stage_unavailable", StageUnavailableError),
        (503, "overloaded", OverloadedError),
        (503, "", OverloadedError),
        (504, "deadline", DeadlineError),
        (504, "", DeadlineError),
    ],
)
def test_an_error_answer_becomes_the_error_the_server_raised(
    status: int, kind: str, expected: type[OfframpError]
) -> None:
    error = error_of(Reply(status=status, payload={"error": {"kind": kind, "message": "why"}}))
    assert type(error) is expected
    assert str(error) == "why"


def test_the_kinds_are_those_that_the_error_tree_gives_its_classes() -> None:
    assert {kind: cls("").kind for kind, cls in ERRORS_BY_KIND.items()} == {kind: kind for kind in ERRORS_BY_KIND}


@pytest.mark.parametrize(
    ("retry_after", "expected_s"), [("2", 2.0), ("0.5", 0.5), ("Wed, 21 Oct 2026 07:28:00 GMT", None), (None, None)]
)
def test_retry_after_counts_only_in_seconds(retry_after: str | None, expected_s: float | None) -> None:
    assert read_reply(503, b"", retry_after).retry_after_s == expected_s


def test_the_backoff_does_not_grow_beyond_its_longest() -> None:
    refused = NoReply(kind="connection", message="refused")
    assert retry_wait_s(refused, attempt=20, max_attempts=99, left_s=60.0, jitter=1.0) == 2.0
    assert retry_wait_s(refused, attempt=20, max_attempts=99, left_s=2.0, jitter=1.0) is None


@pytest.mark.parametrize("payload", ["<html>", {"label": "a"}, {"outputs": []}, {"outputs": 3}, None, [1]])
def test_an_answer_that_is_no_prediction_is_an_error(payload: object) -> None:
    with pytest.raises(OfframpError, match="the server"):
        read_predictions(payload, num_inputs=1, request_id="r")
