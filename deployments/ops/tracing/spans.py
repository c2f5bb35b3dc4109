"""What is noted of a sampled request, on the ingress's clock, and the spans that follow from it. Pure.

Spans that lie one behind the other fill the span they belong to, so the times of a request add up to its latency. An
ingress and a stage share no clock: the stage tells durations, and what is left of a call is its hop. How much of a hop
was the way there and how much the way back is unknown; half of it is put before the stage's own time, half behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.wire.messages import SplitRun, Timing

Attributes = Mapping[str, str | int]
MOST_INPUTS = 16
"""Of a request with many inputs the slowest have spans: its latency is theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """An input on its way through a stage."""

    slot: str
    replica: str
    epoch: int
    attempt: int
    """Counts from 0."""
    block: int
    """Where it stands in the model."""
    tokens: int = 1
    """Its length, as the network has it."""
    crosses: bool = False
    """Whether it was encoded anew, for a network that another let it go on to."""
    call_inputs: int
    """Inputs of the call that it went with."""
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A way through a stage, with its end."""

    sent: Sent
    ended_s: float
    timing: Timing | None = None
    """Where the time inside the stage went; None where it did not come back."""
    runs: tuple[SplitRun, ...] = ()
    exit: int | None = None
    """The block that the input left after; None where it goes on or was lost."""
    error: str | None = None


@dataclass(slots=True, kw_only=True)
class InputRecord:
    """One input of a sampled request."""

    submitted_s: float
    visits: list[Visit] = field(default_factory=list)
    under_way: Sent | None = None

    def end(self, visit: Visit) -> None:
        """It came back, or will not."""
        self.visits.append(visit)
        self.under_way = None

    def went_on(self, attempt: int) -> bool:
        """Whether it came back from a stage of this attempt, to go on."""
        if not self.visits or self.visits[-1].sent.attempt != attempt:
            return False
        return self.visits[-1].exit is None and self.visits[-1].error is None

    @property
    def answered(self) -> bool:
        return bool(self.visits) and self.visits[-1].exit is not None

    def ended_s(self, request_ended_s: float) -> float:
        """When it got its answer, else when it was given up."""
        return self.visits[-1].ended_s if self.answered else request_ended_s


@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """A sampled request."""

    root: Any
    """What the exporter made of its begin."""
    began_s: float
    serials: list[int] = field(default_factory=list)
    inputs: list[InputRecord] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A named stretch of time, and what lies inside it."""

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
    """What lies inside a request: what comes before its inputs are submitted, the inputs, the reply."""
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
    """Waiting to be sent and visits, in turns."""
    visits = list(record.visits)
    if record.under_way is not None:  # it is no longer awaited
        visits.append(Visit(sent=record.under_way, ended_s=ended_s, error="given up"))
    at_s = record.submitted_s
    for visit in visits:
        if visit.sent.at_s > at_s or at_s == record.submitted_s:
            yield _before(visit.sent, at_s)
        yield _stage(visit)
        at_s = visit.ended_s
    if ended_s > at_s:
        yield Span(name="queue", begin_s=at_s, end_s=ended_s)


def _before(sent: Sent, since_s: float) -> Span:
    """Until it was sent: encoded for the next network, or waiting."""
    if sent.crosses:
        attributes = {"offramp.block": sent.block, "offramp.tokens": sent.tokens}
        return Span(name="crossing", begin_s=since_s, end_s=sent.at_s, attributes=attributes)
    return Span(name="queue", begin_s=since_s, end_s=sent.at_s)


def _stage(visit: Visit) -> Span:
    sent = visit.sent
    attributes: dict[str, str | int | float | bool] = {
        "offramp.slot": sent.slot,
        "offramp.replica": sent.replica,
        "offramp.plan_epoch": sent.epoch,
        "offramp.attempt": sent.attempt + 1,
        "offramp.block": sent.block,
        "offramp.call_inputs": sent.call_inputs,
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
        name=f"stage {sent.slot}",
        begin_s=sent.at_s,
        end_s=visit.ended_s,
        attributes=attributes,
        children=children,
        error=visit.error,
    )


def _hop_s(visit: Visit) -> float:
    """Never below zero: clocks of two machines need not go equally fast."""
    assert visit.timing is not None
    return max(0.0, visit.ended_s - visit.sent.at_s - visit.timing.queue_s - visit.timing.compute_s)


def _inside(visit: Visit) -> Iterator[Span]:
    half_s = _hop_s(visit) / 2
    at_s = visit.sent.at_s + half_s
    yield Span(name="hop", begin_s=visit.sent.at_s, end_s=at_s)
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
