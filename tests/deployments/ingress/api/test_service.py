from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from deployments.api.operations import InferRequest
from deployments.api.service import MAX_ENCODER_THREADS, InferService
from deployments.ingress.core.inputs import PendingInput
from deployments.settings import ServeSettings
from earlyexit.codecs.text import LONG_CHARS, TextCodec
from earlyexit.errors import (
    DeadlineError,
    ExecutionError,
    InputError,
    OverloadedError,
    StageUnavailableError,
    UnprocessableInputError,
)
from earlyexit.network.boundary import Answer, Encoded, TensorSpec
from optimizer.plans.plan import stock_plan
from tests.deployments.ingress.dispatch.dispatcher_scene import Scene as Dispatching
from tests.deployments.ingress.dispatch.dispatcher_scene import StageCallLog
from tests.deployments.wire_fakes import turns, until

VOCABULARY = {"[UNK]": 0, "pay": 1, "my": 2, "bill": 3}
MAX_LENGTH = 5
SETTINGS = ServeSettings(
    model="unused", plan=stock_plan(2, batch=1), max_inputs_per_request=4, default_timeout_s=8.0, max_timeout_s=60.0
)


class Words(TextCodec):
    """Records what it encoded, and whether on the event loop's thread."""

    def __init__(self) -> None:
        super().__init__(MAX_LENGTH)
        tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.use(tokenizer)
        self.encoded: list[str] = []
        self.on_main_thread: list[bool] = []

    def encode(self, rows: Sequence[str], *, truncate: bool = False) -> list[Encoded]:
        self.on_main_thread.append(threading.current_thread() is threading.main_thread())
        self.encoded.extend(rows)
        return super().encode(rows, truncate=truncate)


class Slow(Words):
    """Encodes in threads, once the test allows it."""

    def __init__(self) -> None:
        super().__init__()
        self.may_go_on = threading.Event()

    def is_slow(self, rows: Sequence[str]) -> bool:
        return True

    def encode(self, rows: Sequence[str], *, truncate: bool = False) -> list[Encoded]:
        assert self.may_go_on.wait(10.0)
        return super().encode(rows, truncate=truncate)


class Scene(Dispatching):
    """A service with a dispatcher; the test gives the first stage's replies."""

    def serve(self, codec: Words | None = None, **changes: Any) -> InferService:
        inputs = changes.pop("inputs", None)
        self.codec = codec or Words()
        settings = SETTINGS.model_copy(update=changes)
        self.service = InferService(self.codec, self.dispatcher, settings, self.clock, inputs=inputs)
        return self.service

    async def start(self, request: InferRequest) -> tuple[asyncio.Task[list[Answer]], StageCallLog]:
        """Starts a request, and returns when its inputs were sent."""
        task = asyncio.create_task(self.service.infer(request))
        await turns()
        return task, self.stages[0].calls[-1]


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.serve()
    return scene


def ask(*texts: str, truncate: bool = False, timeout_s: float | None = None) -> InferRequest:
    """Returns inputs a, b, ..."""
    return InferRequest(rows=texts, ids=tuple("abcdefgh"[: len(texts)]), truncate=truncate, timeout_s=timeout_s)


def tokens(call: StageCallLog) -> list[int]:
    return [int(token) for token in call.call.piece.tensors[0]]


async def test_answers_have_the_order_of_the_inputs(scene: Scene) -> None:
    task, call = await scene.start(ask("pay", "my bill", "it"))
    assert (call.names, tokens(call)) == ("abc", [1, 2, 3, 0])
    for name in "cab":
        assert not task.done()
        call.answer(name)
        await turns()
    assert [each.sample_id for each in await task] == [call.id_of(name) for name in "abc"]
    assert not scene.core.counts.drops


async def test_a_request_that_fails_or_is_cancelled_gives_up_its_other_inputs(scene: Scene) -> None:
    task, call = await scene.start(ask("pay", "my", "bill", "it"))
    call.answer("d")
    call.lose("b", ExecutionError("first"))
    await turns()
    call.lose("a", ExecutionError("second"))
    with pytest.raises(ExecutionError, match="first"):
        await task
    assert scene.core.counts.drops == {"execution": 3}
    task, _ = await scene.start(ask("pay", "my"))
    task.cancel()
    await asyncio.wait([task])
    assert (task.cancelled(), scene.core.counts.drops) == (True, {"execution": 3, "abandoned": 2})


async def test_ended_requests_leave_no_inputs_for_the_garbage_collector(scene: Scene) -> None:
    gc.disable()  # inputs in reference cycles would stay
    for error in (None, ExecutionError("the model failed")):
        task, call = await scene.start(replace(ask("pay"), request_id="ended"))
        call.answer("a") if error is None else call.lose("a", error)
        await asyncio.wait([task])
        assert task.exception() is error
    del task, call, error
    scene.stages[0].calls.clear()
    scene.clock.advance(SETTINGS.default_timeout_s)
    scene.dispatcher.wake()  # forgets the timers
    left = [each for each in gc.get_objects() if isinstance(each, PendingInput) and each.request_id == "ended"]
    gc.enable()
    assert left == []


async def test_the_deadline_is_the_timeout_from_now_and_no_later_than_the_slo() -> None:
    found = {}
    for slo_s in (None, 1.5):
        for timeout_s in (None, 1.0, 2.5, 60.0):
            scene = Scene()
            scene.clock.advance(100.0)
            scene.serve(slo_s=slo_s)
            task, call = await scene.start(ask("pay", timeout_s=timeout_s))
            call.answer("a")
            await task
            [found[slo_s, timeout_s]] = call.call.remaining_s
    assert [*found.values()] == [8.0, 1.0, 2.5, 60.0, 1.5, 1.0, 1.5, 1.5]
    scene.clock.advance(1.0)
    task, call = await scene.start(replace(ask("pay"), arrived_s=scene.clock.now_s() - 0.5))  # at another version
    assert call.call.remaining_s == (1.0,)
    call.answer("a")
    await task


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        (ask("pay", timeout_s=60.001), InputError, r"must be at most 60 s \(got 60.001 s\)"),
        (ask("pay", timeout_s=1e30), InputError, r"must be at most 60 s \(got 1e\+30 s\)"),
        (ask("pay", timeout_s=float("inf")), InputError, r"must be at most 60 s \(got inf s\)"),
        (ask(*["pay"] * 5), InputError, r"a request must have at most 4 inputs \(got 5\)"),
        (ask("pay", "pay " * 6), UnprocessableInputError, "input 1 has 6 tokens, the model takes 5"),
    ],
    ids=["timeout", "long timeout", "endless", "too many", "too long"],
)
async def test_a_request_beyond_a_limit_is_refused_with_the_limit(
    scene: Scene, asked: InferRequest, error: type[InputError], words: str
) -> None:
    with pytest.raises(error, match=words):
        await scene.service.infer(asked)
    assert scene.core.num_unanswered == 0


async def test_an_input_that_does_not_fit_the_network_fails_only_its_request(scene: Scene) -> None:
    scene.serve(inputs=(TensorSpec(name="hidden", shape=(), per_token=True),))
    with pytest.raises(UnprocessableInputError, match=r"input 0: .* takes 'hidden' as float32 \[2\]; .* int32 \[2\]"):
        await scene.service.infer(ask("my bill"))
    assert scene.core.num_unanswered == 0
    scene.serve(inputs=(TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True),))
    _, call = await scene.start(ask("my bill"))
    assert tokens(call) == [2, 3]


async def test_a_long_text_is_truncated_on_request(scene: Scene) -> None:
    _, call = await scene.start(ask("pay " * 6, truncate=True))
    assert tokens(call) == [1] * MAX_LENGTH


async def test_inputs_that_the_core_would_refuse_are_not_encoded(scene: Scene) -> None:
    scene.dispatcher.suspend("gone")
    with pytest.raises(StageUnavailableError, match="gone"):
        await scene.service.infer(ask("pay"))
    assert (scene.codec.encoded, scene.core.counts.drops) == ([], {"stage_unavailable": 1})
    full = Scene(max_queued=3)
    full.serve()
    await full.start(ask("pay", "my"))
    with pytest.raises(OverloadedError, match="holds at most 3"):
        await full.service.infer(ask("pay", "my"))


async def test_long_texts_are_tokenized_in_a_thread(scene: Scene) -> None:
    for num_chars in (LONG_CHARS, LONG_CHARS + 1):
        with pytest.raises(InputError):
            await scene.service.infer(ask("pay " * (num_chars // 4) + " " * (num_chars % 4)))
    assert scene.codec.on_main_thread == [True, False]


async def test_inputs_that_wait_to_be_encoded_are_limited(scene: Scene) -> None:
    codec = Slow()
    scene.serve(codec, max_queued=3)
    waiting = asyncio.create_task(scene.service.infer(ask("pay", "my")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="2 inputs wait to be encoded; the limit is 3"):
        await scene.service.infer(ask("bill", "bill"))
    assert scene.core.counts.drops == {"overloaded": 2}
    codec.may_go_on.set()
    await asyncio.wait_for(scene.stages[0].called.wait(), timeout=10.0)
    scene.stages[0].calls[0].answer("ab")
    assert len(await waiting) == 2
    again = asyncio.create_task(scene.service.infer(ask("pay", "my")))
    await until(lambda: len(scene.stages[0].calls) == 2)
    scene.stages[0].calls[1].answer("ab")
    assert len(await again) == 2, "what was encoded no longer counts"


async def test_an_input_past_its_deadline_is_not_encoded(scene: Scene) -> None:
    codec = Slow()
    scene.serve(codec)
    busy = [asyncio.create_task(scene.service.infer(ask("pay", timeout_s=60.0))) for _ in range(MAX_ENCODER_THREADS)]
    await asyncio.sleep(0)
    with pytest.raises(DeadlineError, match=r"no answer within 0\.01 s"):
        await scene.service.infer(ask("bill", timeout_s=0.01))
    assert scene.core.counts.drops == {"deadline": 1}
    codec.may_go_on.set()
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    assert "bill" not in codec.encoded
