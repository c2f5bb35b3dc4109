from __future__ import annotations

import numpy as np
import pytest

from experiments.live.load import (
    Driven,
    Phase,
    back_at_s,
    check,
    fault,
    figures,
    longest_silence_s,
)
from offramp.client.protocol import Prediction
from offramp.load.report import RequestRecord
from profiles.records import ExitRecords

LABELS = ("negative", "positive")


def request(
    name: str, scheduled_s: float, done_s: float, *answers: tuple[str, int], error: str | None = None
) -> RequestRecord:
    """One that carried inputs 0, 1, ... of the keys."""
    return RequestRecord(
        request_id=name,
        input_indices=tuple(range(2)),
        scheduled_s=scheduled_s,
        sent_s=scheduled_s,
        done_s=done_s,
        num_attempts=1,
        predictions=tuple(Prediction(label=label, score=0.1, exit=left, request_id=name) for label, left in answers),
        error=error,
    )


RIGHT = (("positive", 0), ("negative", 2))


def driven(*records: RequestRecord, num_sent: int | None = None) -> Driven:
    return Driven(
        phase=Phase(name="all", seconds=10.0, keys=("a", "b"), rate_per_s=1.0),
        slo_s=1.0,
        records=records,
        num_sent=len(records) if num_sent is None else num_sent,
        machine=0.5,
    )


def two_inputs() -> ExitRecords:
    """Input a is sure at ramp 0, input b nowhere; ramp 1 would give a wrong label for a."""
    return ExitRecords.of_answers(
        np.column_stack([np.array([[1, 0], [0, 0]]), np.array([1, 0])]),
        score="entropy",
        num_blocks=3,
        ramps=(0, 1),
        sample_ids=("a", "b"),
        scores_NR=np.array([[0.4, 0.2], [0.6, 0.6]], dtype=np.float32),
    )


def test_a_window_counts_what_was_due_in_it_and_what_was_answered_in_it() -> None:
    run = driven(
        request("in time", 0.0, 0.5, *RIGHT),
        request("late", 0.5, 2.5, *RIGHT),
        request("answered in the next window", 1.5, 2.4, *RIGHT),
        request("refused", 1.0, 1.1, error="overloaded"),
        request("silent", 1.2, 5.2, error="timeout"),
        request("due in the next window", 2.0, 2.2, *RIGHT),
    )
    window = figures(run, (0.0, 2.0))
    assert (window.requests, window.answered, window.in_slo) == (5, 3, 2)
    assert window.errors == {"overloaded": 1, "timeout": 1}
    assert window.lost == 1, "a refusal is no loss, silence is"
    # Answered within the first two seconds: one request of two inputs.
    assert window.goodput_per_s == 1.0
    assert window.p50_s == pytest.approx(0.9)  # of 0.5, 0.9 and 2.0
    later = figures(run, (2.0, 4.0))
    assert later.goodput_per_s == 2.0, "two requests of two in two seconds; a third was late"
    nothing = figures(driven(request("refused", 0.0, 0.1, error="overloaded")), (0.0, 1.0))
    assert (nothing.p50_s, nothing.p99_s) == (None, None)


def test_goodput_is_back_in_the_first_whole_second_after_the_event_that_has_it() -> None:
    # Two inputs within the SLO in the second from 1 s on, one request; two requests in the one from 5 s on.
    run = driven(
        request("one", 0.9, 1.2, *RIGHT),
        request("late", 2.0, 4.0, *RIGHT),
        request("two", 5.0, 5.5, *RIGHT),
        request("three", 5.1, 5.6, *RIGHT),
    )
    assert back_at_s(run, 0.5, 2.0) == pytest.approx(0.5)
    assert back_at_s(run, 1.5, 2.0) == pytest.approx(3.5)
    assert back_at_s(run, 0.5, 5.0) is None


def test_the_longest_silence_reaches_to_the_ends_of_the_window() -> None:
    records = [request("one", 0.0, 1.0, *RIGHT), request("two", 0.0, 4.0, *RIGHT)]
    assert longest_silence_s(records, 0.0, 6.0) == 3.0
    assert longest_silence_s(records, 0.0, 9.0) == 5.0


def test_an_answer_is_right_when_some_set_of_ramps_gives_it() -> None:
    records, thresholds = two_inputs(), {0: 0.4, 1: 0.4}
    assert fault(records, 0, 0, 1, thresholds) is None, "float32's 0.4 is within 0.4"
    assert fault(records, 0, 1, 0, thresholds) is None, "with ramp 0 off it leaves at ramp 1, with that ramp's label"
    assert fault(records, 0, 2, 1, thresholds) is None, "with all ramps off"
    assert fault(records, 0, 1, 1, thresholds) == "label 1 after block 1, not 0"
    assert fault(records, 1, 0, 0, thresholds) == "left after block 0, unsure"
    assert fault(records, 1, 2, 1, thresholds) == "label 1 after the whole model, not 0"
    assert fault(records, 0, 1, 0, {0: 0.4}) == "left after block 1, where no ramp is"


def test_a_run_holds_when_everything_sent_has_one_right_outcome() -> None:
    fine = driven(request("one", 0.0, 1.0, *RIGHT), request("two", 0.0, 1.0, error="deadline"))
    assert check(fine, two_inputs(), {0: 0.4}, LABELS).hold
    twice = driven(request("one", 0.0, 1.0, *RIGHT), request("one", 0.0, 1.0, *RIGHT))
    assert check(twice, two_inputs(), {0: 0.4}, LABELS).twice == 1
    missing = driven(request("one", 0.0, 1.0, *RIGHT), num_sent=2)
    assert not check(missing, two_inputs(), {0: 0.4}, LABELS).hold
    wrong = check(driven(request("one", 0.0, 1.0, ("negative", 0), RIGHT[1])), two_inputs(), {0: 0.4}, LABELS)
    assert wrong.wrong == ("a: label 0 after block 0, not 1",)
