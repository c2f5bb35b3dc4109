from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from offramp.client.protocol import Prediction
from offramp.load.report import LoadReport, RequestRecord, render, summarise


def answered(
    scheduled_s: float, latency_s: float, *, label: str = "a", exit_index: int = 0, text: int = 0
) -> RequestRecord:
    return RequestRecord(
        request_id="r",
        input_indices=(text,),
        scheduled_s=scheduled_s,
        sent_s=scheduled_s + 0.002,
        done_s=scheduled_s + latency_s,
        num_attempts=1,
        predictions=(Prediction(label=label, score=0.9, exit=exit_index, request_id="r"),),
    )


def failed(scheduled_s: float, error: str, num_attempts: int = 1) -> RequestRecord:
    return replace(answered(scheduled_s, 0.5), num_attempts=num_attempts, predictions=(), error=error)


def report_of(*records: RequestRecord, slo_s: float = 0.1, offered_rps: float | None = 2.0) -> LoadReport:
    return summarise(
        records, started_at="2026-01-01T00:00:00+00:00", seed=7, slo_s=slo_s, offered_rps=offered_rps, labels=["a", "b"]
    )


def test_percentiles_are_of_a_known_list_in_the_order_of_the_schedule() -> None:
    latency = report_of(*(answered(0.0, float(value)) for value in range(100, -1, -1))).latency
    figures = {"p50_s": 50.0, "p90_s": 90.0, "p95_s": 95.0, "p99_s": 99.0, "max_s": 100.0, "mean_s": 50.0}
    assert latency == pytest.approx(figures)
    report = report_of(answered(2.0, 0.1), answered(1.0, 5.0))
    assert [record.scheduled_s for record in report.records] == [1.0, 2.0]
    stored = json.loads(json.dumps(report.to_json()))
    assert "records" not in stored
    assert stored["latency"]["max_s"] == 5.0
    assert (stored["seed"], stored["schema_version"]) == (7, 1)


def test_rates_count_answers_over_the_whole_run_and_a_late_client_is_to_blame() -> None:
    report = report_of(
        answered(1.0, 0.0625, exit_index=0),
        answered(2.0, 0.125, exit_index=3, text=1),
        answered(3.0, 1.0, exit_index=3),
        failed(3.25, "overloaded", num_attempts=3),
        slo_s=0.125,
    )
    assert report.duration_s == 4.0
    assert report.achieved_rps == 3 / 4
    assert report.goodput_rps == 1 / 4 + 1 / 4
    assert report.answers_by_exit == {0: 1, 3: 2}
    assert report.mean_exit_blocks == (1 + 4 + 4) / 3
    assert report.accuracy == pytest.approx(2 / 3)
    assert report.errors == {"overloaded": 1}
    assert report.num_retries == 2
    assert report.latencies_s.tolist() == [0.0625, 0.125, 1.0]
    assert report_of(answered(1.0, 0.1), slo_s=0.019).is_client_bound
    assert not report_of(answered(1.0, 0.1), slo_s=0.021).is_client_bound
    assert not report_of(answered(1.0, 0.1), slo_s=0.001, offered_rps=None).is_client_bound


@pytest.mark.parametrize(
    ("records", "answers", "error"),
    [
        pytest.param([failed(0.0, "timeout")], "0 of 1 inputs", "timeout: 1", id="none"),
        pytest.param([answered(0.0, 0.0125), failed(1.0, "connection")], "1 of 2 inputs", "connection: 1", id="some"),
    ],
)
def test_a_report_is_printed_with_and_without_answers(records: list[RequestRecord], answers: str, error: str) -> None:
    console = Console(width=100, force_terminal=False)
    with console.capture() as captured:
        console.print(render(report_of(*records)))
    assert answers in captured.get()
    assert error in captured.get()
    assert ("12.5 ms" in captured.get()) == (len(records) == 2)
