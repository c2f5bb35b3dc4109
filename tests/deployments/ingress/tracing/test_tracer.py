"""A tracer's settings, recorded calls and spans; whole requests are in test_traced_requests.py."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec import structs
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pydantic import ValidationError

from deployments.api.operations import InferRequest
from deployments.choices import TracingSettings
from deployments.ingress.core.calls import Call
from deployments.ingress.core.inputs import PendingInput, sample_id_of
from deployments.ops.tracing import MAX_INPUT_SPANS, InputSpan, RequestRecord, Span, SpanExporter, Tracer, traces_url
from deployments.versions.traffic import TrafficSplitter
from deployments.wire.messages import Chunk, Timing
from earlyexit.network.boundary import Answer
from tests.clock import ManualClock
from tests.deployments.ingress.versions.version_world import FakeServed, a_request
from tests.deployments.wire_fakes import ROUTE, answered, call_of, piece_of, survivors

FIRST, SECOND = "a#i.1.0", "b#i.2.0"


class Scene:
    """A sampled request with inputs of some serial numbers."""

    def __init__(self, *serials: int, starts: tuple[int, ...] = ()) -> None:
        self.clock = ManualClock(100.0)
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = Tracer(provider, self.clock, ratio=1.0, starts=starts)
        record = self.tracer.begin("POST /predict", {}, {})
        assert record is not None
        self.record = record
        self.tracer.record_inputs([flight(serial) for serial in serials])


def flight(serial: int, attempt: int = 0) -> PendingInput:
    pending = PendingInput(serial, 0.0, 1.0, key="a")
    pending.attempt = attempt
    return pending


class Followed(FakeServed):
    """A version whose inputs the tracer records, like this ingress's."""

    def __init__(self, scene: Scene, serial: int) -> None:
        super().__init__(version=str(serial))
        self._tracer, self._input = scene.tracer, flight(serial)

    async def infer(self, request: InferRequest) -> list[Answer]:
        self._tracer.record_inputs([self._input])
        return await super().infer(request)


async def test_a_comparison_with_another_version_is_not_part_of_the_requests_trace() -> None:
    scene = Scene()
    own, other = Followed(scene, 1), Followed(scene, 2)
    sides: dict[str, Any] = {"own": own, "default": other, "canary": own, "share": 1.0, "compare_share": 1.0}
    splitter = TrafficSplitter(**sides, clock=scene.clock)
    assert (await splitter.answer(a_request()))[0] is own
    await asyncio.gather(*splitter.comparing)
    assert (list(scene.record.inputs), other.asked) == ([1], ["r-1"])
    scene.tracer.end(scene.record, {}, "r-1", failure=None)
    message = call_of([FIRST, SECOND])
    assert scene.tracer.on_call("r1", a_call(flight(1), flight(2)), message) is message


def a_call(*inputs: PendingInput) -> Call:
    return Call(ROUTE, inputs, 0.0, 0.0, None, 1, is_pending=True)


def test_a_call_requests_the_runs_of_only_the_sampled_inputs() -> None:
    message = call_of([FIRST, SECOND])
    call = a_call(flight(1), flight(2))
    assert Scene(2).tracer.on_call("r1", call, message) == structs.replace(message, traced=(1,))


def way_of(*steps: tuple[int, int, Chunk | None]) -> list[str]:
    """Returns the span names of an input. Each call takes a second (None: it fails), and so does each wait."""
    scene = Scene(1, starts=(0, 4))
    for attempt, block, chunk in steps:
        call = a_call(flight(1, attempt))
        ids = [sample_id_of("i", each) for each in call.inputs]
        scene.tracer.on_call("r1", call, structs.replace(call_of(ids), piece=piece_of(ids, block)))
        scene.clock.advance(1.0)
        if chunk is not None:
            scene.tracer.on_reply(call, chunk)
        scene.tracer.on_end(call, None if chunk is not None else ConnectionError("it died"))
        scene.clock.advance(1.0)
    [_, of_input, _] = scene.record.spans(scene.clock.now_s())
    return [span.name for span in of_input.children]


def test_an_input_has_a_span_for_a_crossing_and_for_the_wait_of_a_retry() -> None:
    on, again = survivors([FIRST]), "a#i.1.1"
    names = way_of((0, 0, on), (0, 2, on), (0, 4, answered([FIRST])))
    assert names == ["queue", "stage split-cpu-0", "queue", "stage split-cpu-0", "crossing", "stage split-cpu-0"]
    names = way_of((0, 0, on), (0, 4, None), (1, 4, answered([again])))
    assert names == ["queue", "stage split-cpu-0", "crossing", "stage split-cpu-0", "queue", "stage split-cpu-0"]


# Spans


def visited(stage_s: tuple[float, float], timing: Timing | None = None) -> InputSpan:
    """Returns the span of an input that arrived at 11 s and was answered by its first stage."""
    made = InputSpan(name="input", begin_s=11.0)
    made.enter(Span(name="stage cpu-0", begin_s=stage_s[0]))
    made.leave(stage_s[1], timing, exit_block=1)
    return made


def spans_of(*inputs: InputSpan, ended_s: float) -> list[Span]:
    return RequestRecord(root=None, begin_s=10.0, inputs=dict(enumerate(inputs))).spans(ended_s)


def test_a_replica_whose_clock_is_fast_leaves_no_hop_below_zero() -> None:
    [_, each, _] = spans_of(visited((12.0, 13.0), Timing(queue_s=0.5, compute_s=0.75)), ended_s=13.0)
    assert each.children[-1].attributes["offramp.hop_s"] == 0.0
    assert [span.end_s - span.begin_s for span in each.children[-1].children] == [0.0, 0.5, 0.75, 0.0]


def test_only_the_slowest_of_many_inputs_have_spans() -> None:
    inputs = [visited((11.0, 12.0 + k)) for k in range(MAX_INPUT_SPANS + 5)]
    _, *slowest, reply = spans_of(*inputs, ended_s=50.0)
    assert slowest == inputs[5:]
    assert (reply.name, reply.begin_s, reply.end_s) == ("reply", 12.0 + MAX_INPUT_SPANS + 4, 50.0)


ROOT = Path(__file__).parents[4]


def test_tracing_without_its_package_is_refused_with_a_hint() -> None:
    TracingSettings().check()
    code = (
        "import sys; sys.modules['opentelemetry.exporter'] = None\n"
        "from deployments.choices import TracingSettings\n"
        "TracingSettings().check()"
    )
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert said.returncode == 1
    assert "InputError: tracing needs OpenTelemetry's exporter over OTLP/HTTP" in said.stderr
    assert "pip install '.[tracing]'" in said.stderr


def test_a_collector_that_does_not_answer_delays_the_end_only_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.ops.tracing.CLOSE_S", 0.01)
    answers = Event()
    provider = Mock(shutdown=Mock(side_effect=answers.wait))
    Tracer(provider, ManualClock()).close()
    assert (provider.shutdown.call_count, answers.is_set()) == (1, False)
    answers.set()  # ends the thread


def test_lost_traces_are_logged_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    results = [SpanExportResult.FAILURE] * 2 + [SpanExportResult.SUCCESS] * 2
    monkeypatch.setattr("deployments.ops.tracing.OTLPSpanExporter.export", lambda *_: results.pop(0))
    exporter = SpanExporter()
    while results:
        exporter.export([])
    assert caplog.messages == ["the collector accepts no traces; they are lost", "the collector accepts traces again"]


def test_invalid_tracing_settings_are_refused() -> None:
    wrong = [("endpoint", "collector:4318"), ("endpoint", "http://"), ("ratio", 1.1), ("headers", {})]
    for field, value in wrong:
        with pytest.raises(ValidationError, match=field):
            TracingSettings.model_validate({field: value})


def test_spans_go_to_the_path_of_the_endpoint_or_the_default() -> None:
    assert traces_url(None) is None  # the SDK's own
    for endpoint in ("http://collector:4318", "http://collector:4318/"):
        assert traces_url(endpoint) == "http://collector:4318/v1/traces"
    assert traces_url("https://host/otlp/traces") == "https://host/otlp/traces"
