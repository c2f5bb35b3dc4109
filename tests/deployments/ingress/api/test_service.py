from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from deployments.ingress.api.bodies import InferRequest
from deployments.ingress.api.service import MOST_ENCODERS, InferService
from deployments.ingress.core.flights import Flight
from deployments.ingress.dispatch.departure import LiveFlight, Query, Settle
from deployments.ingress.dispatch.dispatcher import Dispatcher
from deployments.settings import ServeSettings
from earlyexit.boundary import TensorSpec
from earlyexit.clock import ManualClock
from earlyexit.codecs.text import LONG_CHARS, TextCodec
from earlyexit.errors import (
    AdmissionError,
    DeadlineError,
    ExecutionError,
    InputError,
    OfframpError,
    OverloadedError,
    UnprocessableInputError,
)
from earlyexit.signature import Encoded
from earlyexit.tokenizer import TextTokenizer
from earlyexit.wire import Answer
from optimizer.plan import stock_plan

VOCABULARY = {"[UNK]": 0, "pay": 1, "my": 2, "bill": 3}
MAX_LENGTH = 5
SETTINGS = ServeSettings(
    model="unused", plan=stock_plan(1, batch=1), max_inputs_per_request=4, default_timeout_s=8.0, max_timeout_s=60.0
)


class Desk(Dispatcher):
    """Takes inputs like a dispatcher; the test settles them."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.submitted: list[tuple[str, list[int]]] = []
        self.deadlines_s: list[float] = []
        self.flights: list[LiveFlight] = []
        self.arrivals_s: list[float] = []
        self.given_up: list[tuple[str, str]] = []
        self.taken = threading.Event()
        self.checked: list[tuple[int, float]] = []
        self.coming: list[int] = []
        self.refused: list[tuple[str, int]] = []
        self.settle: Settle | None = None
        self.refusal: OfframpError | None = None
        self.early_refusal: OfframpError | None = None

    def check(self, num_inputs: int, deadline_s: float, *, num_coming: int = 0) -> None:
        self.checked.append((num_inputs, deadline_s))
        self.coming.append(num_coming)
        if self.early_refusal is not None:
            raise self.early_refusal

    def refuse(self, error: OfframpError, num_inputs: int) -> NoReturn:
        self.refused.append((error.kind, num_inputs))
        raise error

    def submit(
        self,
        inputs: Sequence[tuple[str, Encoded]],
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float | None = None,
        request_id: str = "",
    ) -> list[LiveFlight]:
        assert arrived_s is not None
        self.arrivals_s.append(arrived_s)
        if self.refusal is not None:
            raise self.refusal
        self.submitted.extend((key, encoded.tensors[0].tolist()) for key, encoded in inputs)
        self.deadlines_s.append(deadline_s)
        self.settle = settle
        self.flights = [
            Flight(
                Query(key=key, encoded=encoded, serial=serial, request_id=request_id, settle=settle),
                arrived_s,
                deadline_s,
                0,
            )
            for serial, (key, encoded) in enumerate(inputs)
        ]
        self.taken.set()
        return self.flights

    def give_up(self, flights: Sequence[LiveFlight], reason: str) -> None:
        self.given_up.extend((flight.input.key, reason) for flight in flights if not flight.settled)

    def outcome(self, index: int, outcome: Answer | OfframpError) -> None:
        assert self.settle is not None
        self.flights[index].settled = True
        self.settle(self.flights[index], outcome)


def word_codec() -> TextCodec:
    tokenizer = Tokenizer(models.WordLevel(VOCABULARY, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    codec = TextCodec(MAX_LENGTH)
    codec._tokenizer = TextTokenizer(tokenizer, MAX_LENGTH)
    return codec


@dataclass
class Scene:
    """A service over a desk."""

    clock: ManualClock = field(default_factory=ManualClock)
    settings: ServeSettings = SETTINGS

    def __post_init__(self) -> None:
        self.desk = Desk(self.clock)
        self.service = InferService(word_codec(), self.desk, self.settings, self.clock)

    async def start(self, request: InferRequest) -> asyncio.Task[list[Answer]]:
        """A request whose inputs have been submitted."""
        task = asyncio.create_task(self.service.infer(request))
        for _ in range(3):
            await asyncio.sleep(0)
        return task


def ask(*texts: str, ids: Sequence[str] = (), truncate: bool = False, timeout_s: float | None = None) -> InferRequest:
    return InferRequest(
        rows=texts, ids=tuple(ids) or tuple("abcdefgh"[: len(texts)]), truncate=truncate, timeout_s=timeout_s
    )


def answer(name: str) -> Answer:
    return Answer(sample_id=name, value=0, score=1.0, exit=0)


async def test_answers_come_in_the_order_of_the_texts_whatever_order_they_were_found_in() -> None:
    scene = Scene()
    task = await scene.start(ask("pay", "my bill", "it"))
    assert scene.desk.submitted == [("a", [1]), ("b", [2, 3]), ("c", [0])]
    for index in (2, 0, 1):
        assert not task.done()
        scene.desk.outcome(index, answer("abc"[index]))
    assert [each.sample_id for each in await task] == ["a", "b", "c"]
    assert scene.desk.given_up == []


async def test_the_first_error_ends_the_request_and_the_rest_is_given_up() -> None:
    scene = Scene()
    task = await scene.start(ask("pay", "my", "bill", "it"))
    scene.desk.outcome(3, answer("d"))
    scene.desk.outcome(1, ExecutionError("first"))
    scene.desk.outcome(0, ExecutionError("second"))
    with pytest.raises(ExecutionError, match="first"):
        await task
    assert scene.desk.given_up == [("c", "execution")]


async def test_the_deadline_is_the_timeout_from_now_and_no_later_than_the_slo() -> None:
    with_slo = SETTINGS.model_copy(update={"slo_s": 1.5})
    found = {}
    for settings in (SETTINGS, with_slo):
        for timeout_s in (None, 1.0, 2.5, 60.0):
            scene = Scene(ManualClock(100.0), settings)
            task = await scene.start(ask("pay", timeout_s=timeout_s))
            scene.desk.outcome(0, answer("a"))
            await task
            assert scene.desk.arrivals_s == [100.0]
            found[settings.slo_s, timeout_s] = scene.desk.deadlines_s
    assert found == {
        (None, None): [108.0],
        (None, 1.0): [101.0],
        (None, 2.5): [102.5],
        (None, 60.0): [160.0],
        (1.5, None): [101.5],
        (1.5, 1.0): [101.0],
        (1.5, 2.5): [101.5],
        (1.5, 60.0): [101.5],
    }


async def test_what_cannot_be_in_time_is_refused_before_it_is_tokenized() -> None:
    scene = Scene()
    scene.desk.early_refusal = AdmissionError("too late", retry_after_s=0.5)
    with pytest.raises(AdmissionError, match="too late"):
        await scene.service.infer(ask("pay", "pay " * 6))  # the second is too long: nobody has looked
    assert (scene.desk.checked, scene.desk.submitted) == ([(2, 8.0)], [])


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (60.001, InputError, "a timeout of 60.001 s; at most 60 s are taken"),
        (1e30, InputError, r"a timeout of 1e\+30 s; at most 60 s are taken"),
        (float("inf"), InputError, "a timeout of inf s; at most 60 s are taken"),
        (["pay"] * 5, InputError, "5 inputs in one request; at most 4 are taken"),
        (["pay", "pay " * 6], UnprocessableInputError, "input 1 has 6 tokens, the model takes 5"),
    ],
    ids=["timeout", "long timeout", "endless", "too many", "too long"],
)
async def test_what_is_not_allowed_refuses_its_request_and_says_what_is(
    request_: float | list[str], error: type[InputError], words: str
) -> None:
    scene = Scene()
    asked = ask(*request_) if isinstance(request_, list) else ask("pay", timeout_s=request_)
    with pytest.raises(error, match=words):
        await scene.service.infer(asked)
    assert scene.desk.submitted == []


async def test_what_the_network_does_not_take_refuses_its_own_request_alone() -> None:
    scene = Scene()
    floats = TensorSpec(name="hidden", shape=(), per_token=True)
    scene.service = InferService(word_codec(), scene.desk, SETTINGS, scene.clock, inputs=(floats,))
    with pytest.raises(UnprocessableInputError, match=r"input 0: .* takes 'hidden' as float32 \[2\]; .* int32 \[2\]"):
        await scene.service.infer(ask("my bill"))
    assert scene.desk.submitted == []
    token_ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True)
    scene.service = InferService(word_codec(), scene.desk, SETTINGS, scene.clock, inputs=(token_ids,))
    task = await scene.start(ask("my bill"))
    scene.desk.outcome(0, answer("a"))
    assert len(await task) == 1


async def test_a_text_beyond_the_models_length_is_cut_if_asked() -> None:
    scene = Scene()
    task = await scene.start(ask("pay " * 6, truncate=True))
    scene.desk.outcome(0, answer("a"))
    await task
    assert scene.desk.submitted == [("a", [1] * MAX_LENGTH)]


async def test_what_the_dispatcher_refuses_is_passed_on() -> None:
    scene = Scene()
    scene.desk.refusal = OverloadedError("full", retry_after_s=2.0)
    with pytest.raises(OverloadedError, match="full"):
        await scene.service.infer(ask("pay"))


async def test_at_the_deadline_the_caller_is_told_and_what_has_no_answer_is_given_up() -> None:
    scene = Scene()
    task = await scene.start(ask("pay", "my", "bill", timeout_s=2.0))
    scene.desk.outcome(0, DeadlineError("no answer within 2 s"))
    scene.desk.outcome(2, answer("c"))  # too late
    with pytest.raises(DeadlineError, match="no answer within 2 s"):
        await task
    assert scene.desk.given_up == [("b", "deadline")]


async def test_a_caller_that_goes_away_gives_its_inputs_up() -> None:
    scene = Scene()
    task = await scene.start(ask("pay", "my"))
    scene.desk.outcome(1, answer("b"))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert scene.desk.given_up == [("a", "abandoned")]


class ThreadNoting(TextCodec):
    """Notes whether it was called on the event loop's thread."""

    def __init__(self) -> None:
        super().__init__(MAX_LENGTH)
        self._tokenizer = word_codec()._tokenizer
        self.on_main_thread: list[bool] = []

    def encode(self, rows: Sequence[str], *, truncate: bool = False) -> list[Encoded]:
        self.on_main_thread.append(threading.current_thread() is threading.main_thread())
        return super().encode(rows, truncate=truncate)


async def test_long_texts_are_tokenized_off_the_event_loop() -> None:
    codec, clock = ThreadNoting(), ManualClock()
    service = InferService(codec, Desk(clock), SETTINGS, clock)
    for num_chars in (LONG_CHARS, LONG_CHARS + 1):
        with pytest.raises(InputError):
            await service.infer(ask("pay " * (num_chars // 4) + " " * (num_chars % 4)))
    assert codec.on_main_thread == [True, False]


class Slow(TextCodec):
    """Encodes in threads, and only once it is let."""

    def __init__(self) -> None:
        super().__init__(MAX_LENGTH)
        self._tokenizer = word_codec()._tokenizer
        self.may_go_on = threading.Event()
        self.encoded: list[str] = []

    def is_slow(self, rows: Sequence[str]) -> bool:
        return True

    def encode(self, rows: Sequence[str], *, truncate: bool = False) -> list[Encoded]:
        assert self.may_go_on.wait(10.0)
        self.encoded.extend(rows)
        return super().encode(rows, truncate=truncate)


async def test_what_waits_to_be_encoded_is_bounded_and_then_refused() -> None:
    codec, clock = Slow(), ManualClock()
    desk = Desk(clock)
    service = InferService(codec, desk, SETTINGS.model_copy(update={"max_queued": 3}), clock)
    waiting = asyncio.create_task(service.infer(ask("pay", "my")))
    await asyncio.sleep(0)
    with pytest.raises(OverloadedError, match="2 inputs wait to be encoded, at most 3 are taken"):
        await service.infer(ask("bill", "bill"))
    assert (desk.coming, desk.refused) == ([0, 2], [("overloaded", 2)])
    codec.may_go_on.set()
    await asyncio.to_thread(desk.taken.wait, 10.0)
    desk.outcome(0, answer("a"))
    desk.outcome(1, answer("b"))
    assert len(await waiting) == 2


async def test_what_is_not_encoded_by_its_deadline_costs_no_encoding() -> None:
    codec, clock = Slow(), ManualClock()
    desk = Desk(clock)
    service = InferService(codec, desk, SETTINGS, clock)
    busy = [asyncio.create_task(service.infer(ask("pay", timeout_s=60.0))) for _ in range(MOST_ENCODERS)]
    await asyncio.sleep(0)
    with pytest.raises(DeadlineError, match=r"no answer within 0\.01 s"):
        await service.infer(ask("bill", timeout_s=0.01))
    assert desk.refused == [("deadline", 1)]
    codec.may_go_on.set()
    for task in busy:
        task.cancel()
    await asyncio.gather(*busy, return_exceptions=True)
    assert "bill" not in codec.encoded
