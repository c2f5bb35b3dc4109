from __future__ import annotations

import json
from pathlib import Path

import pytest

from earlyexit.errors import OfframpError
from experiments.peers.tally import Ledger, LoadResult, Outcome, percentile, summarize, write_answers


def ledger_of(*rows: tuple[float, float, float, Outcome]) -> Ledger:
    """Due, taken, ended and outcome of each request."""
    ledger = Ledger()
    for due_s, taken_s, ended_s, outcome in rows:
        ledger.end(ledger.take(due_s, taken_s), outcome, ended_s)
    return ledger


def result_of(ledger: Ledger, counted: list[int]) -> LoadResult:
    return summarize(
        ledger,
        counted,
        duration_s=10.0,
        slo_s=0.5,
        cpu_s=0.02,
        num_retried=1,
        num_waited=2,
        num_connections=3,
    )


@pytest.mark.parametrize(
    ("percent", "value"), [(1, 1), (50, 2), (51, 3), (75, 3), (76, 4), (99, 4), (100, 4)], ids=lambda value: f"{value}"
)
def test_a_percentile_is_the_value_at_the_next_rank(percent: int, value: int) -> None:
    # Of 4 values the rank is percent * 4 / 100, rounded up: 51 % is 2.04, so the third.
    assert percentile([1, 2, 3, 4], percent) == value


def test_the_99th_percentile_of_300_values_leaves_three_above() -> None:
    assert percentile(list(range(1, 301)), 99) == 297


def test_no_values_have_no_percentile() -> None:
    assert percentile([], 50) is None


def test_figures_are_of_counted_requests_and_latency_runs_from_when_they_were_due() -> None:
    ledger = ledger_of(
        (0.0, 0.0, 9.0, 200),  # not counted
        (1.0, 1.25, 1.5, 200),  # 0.5 s: within the SLO, to the point
        (2.0, 2.0, 2.75, 200),  # 0.75 s: too late
        (3.0, 3.0, 3.1, 503),
        (4.0, 4.0, 4.1, 429),
        (5.0, 5.0, 5.1, 500),
        (6.0, 6.0, 6.1, "timeout"),
        (7.0, 7.0, 7.1, 500),
        (8.0, 8.0, 8.25, 200),
    )
    result = result_of(ledger, list(range(1, 9)))
    assert (result.num_sent, result.num_counted, result.num_answered) == (9, 8, 3)
    assert (result.num_refused, result.failed, result.num_failed) == (2, {"status 500": 2, "timeout": 1}, 3)
    assert result.lost_share == 5 / 8
    assert (result.p50_s, result.p90_s, result.p99_s, result.max_s) == (0.5, 0.75, 0.75, 0.75)
    assert result.from_sent_p99_s == 0.75
    assert (result.lateness_p50_s, result.lateness_p99_s) == (0.0, 0.25)
    assert (result.num_within_slo, result.offered_per_s, result.goodput_per_s) == (2, 0.8, 0.2)
    assert result.answered_per_s == 0.3
    assert result.cpu_per_request_s == pytest.approx(0.02 / 9)


def test_where_nothing_is_answered_there_is_no_latency() -> None:
    result = result_of(ledger_of((1.0, 1.0, 1.1, 503)), [0])
    assert (result.p50_s, result.p99_s, result.max_s, result.goodput_per_s) == (None, None, None, 0.0)


def test_requests_are_counted_from_a_time_to_before_another() -> None:
    ledger = ledger_of(*((due_s, due_s, due_s, 200) for due_s in (0.0, 1.0, 2.0, 3.0)))
    assert ledger.between(1.0, 3.0) == [1, 2]


def test_an_answer_after_its_timeout_is_a_timeout() -> None:
    ledger = ledger_of((0.0, 0.0, 1.0, 200), (0.0, 0.0, 1.5, 200), (0.0, 0.0, 1.5, 503))
    ledger.timed_out(1.0)
    assert ledger.outcomes == [200, "timeout", 503]


def test_kept_answers_are_counted_by_label_and_exit_in_every_shape_of_an_answer(tmp_path: Path) -> None:
    ledger = ledger_of(*[(1.0, 1.0, 1.1, 200)] * 3, (1.0, 1.0, 1.1, 503))
    ledger.bodies = {
        0: b'{"label": "yes", "score": 0.5, "exit": 3, "request_id": "r"}',
        1: b'{"predictions": [{"label": "yes", "score": 0.5}, {"label": "no", "score": 0.5}]}',
        2: b'{"outputs": [{"label": "no", "score": 0.5, "exit": 11}], "request_id": "r"}',
    }
    result = result_of(ledger, [0, 1, 2, 3])
    assert result.labels == {"no": 2, "yes": 2}
    assert result.exits == {"11": 1, "3": 1}
    path = tmp_path / "answers.jsonl"
    write_answers(path, ledger, [1, 2, 3], num_bodies=2)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["body"] for line in lines] == [1, 0]
    assert [row["label"] for line in lines for row in line["predictions"]] == ["yes", "no", "no"]


def test_an_answer_that_is_no_prediction_is_an_error() -> None:
    ledger = ledger_of((1.0, 1.0, 1.1, 200))
    ledger.bodies = {0: b"<html>"}
    with pytest.raises(OfframpError, match="not a prediction"):
        result_of(ledger, [0])


def test_a_result_goes_through_a_line_of_json() -> None:
    result = result_of(ledger_of((1.0, 1.0, 1.1, 200)), [0])
    assert "\n" not in result.model_dump_json()
    assert LoadResult.model_validate_json(result.model_dump_json()) == result
