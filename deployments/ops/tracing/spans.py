"""The spans of a sampled request, on the ingress's clock, which grow as things happen to its inputs. Pure.

The children of a span fill it without gaps, so the times of a request add up to its latency. An ingress and a stage
share no clock: the stage reports durations, and the rest of a call is its hop. How a hop divides into the way there and
the way back is unknown; one half is put before the stage's own time, and one half after it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.wire.messages import SplitRun, Timing

Attributes = Mapping[str, str | int | float | bool]
NONE: Attributes = {}
MOST_INPUTS = 16
"""How many inputs of a request have spans: the slowest, which determine its latency."""
ATTEMPT, EXIT = "offramp.attempt", "offramp.exit"


@dataclass(slots=True, kw_only=True, eq=False)
class Span:
    """A named period, and the spans inside it."""

    name: str
    begin_s: float
    end_s: float = math.inf
    """Infinite while it lasts."""
    attributes: dict[str, str | int | float | bool] = field(default_factory=dict)
    children: list[Span] = field(default_factory=list)
    error: str | None = None

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class InputSpan(Span):
    """The span of an input: it waits and visits stages by turns, until it is answered or its request ends."""

    @property
    def is_answered(self) -> bool:
        return EXIT in self.attributes

    def went_on(self, attempt: int) -> bool:
        """Returns whether a stage sent it on in this attempt, which counts from 0."""
        last = self.children[-1] if self.children else self
        return last.attributes.get(ATTEMPT) == attempt + 1 and EXIT not in last.attributes and last.error is None

    def enter(self, stage: Span, tokens: int | None = None) -> None:
        """Begins a visit to a stage; `tokens`: its length where it was encoded again, for the next network."""
        if tokens is None:
            self._wait_until(stage.begin_s)
        else:
            block = stage.attributes["offramp.block"]
            self._wait_until(stage.begin_s, "crossing", {"offramp.block": block, "offramp.tokens": tokens})
        self.children.append(stage)

    def leave(
        self,
        now_s: float,
        timing: Timing | None = None,
        runs: Sequence[SplitRun] = (),
        exit_block: int | None = None,
        error: str | None = None,
    ) -> None:
        """Ends the visit, if there is one: with an answer after a block, with an error, or else the input goes on."""
        stage = self.children[-1]
        if stage.end_s < math.inf:
            return
        stage.end_s, stage.error = now_s, error
        if timing is not None:
            # At least 0, because clocks of two machines may run at different speeds.
            hop_s = max(0.0, stage.seconds - timing.queue_s - timing.compute_s)
            times = {"queue": timing.queue_s, "compute": timing.compute_s, "hop": hop_s}
            stage.attributes |= {f"offramp.{name}_s": seconds for name, seconds in times.items()}
            stage.children = list(_inside(stage.begin_s, hop_s / 2, timing, runs))
        if exit_block is not None:
            stage.attributes[EXIT] = self.attributes[EXIT] = exit_block
            self.end_s = now_s

    def end(self, now_s: float) -> None:
        """Ends it with its request, if it has no answer."""
        if self.is_answered:
            return
        if self.children:
            self.leave(now_s, error="given up")
        self._wait_until(now_s)
        self.end_s, self.error = now_s, "no answer"

    def _wait_until(self, now_s: float, name: str = "queue", attributes: Attributes = NONE) -> None:
        since_s = self.children[-1].end_s if self.children else self.begin_s
        if now_s > since_s or not self.children:
            self.children.append(Span(name=name, begin_s=since_s, end_s=now_s, attributes=dict(attributes)))


def _inside(begin_s: float, half_s: float, timing: Timing, runs: Sequence[SplitRun]) -> Iterator[Span]:
    times: list[tuple[str, float, Attributes]] = []
    for run in runs:
        attributes = {
            "offramp.first_block": run.first,
            "offramp.end_block": run.end,
            "offramp.batch": run.batch,
            "offramp.batch_tokens": run.tokens,
            "offramp.target_batch": run.target,
        }
        times += [
            ("stage queue", run.queue_s, NONE),
            (f"split {run.first} to {run.end - 1}", run.compute_s, attributes),
        ]
    if not runs:
        times = [("stage queue", timing.queue_s, NONE), ("compute", timing.compute_s, NONE)]
    for name, seconds, about in (("hop", half_s, NONE), *times, ("hop", half_s, NONE)):
        yield Span(name=name, begin_s=begin_s, end_s=begin_s + seconds, attributes=dict(about))
        begin_s += seconds


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
    inputs: dict[int, InputSpan] = field(default_factory=dict)
    """By serial number."""

    def ns(self, at_s: float) -> int:
        """Converts a time of the ingress's clock to nanoseconds since 1970."""
        return round((at_s + self.ahead_s) * 1e9)

    def spans(self, ended_s: float) -> list[Span]:
        """Returns the request's spans: preparation until its inputs are submitted, the inputs, and the reply."""
        inputs = list(self.inputs.values())
        submitted_s = inputs[0].begin_s if inputs else ended_s
        prepare = Span(name="prepare", begin_s=self.began_s, end_s=submitted_s)
        if not inputs:  # refused
            return [prepare]
        for each in inputs:
            each.end(ended_s)
        by_end = sorted(inputs, key=lambda each: -each.end_s)
        slowest = by_end[:MOST_INPUTS]
        reply = Span(name="reply", begin_s=by_end[0].end_s, end_s=ended_s)
        return [prepare, *(each for each in inputs if each in slowest), reply]
