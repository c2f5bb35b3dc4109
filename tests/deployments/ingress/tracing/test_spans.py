from __future__ import annotations

from typing import Any

from deployments.ops.tracing.spans import MOST_INPUTS, InputRecord, RequestRecord, Sent, Span, Visit, request_spans
from deployments.wire.messages import SplitRun, Timing

Flat = tuple[str, float, float]


def sent(at_s: float, *, attempt: int = 0, block: int = 0) -> Sent:
    return Sent(slot="cpu-0", replica="r1", epoch=3, attempt=attempt, block=block, call_inputs=4, at_s=at_s)


def visit(begin_s: float, end_s: float, *, attempt: int = 0, block: int = 0, **more: Any) -> Visit:
    return Visit(sent=sent(begin_s, attempt=attempt, block=block), ended_s=end_s, **more)


def record(*inputs: InputRecord, began_s: float = 10.0) -> RequestRecord:
    return RequestRecord(root=None, began_s=began_s, inputs=list(inputs))


def flat(spans: tuple[Span, ...]) -> list[Flat]:
    return [(span.name, span.begin_s, span.end_s) for span in spans]


def test_a_request_is_its_preparation_its_input_and_its_reply() -> None:
    answered = InputRecord(submitted_s=11.0, visits=[visit(12.0, 15.0, exit=2)])
    assert flat(request_spans(record(answered), 16.0)) == [
        ("prepare", 10.0, 11.0),
        ("input", 11.0, 15.0),
        ("reply", 15.0, 16.0),
    ]


def test_the_reply_begins_when_the_slowest_input_is_answered() -> None:
    quick = InputRecord(submitted_s=11.0, visits=[visit(11.0, 12.0, exit=0)])
    slow = InputRecord(submitted_s=11.0, visits=[visit(11.0, 14.0, exit=3)])
    spans = request_spans(record(slow, quick), 16.0)
    assert flat(spans)[1:] == [("input", 11.0, 14.0), ("input", 11.0, 12.0), ("reply", 14.0, 16.0)]
    assert [dict(span.attributes) for span in spans[1:3]] == [
        {"offramp.input": 0, "offramp.exit": 3},
        {"offramp.input": 1, "offramp.exit": 0},
    ]


def test_a_stage_is_half_of_its_hop_what_it_says_itself_and_the_other_half() -> None:
    told = visit(12.0, 20.0, timing=Timing(queue_s=1.0, compute_s=3.0), exit=1)
    [_, each, _] = request_spans(record(InputRecord(submitted_s=11.0, visits=[told])), 20.0)
    waiting, stage = each.children
    assert flat((waiting, stage)) == [("queue", 11.0, 12.0), ("stage cpu-0", 12.0, 20.0)]
    assert flat(stage.children) == [
        ("hop", 12.0, 14.0),
        ("stage queue", 14.0, 15.0),
        ("compute", 15.0, 18.0),
        ("hop", 18.0, 20.0),
    ]
    assert stage.attributes == {
        "offramp.slot": "cpu-0",
        "offramp.replica": "r1",
        "offramp.plan_epoch": 3,
        "offramp.attempt": 1,
        "offramp.block": 0,
        "offramp.call_inputs": 4,
        "offramp.exit": 1,
        "offramp.queue_s": 1.0,
        "offramp.compute_s": 3.0,
        "offramp.hop_s": 4.0,
    }


def test_splits_of_a_stage_are_apart_with_their_batches() -> None:
    runs = (
        SplitRun(first=0, end=2, batch=4, tokens=4, target=8, queue_s=1.0, compute_s=2.0),
        SplitRun(first=2, end=3, batch=3, tokens=3, target=4, queue_s=0.5, compute_s=1.5),
    )
    told = visit(12.0, 19.0, timing=Timing(queue_s=1.5, compute_s=3.5), runs=runs, exit=2)
    [_, each, _] = request_spans(record(InputRecord(submitted_s=12.0, visits=[told])), 19.0)
    stage = each.children[-1]
    assert flat(stage.children) == [
        ("hop", 12.0, 13.0),
        ("stage queue", 13.0, 14.0),
        ("split 0 to 1", 14.0, 16.0),
        ("stage queue", 16.0, 16.5),
        ("split 2 to 2", 16.5, 18.0),
        ("hop", 18.0, 19.0),
    ]
    assert stage.children[4].attributes == {
        "offramp.first_block": 2,
        "offramp.end_block": 3,
        "offramp.batch": 3,
        "offramp.batch_tokens": 3,
        "offramp.target_batch": 4,
    }


def test_a_replica_whose_clock_is_fast_leaves_no_hop_below_zero() -> None:
    told = visit(12.0, 13.0, timing=Timing(queue_s=0.5, compute_s=0.75), exit=1)
    [_, each, _] = request_spans(record(InputRecord(submitted_s=12.0, visits=[told])), 13.0)
    assert each.children[-1].attributes["offramp.hop_s"] == 0.0
    assert [span.seconds for span in each.children[-1].children] == [0.0, 0.5, 0.75, 0.0]


def test_an_input_waits_again_after_a_replica_died_and_goes_to_the_next_stage_at_once() -> None:
    visits = [
        visit(11.0, 12.0, error="gone"),
        visit(13.0, 14.0, attempt=1),
        visit(14.0, 15.0, attempt=1, block=2, exit=3),
    ]
    [_, each, _] = request_spans(record(InputRecord(submitted_s=11.0, visits=visits)), 15.0)
    assert flat(each.children) == [
        ("queue", 11.0, 11.0),
        ("stage cpu-0", 11.0, 12.0),
        ("queue", 12.0, 13.0),
        ("stage cpu-0", 13.0, 14.0),
        ("stage cpu-0", 14.0, 15.0),
    ]
    assert [span.error for span in each.children] == [None, "gone", None, None, None]
    assert [span.attributes.get("offramp.attempt") for span in each.children] == [None, 1, None, 2, 2]


def test_what_was_under_way_when_nobody_waited_any_more_ends_with_the_request() -> None:
    lost = InputRecord(submitted_s=11.0, under_way=sent(12.0))
    waiting = InputRecord(submitted_s=11.0)
    prepare, first, second, reply = request_spans(record(lost, waiting), 20.0)
    assert flat(first.children) == [("queue", 11.0, 12.0), ("stage cpu-0", 12.0, 20.0)]
    assert flat(second.children) == [("queue", 11.0, 20.0)]
    assert (first.error, first.children[1].error, second.error) == ("no answer", "given up", "no answer")
    assert (prepare.seconds, reply.seconds) == (1.0, 0.0)


def test_a_request_that_was_refused_is_its_preparation() -> None:
    assert flat(request_spans(record(), 10.5)) == [("prepare", 10.0, 10.5)]


def test_of_many_inputs_the_slowest_have_spans() -> None:
    inputs = [InputRecord(submitted_s=11.0, visits=[visit(11.0, 12.0 + k, exit=0)]) for k in range(MOST_INPUTS + 5)]
    spans = [span for span in request_spans(record(*inputs), 50.0) if span.name == "input"]
    assert [span.attributes["offramp.input"] for span in spans] == list(range(5, MOST_INPUTS + 5))
