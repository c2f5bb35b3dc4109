from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from deployments.ingress.core.inputs import PendingInput
from deployments.ops.tracing.otlp import OtlpExporter
from deployments.ops.tracing.spans import Attributes, Span, Visit, request_spans
from deployments.ops.tracing.tracer import Tracer
from deployments.wire.messages import Chunk, SplitRun
from earlyexit.clock import ManualClock
from earlyexit.errors import DeadlineError
from earlyexit.network.wire import Encoded
from tests.deployments.wire_fakes import TIMING, answered, call_of, going_on, piece_of

FIRST, SECOND = "a#i.1.0", "b#i.2.0"
RUN = SplitRun(first=0, end=2, batch=2, tokens=2, target=4, queue_s=0.25, compute_s=0.5)


@dataclass
class FakeExporter(OtlpExporter):
    """Keeps what it is told; samples what is posted to /predict."""

    ended: list[tuple[str, list[str], float, dict[str, str | int], str | None]] = field(default_factory=list)

    def begin(self, name: str, attributes: Attributes, headers: Mapping[str, str], now_s: float) -> Any | None:
        return f"root at {now_s:g}" if name == "POST /predict" else None

    def headers(self, root: Any) -> Mapping[str, str]:
        return {"traceparent": str(root)}

    def end(
        self, root: Any, spans: Sequence[Span], ended_s: float, attributes: Attributes, failure: str | None
    ) -> None:
        self.ended.append((str(root), [span.name for span in spans], ended_s, dict(attributes), failure))


class Scene:
    def __init__(self, starts: tuple[int, ...] = ()) -> None:
        self.clock = ManualClock(100.0)
        self.exporter = FakeExporter()
        self.tracer = Tracer(self.exporter, self.clock, starts)

    def follow(self, *serials: int) -> None:
        self.tracer.follow([self.flight(serial) for serial in serials])

    def flight(self, serial: int) -> PendingInput:
        encoded = Encoded(2, (np.zeros(2, dtype=np.int32),))
        return PendingInput(serial, 0.0, 1.0, encoded.length, encoded, request_id="r")


def test_a_sampled_request_is_told_with_what_became_of_it() -> None:
    scene = Scene()
    record = scene.tracer.begin("POST /predict", {}, {})
    assert record is not None
    scene.follow(1, 2)
    scene.clock.advance(2.0)
    assert scene.tracer.headers(record) == {"traceparent": "root at 100"}
    scene.tracer.end(record, {"http.response.status_code": 200}, "r-1", failure=None)
    attributes = {"offramp.inputs": 2, "offramp.request_id": "r-1", "http.response.status_code": 200}
    assert scene.exporter.ended == [("root at 100", ["prepare", "input", "input", "reply"], 102.0, attributes, None)]


def test_what_is_not_sampled_leaves_nothing_behind() -> None:
    scene = Scene()
    scene.tracer.begin("POST /predict", {}, {})
    assert scene.tracer.begin("POST /other", {}, {}) is None
    scene.follow(1)
    assert scene.tracer.sent("slot", "r1", call_of([FIRST])) is None


def test_a_call_asks_for_the_runs_of_the_sampled_inputs_alone() -> None:
    scene = Scene()
    scene.tracer.begin("POST /predict", {}, {})
    scene.follow(2)
    call = call_of([FIRST, SECOND])
    traced = scene.tracer.sent("slot", "r1", call)
    assert traced is not None
    assert traced.call == replace(call, traced=(1,))


def visits_of(*chunks: Chunk, reason: str | None = None) -> list[Visit]:
    """What is noted of input a, a second before every part of the reply."""
    scene = Scene()
    record = scene.tracer.begin("POST /predict", {}, {})
    assert record is not None
    scene.follow(1)
    traced = scene.tracer.sent("slot", "r1", call_of([FIRST, SECOND]))
    assert traced is not None
    heard: list[Chunk] = []
    take = traced.listening(heard.append)
    for chunk in chunks:
        scene.clock.advance(1.0)
        take(chunk)
    if reason is not None:
        traced.fail(reason)
    assert heard == list(chunks)
    return record.inputs[0].visits


def test_an_answer_ends_a_visit_with_its_exit_times_and_runs() -> None:
    [visit] = visits_of(answered([SECOND]), replace(answered([FIRST]), runs=((FIRST, (RUN,)),)))
    assert (visit.ended_s, visit.exit, visit.timing, visit.runs, visit.error) == (102.0, 1, TIMING, (RUN,), None)
    assert (visit.sent.replica, visit.sent.attempt, visit.sent.call_inputs, visit.sent.at_s) == ("r1", 0, 2, 100.0)


def test_a_survivor_ends_a_visit_without_an_exit() -> None:
    [visit] = visits_of(going_on([FIRST, SECOND]))
    assert (visit.ended_s, visit.exit, visit.timing, visit.error) == (101.0, None, TIMING, None)


def test_a_probes_early_answer_is_its_answer() -> None:
    [visit] = visits_of(Chunk(early=answered([FIRST]).answers), going_on([FIRST, SECOND]))
    assert (visit.ended_s, visit.exit) == (101.0, 1)


def test_a_loss_and_a_failure_say_why() -> None:
    [dropped] = visits_of(Chunk(lost=((FIRST, DeadlineError("too late")),)))
    [died] = visits_of(answered([SECOND]), reason="the replica died")
    assert (dropped.error, died.error) == ("deadline: too late", "the replica died")


def test_an_input_of_a_request_that_has_ended_is_not_noted_any_more() -> None:
    scene = Scene()
    record = scene.tracer.begin("POST /predict", {}, {})
    assert record is not None
    scene.follow(1)
    scene.tracer.end(record, {}, None, failure="the caller left before the response")
    assert scene.tracer.sent("slot", "r1", call_of([FIRST])) is None
    assert scene.exporter.ended[0][3:] == ({"offramp.inputs": 1}, "the caller left before the response")


def way_of(*steps: tuple[str, int, Chunk | None], starts: tuple[int, ...]) -> list[str]:
    """The spans of an input: sent by an id to a block, what came back a second later or nothing; then a second here."""
    scene = Scene(starts)
    record = scene.tracer.begin("POST /predict", {}, {})
    assert record is not None
    scene.follow(1)
    for sample_id, block, chunk in steps:
        traced = scene.tracer.sent("slot", "r1", replace(call_of([sample_id]), piece=piece_of([sample_id], block)))
        assert traced is not None
        scene.clock.advance(1.0)
        if chunk is None:
            traced.fail("it died")
        else:
            traced.listening(lambda _: None)(chunk)
        scene.clock.advance(1.0)
    [_, of_input, _] = request_spans(record, scene.clock.now_s())
    return [span.name for span in of_input.children]


def test_what_was_encoded_anew_between_two_networks_has_a_span_of_that() -> None:
    on = going_on([FIRST])
    names = way_of((FIRST, 0, on), (FIRST, 2, on), (FIRST, 4, answered([FIRST])), starts=(0, 4))
    assert names == ["queue", "stage slot", "queue", "stage slot", "crossing", "stage slot"]


def test_who_starts_again_waited_and_did_not_cross() -> None:
    again = "a#i.1.1"
    names = way_of((FIRST, 0, going_on([FIRST])), (FIRST, 4, None), (again, 4, answered([again])), starts=(0, 4))
    assert names == ["queue", "stage slot", "crossing", "stage slot", "queue", "stage slot"]
