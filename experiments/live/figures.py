"""From request records to figures: windows, goodput over time, and whether every answer is right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from experiments.live.load import Driven
from offramp.load.report import RequestRecord
from profiles.records import ExitRecords
from profiles.scores import SCORES

LOST = ("timeout", "connection")
"""Errors that no server explained."""
Span = tuple[float, float]
"""From one second up to another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowFigures:
    """A window of a run. Rates count inputs that were answered in the window, the rest requests that were due in it."""

    seconds: float
    requests: int
    answered: int
    """Requests."""
    in_slo: int
    """Requests."""
    answers_per_s: float
    goodput_per_s: float
    p50_s: float | None
    p99_s: float | None
    errors: Mapping[str, int]

    @property
    def lost(self) -> int:
        """Requests without an answer and without a word why."""
        return sum(self.errors.get(kind, 0) for kind in LOST)


def figures(driven: Driven, *spans: Span) -> WindowFigures:
    """Of several windows together; what they share counts once."""
    apart = united(spans)
    due = [record for record in driven.records if _within(record.scheduled_s, apart)]
    done = [record for record in driven.records if record.error is None and _within(record.done_s, apart)]
    latencies_s = [record.latency_s for record in due if record.error is None]
    p50_s, p99_s = np.percentile(latencies_s, [50, 99]).tolist() if latencies_s else (None, None)
    seconds = sum(until_s - since_s for since_s, until_s in apart)
    return WindowFigures(
        seconds=seconds,
        requests=len(due),
        answered=len(latencies_s),
        in_slo=sum(latency_s <= driven.slo_s for latency_s in latencies_s),
        answers_per_s=sum(len(record.predictions) for record in done) / seconds,
        goodput_per_s=sum(len(record.predictions) for record in done if record.latency_s <= driven.slo_s) / seconds,
        p50_s=p50_s,
        p99_s=p99_s,
        errors=dict(Counter(record.error for record in due if record.error is not None)),
    )


def united(spans: Sequence[Span]) -> list[Span]:
    """The same seconds in windows that do not overlap."""
    apart: list[Span] = []
    for since_s, until_s in sorted(spans):
        if apart and since_s <= apart[-1][1]:
            apart[-1] = (apart[-1][0], max(apart[-1][1], until_s))
        else:
            apart.append((since_s, until_s))
    return apart


def between(spans: Sequence[Span], since_s: float, until_s: float) -> list[Span]:
    """What windows leave of a longer one."""
    apart = united(spans)
    starts = [since_s, *(end_s for _, end_s in apart)]
    ends = [*(start_s for start_s, _ in apart), until_s]
    gaps = [(max(start, since_s), min(end, until_s)) for start, end in zip(starts, ends, strict=True)]
    return [(start, end) for start, end in gaps if end > start]


def goodput_bins(driven: Driven, bin_s: float) -> list[float]:
    """Goodput per second in bins of so many seconds, whole ones only, up to the end of the last phase."""
    counts = np.zeros(int(driven.seconds / bin_s))
    for record in driven.records:
        index = int(record.done_s / bin_s)
        if record.error is None and record.latency_s <= driven.slo_s and index < len(counts):
            counts[index] += len(record.predictions)
    return [float(count) / bin_s for count in counts]


def back_at_s(bins: Sequence[float], bin_s: float, since_s: float, goodput_per_s: float) -> float | None:
    """Seconds from `since_s` to the start of the first later bin that reaches a goodput; None where none does."""
    first = int(np.ceil(since_s / bin_s))
    return next((k * bin_s - since_s for k in range(first, len(bins)) if bins[k] >= goodput_per_s), None)


def longest_silence_s(records: Sequence[RequestRecord], since_s: float, until_s: float) -> float:
    """The longest stretch of a window in which nothing was answered."""
    answered_s = [r.done_s for r in records if r.error is None and since_s <= r.done_s < until_s]
    return float(np.diff([since_s, *sorted(answered_s), until_s]).max())


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """Whether everything sent has exactly one outcome, and every answer is one that the records can give."""

    sent: int
    outcomes: int
    twice: int
    """Request ids with two outcomes."""
    wrong: tuple[str, ...]
    """Answers that no plan's ramps could have given, in words."""

    @property
    def hold(self) -> bool:
        return self.sent == self.outcomes and not self.twice and not self.wrong


def check(driven: Driven, records: ExitRecords, thresholds: Mapping[int, float], label_names: Sequence[str]) -> Checks:
    """Check a run; `thresholds` are the loosest of all plans that were in force."""
    ids = [record.request_id for record in driven.records]
    row_of = {sample_id: row for row, sample_id in enumerate(records.sample_ids)}
    wrong = []
    for record in driven.records:
        for index, answer in zip(record.input_indices, record.predictions, strict=False):
            label = label_names.index(answer.label)
            said = fault(records, row_of[driven.keys[index]], answer.exit, label, thresholds)
            if said is not None:
                wrong.append(f"{driven.keys[index]}: {said}")
    return Checks(sent=driven.num_sent, outcomes=len(ids), twice=len(ids) - len(set(ids)), wrong=tuple(wrong))


def fault(records: ExitRecords, row: int, left_after: int, label: int, thresholds: Mapping[int, float]) -> str | None:
    """What is wrong with an answer, by the records; None where some set of active ramps gives it."""
    if left_after == records.num_blocks - 1:
        right = int(records.answers()[row, -1])
        return None if label == right else f"label {label} after the whole model, not {right}"
    if left_after not in records.ramps or left_after not in thresholds:
        return f"left after block {left_after}, where no ramp is"
    column = records.ramps.index(left_after)
    limit = np.float32(thresholds[left_after] * SCORES[records.score].direction)  # as policies compare
    if records.sureness_NR[row, column] < limit:
        return f"left after block {left_after}, unsure"
    right = int(records.answers()[row, column])
    return None if label == right else f"label {label} after block {left_after}, not {right}"


def _within(at_s: float, spans: Sequence[Span]) -> bool:
    return any(since_s <= at_s < until_s for since_s, until_s in spans)
