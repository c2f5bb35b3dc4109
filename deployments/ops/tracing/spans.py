"""Records of a sampled request, on the ingress's clock, and the spans that are made of them. Pure.

The children of a span fill it without gaps, so the times of a request add up to its latency. An ingress and a stage
share no clock: the stage reports durations, and the rest of a call is its hop. How a hop divides into the way there and
the way back is unknown; one half is put before the stage's own time, and one half after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from deployments.wire.messages import SplitRun, Timing

Attributes = Mapping[str, str | int]
MOST_INPUTS = 16
"""How many inputs of a request have spans: the slowest, which determine its latency."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A visit of an input to a stage."""

    slot: str
    replica: str
    epoch: int
    attempt: int
    """Counts from 0."""
    block: int
    """The block that it runs next."""
    tokens: int = 1
    """Its length in tokens."""
    crosses: bool = False
    """Whether it was encoded again for the next network of a chain."""
    call_inputs: int
    """The number of inputs of its call."""
    at_s: float
    ended_s: float = math.inf
    """Infinite while the input is under way."""
    timing: Timing | None = None
    """How the time inside the stage was spent; None if the input did not come back."""
    runs: tuple[SplitRun, ...] = ()
    exit: int | None = None
    """The block after which the input left; None if it goes on or was lost."""
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class InputRecord:
    """One input of a sampled request."""

    submitted_s: float
    visits: list[Visit] = field(default_factory=list)
    under_way: Visit | None = None

    def end(self, now_s: float, **how: Any) -> None:
        """Records that it came back, or was lost; `how`: further fields of its `Visit`."""
        if self.under_way is not None:
            self.visits.append(replace(self.under_way, ended_s=now_s, **how))
            self.under_way = None

    def went_on(self, attempt: int) -> bool:
        """Returns whether a stage sent it on in this attempt."""
        if not self.visits or self.visits[-1].attempt != attempt:
            return False
        return self.visits[-1].exit is None and self.visits[-1].error is None

    @property
    def answered(self) -> bool:
        return bool(self.visits) and self.visits[-1].exit is not None

    def ended_s(self, request_ended_s: float) -> float:
        """Returns when it was answered, or else given up."""
        return self.visits[-1].ended_s if self.answered else request_ended_s


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A sampled request."""

    root: Any
    """The SDK's span of the whole request."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of the response that name the trace: W3C's `traceparent`, and `tracestate` if the caller sent one."""
    began_s: float
    ahead_s: float = 0.0
    """By how much the wall clock was ahead of the ingress's clock at its start."""
    serials: list[int] = field(default_factory=list)
    inputs: list[InputRecord] = field(default_factory=list)

    def ns(self, at_s: float) -> int:
        """Converts a time of the ingress's clock to nanoseconds since 1970."""
        return round((at_s + self.ahead_s) * 1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named period, and the spans inside it."""

    name: str
    begin_s: float
    end_s: float
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    children: tuple[Span, ...] = ()
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


def request_spans(record: RequestRecord, ended_s: float) -> tuple[Span, ...]:
    """Returns the spans of a request: preparation until its inputs are submitted, the inputs, and the reply."""
    if not record.inputs:  # refused
        return (Span(name="prepare", begin_s=record.began_s, end_s=ended_s),)
    submitted_s = record.inputs[0].submitted_s
    answered_s = max(each.ended_s(ended_s) for each in record.inputs)
    return (
        Span(name="prepare", begin_s=record.began_s, end_s=submitted_s),
        *_slowest(record.inputs, ended_s),
        Span(name="reply", begin_s=answered_s, end_s=ended_s),
    )


def _slowest(inputs: Sequence[InputRecord], ended_s: float) -> Iterator[Span]:
    order = sorted(range(len(inputs)), key=lambda position: -inputs[position].ended_s(ended_s))
    for position in sorted(order[:MOST_INPUTS]):
        yield _input(position, inputs[position], ended_s)


def _input(position: int, record: InputRecord, request_ended_s: float) -> Span:
    ended_s = record.ended_s(request_ended_s)
    attributes: dict[str, str | int | float | bool] = {"offramp.input": position}
    if record.answered:
        attributes["offramp.exit"] = record.visits[-1].exit or 0
    return Span(
        name="input",
        begin_s=record.submitted_s,
        end_s=ended_s,
        attributes=attributes,
        children=tuple(_way(record, ended_s)),
        error=None if record.answered else "no answer",
    )


def _way(record: InputRecord, ended_s: float) -> Iterator[Span]:
    """Yields the waits before visits, and the visits."""
    visits = list(record.visits)
    if record.under_way is not None:  # it is no longer awaited
        visits.append(replace(record.under_way, ended_s=ended_s, error="given up"))
    at_s = record.submitted_s
    for visit in visits:
        if visit.at_s > at_s or at_s == record.submitted_s:
            yield _before(visit, at_s)
        yield _stage(visit)
        at_s = visit.ended_s
    if ended_s > at_s:
        yield Span(name="queue", begin_s=at_s, end_s=ended_s)


def _before(visit: Visit, since_s: float) -> Span:
    """Returns the span before an input was sent: it was encoded for the next network, or waited."""
    if visit.crosses:
        attributes = {"offramp.block": visit.block, "offramp.tokens": visit.tokens}
        return Span(name="crossing", begin_s=since_s, end_s=visit.at_s, attributes=attributes)
    return Span(name="queue", begin_s=since_s, end_s=visit.at_s)


def _stage(visit: Visit) -> Span:
    attributes: dict[str, str | int | float | bool] = {
        "offramp.slot": visit.slot,
        "offramp.replica": visit.replica,
        "offramp.plan_epoch": visit.epoch,
        "offramp.attempt": visit.attempt + 1,
        "offramp.block": visit.block,
        "offramp.call_inputs": visit.call_inputs,
    }
    if visit.exit is not None:
        attributes["offramp.exit"] = visit.exit
    children: tuple[Span, ...] = ()
    if visit.timing is not None:
        attributes["offramp.queue_s"] = visit.timing.queue_s
        attributes["offramp.compute_s"] = visit.timing.compute_s
        attributes["offramp.hop_s"] = _hop_s(visit)
        children = tuple(_inside(visit))
    return Span(
        name=f"stage {visit.slot}",
        begin_s=visit.at_s,
        end_s=visit.ended_s,
        attributes=attributes,
        children=children,
        error=visit.error,
    )


def _hop_s(visit: Visit) -> float:
    """Returns the duration of a hop; at least 0, because clocks of two machines may run at different speeds."""
    assert visit.timing is not None
    return max(0.0, visit.ended_s - visit.at_s - visit.timing.queue_s - visit.timing.compute_s)


def _inside(visit: Visit) -> Iterator[Span]:
    half_s = _hop_s(visit) / 2
    at_s = visit.at_s + half_s
    yield Span(name="hop", begin_s=visit.at_s, end_s=at_s)
    for name, seconds, attributes in _times(visit):
        yield Span(name=name, begin_s=at_s, end_s=at_s + seconds, attributes=attributes)
        at_s += seconds
    yield Span(name="hop", begin_s=at_s, end_s=at_s + half_s)


def _times(visit: Visit) -> Iterator[tuple[str, float, Mapping[str, int]]]:
    assert visit.timing is not None
    if not visit.runs:
        yield "stage queue", visit.timing.queue_s, {}
        yield "compute", visit.timing.compute_s, {}
    for run in visit.runs:
        yield "stage queue", run.queue_s, {}
        yield f"split {run.first} to {run.end - 1}", run.compute_s, _run_attributes(run)


def _run_attributes(run: SplitRun) -> Mapping[str, int]:
    return {
        "offramp.first_block": run.first,
        "offramp.end_block": run.end,
        "offramp.batch": run.batch,
        "offramp.batch_tokens": run.tokens,
        "offramp.target_batch": run.target,
    }
