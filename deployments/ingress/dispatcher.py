"""The live driver of an ingress: sends calls over connections to replicas, and passes outcomes to callers."""

from __future__ import annotations

import asyncio
import contextvars
import logging
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, cast

import numpy as np
import numpy.typing as npt

from deployments.ingress.core.calls import (
    AbortCall,
    Action,
    Answered,
    Call,
    Dropped,
    SendCall,
    call_weight,
    placements_of,
)
from deployments.ingress.core.ingress_core import Driver, IngressCore
from deployments.ingress.core.inputs import Inputs, PendingInput, Settle
from deployments.ingress.core.routes import KVPlacement
from deployments.ingress.link import ReplicaLinks
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import Clock
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec, ChainEncoded, PrunedRow
from earlyexit.errors import ExecutionError, OfframpError
from earlyexit.network.boundary import Answer, Encoded, WirePiece, entry_piece
from earlyexit.words import num_words
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan


class Alarm(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None: ...


CallLater = Callable[[float, Callable[[], None]], Alarm]
"""Starts a timer that calls a function after a number of seconds."""


def call_later(seconds: float, function: Callable[[], None]) -> Alarm:
    """Starts a timer on the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, function)


UNKNOWN = PendingInput(0, 0.0, 0.0)
"""Stands for inputs that a reply mentions but its call did not contain. No call and no chain holds it."""
MISFIT = "the encoded inputs do not fit together"

# A child of the logger that Serve writes as JSON, with the request id if there is one.
logger = logging.getLogger(f"ray.serve.{__name__}")

MOST_HOPS = 100_000
"""The largest number of hop times that are kept for the metrics, which are exported once a second."""


class Dispatcher(Driver):
    """The driver of one ingress, on its event loop."""

    def __init__(
        self,
        core: IngressCore,
        links: ReplicaLinks,
        clock: Clock,
        *,
        later: CallLater = call_later,
        codec: Codec[Any] | None = None,
    ) -> None:
        """`codec`: the model's codec. A `ChainCodec` encodes inputs for every network that they enter."""
        super().__init__(core, clock)
        self._links = links
        self._codec = codec if isinstance(codec, ChainCodec) else None
        self.hops: deque[tuple[str, float]] = deque(maxlen=MOST_HOPS)
        """For parts of replies, the slot and the seconds that were spent outside the stage."""
        self._later = later
        self._serial = 0
        self._is_pump_scheduled = False
        self._alarm: Alarm | None = None
        # Calls to stages run outside of any request's context, because Serve would treat them as its children.
        self._context = contextvars.copy_context()
        self._tasks: dict[Call, asyncio.Task[None]] = {}

    def follow(self, placed: PlacedPlan) -> None:
        self._links.check(placed)
        super().follow(placed)
        self._links.follow(self.core.placed)

    # Receive

    def check(self, num_inputs: int, deadline_s: float, *, num_coming: int = 0) -> None:
        """See `IngressCore.check`."""
        self.core.check(num_inputs, deadline_s, self.clock.now_s(), num_coming=num_coming)

    def submit(
        self,
        inputs: Sequence[tuple[str, Encoded]],
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float | None = None,
        request_id: str = "",
    ) -> list[PendingInput]:
        """Submits a request's inputs, each with its id. `settle` is called once for each unless it is given up.

        `arrived_s`: when the request arrived; None: now. Raises what `IngressCore.submit` raises.
        """
        now_s = self.clock.now_s()
        arrived_s = now_s if arrived_s is None else arrived_s
        pending = [
            PendingInput(serial, arrived_s, deadline_s, encoded.length, encoded, settle, key=key, request_id=request_id)
            for serial, (key, encoded) in enumerate(inputs, self._serial + 1)
        ]
        self.core.submit(pending, now_s)
        self._serial += len(inputs)
        self.do(())
        return pending

    def step(
        self,
        encoded: Encoded,
        placement: KVPlacement,
        deadline_s: float,
        settle: Settle,
        *,
        arrived_s: float,
        request_id: str = "",
    ) -> PendingInput:
        """Submits an input of a sequence; see `IngressCore.step`. The caller must call `expire` at its deadline."""
        serial = self._serial + 1
        pending = PendingInput(serial, arrived_s, deadline_s, encoded.length, encoded, settle, request_id=request_id)
        self.core.step(pending, placement, self.clock.now_s())
        self._serial = serial
        self.do(())
        return pending

    def expire(self, pending: PendingInput) -> None:
        """See `IngressCore.expire`."""
        self.do(self.core.expire(pending, self.clock.now_s()))

    def end(self, placement: KVPlacement) -> None:
        """Makes replicas free the keys and values of a sequence that has ended or restarts elsewhere."""
        placement.has_ended = True
        for slot, replica in placement.replicas.items():
            self._links.end(slot, replica, placement.number)

    def give_up(self, inputs: Inputs, reason: str) -> None:
        """Drops inputs whose caller no longer waits. Those without an outcome are counted under `reason`."""
        self.do(self.core.give_up(inputs, reason, self.clock.now_s()))

    # Drive

    def pump(self) -> bool:
        if self.core.is_due:
            self._schedule_pump()
        return False

    def _schedule_pump(self) -> None:
        # The core is pumped later, so that requests of the same event loop iteration are sent in one call.
        if not self._is_pump_scheduled:
            self._is_pump_scheduled = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._is_pump_scheduled = False
        if self.core.is_due:
            self.do(self.core.pump(self.clock.now_s()))

    def set_timer(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._later(max(0.0, at_s - self.clock.now_s()), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm = None
        self.wake()

    def carry_out(self, action: Action) -> None:
        """Carries out an action. Errors are logged; a call that cannot be sent counts as failed."""
        try:
            super().carry_out(action)
        except Exception:
            logger.exception("the ingress could not carry out %s", type(action).__name__)
            if isinstance(action, SendCall) and action.call not in self._tasks:
                self._fail(action.call)

    def answered(self, answered: Answered) -> None:
        settle_all(zip(answered.inputs, answered.answers, strict=True))

    def dropped(self, dropped: Dropped) -> None:
        if dropped.error is not None:
            settle_all((pending, dropped.error) for pending in dropped.inputs)

    def abort_call(self, abort_call: AbortCall) -> None:
        call = abort_call.call
        requests = requests_of(call.inputs)
        logger.warning("%s did not reply in time for %d inputs of %s", call.stage.slot, len(call.inputs), requests)
        task = self._tasks.pop(call, None)
        if task is not None:
            task.cancel()

    def _fail(self, call: Call) -> None:
        """Retries the remaining inputs of a call."""
        self.do(self.core.fail(call, call.remaining(), self.clock.now_s()))

    def _lose(self, call: Call, inputs: Inputs, error: Exception, why: str) -> None:
        """Drops inputs that cannot be encoded or joined into a batch."""
        logger.warning("%d inputs of %s are lost, %s: %r", len(inputs), requests_of(inputs), why, error)
        reported = ExecutionError(f"{why}: {type(error).__name__}: {error}")
        self.do(self.core.lose(call, inputs, reported, self.clock.now_s()))

    # Send

    def send(self, send: SendCall) -> None:
        call, block, payload, network, rows = send
        if network is None:
            self._send(call, payload if rows is None else payload.select(rows), call.inputs)
        elif self._codec is None:
            # Inputs of a single network were encoded when they arrived.
            try:
                ids = [sample_id_of(self.core.name, each) for each in call.inputs]
                piece = entry_piece(ids, [each.encoded for each in call.inputs])
            except Exception as error:
                self._lose(call, call.inputs, error, MISFIT)
            else:
                self._send(call, piece, call.inputs)
        else:
            plan = self.core.placed.plan
            entry = NetworkEntry(self.core.name, self._codec, call, block, network, payload, plan)
            if entry.is_slow():
                self._tasks[call] = self._start_task(self._enter_slowly(call, entry))
            else:
                self._enter(call, entry)

    async def _enter_slowly(self, call: Call, entry: NetworkEntry) -> None:
        """Encodes the inputs in a thread, and sends them to a network's first block."""
        try:
            await asyncio.to_thread(entry.prepare)
            self._enter(call, entry)
        except Exception as error:
            self._tasks.pop(call, None)
            self._lose(call, call.remaining(), error, MISFIT)

    def _enter(self, call: Call, entry: NetworkEntry) -> None:
        """Sends inputs to a network's first block."""
        self._tasks.pop(call, None)  # the task that encoded them in a thread
        try:
            piece = entry.enter(self.core.placed.plan)
        except Exception as error:
            self._lose(call, call.inputs, error, MISFIT)
            return
        for pending, refusal in entry.refused:
            self._lose(call, (pending,), refusal, "the next network's codec cannot encode it")
        if entry.crosses:
            waited_s = [self.clock.now_s() - call.started_s] * len(entry.inputs)
            words, pruned_words = entry.words()
            self.core.counts.record_crossings(piece.next_block, waited_s, words=words, pruned_words=pruned_words)
        if entry.inputs:
            self._send(call, piece, entry.inputs)

    def _send(self, call: Call, piece: WirePiece, inputs: Inputs) -> None:
        now_s = self.clock.now_s()
        placements = placements_of(inputs)
        stage_call = StageCall(
            piece=piece,
            # A negative time makes the stage drop an input that is no longer awaited.
            remaining_s=tuple(each.deadline_s - now_s if self.core.is_awaited(call, each) else -1.0 for each in inputs),
            reserve_s=call.reserve_s,
            assignment=call.stage.assignment,
            probe=call.probe,
            sequences=tuple([placement.number for placement in placements]),
        )
        self._tasks[call] = self._start_task(self._run(call, stage_call, inputs, placements))

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    async def _run(self, call: Call, stage_call: StageCall, inputs: Inputs, placements: Sequence[KVPlacement]) -> None:
        """Runs a call on a stage. Inputs that are unsettled afterwards, because of an error, are retried."""
        by_id = dict(zip(stage_call.piece.sample_ids, inputs, strict=True))
        weight, batch = call_weight(call.stage, stage_call.piece.next_block, inputs)
        on_chunk = partial(self._on_chunk, call, by_id)
        try:
            await self._links.call(stage_call, weight=weight, batch=batch, take=on_chunk, placements=placements)
        except Exception as error:
            left = call.remaining()
            logger.warning("%s failed for %d inputs of %s: %r", call.stage.slot, len(left), requests_of(left), error)
        finally:  # also after a cancelled call, because the replica may have begun the sequence in the meantime
            for placement in placements:
                if placement.has_ended:
                    self.end(placement)
        self._tasks.pop(call, None)  # not reached when the task is cancelled
        if call.num_remaining:
            self._fail(call)

    # Settle

    def _on_chunk(self, call: Call, inputs: Mapping[str, PendingInput], chunk: Chunk) -> None:
        """Passes a part of a call's reply to the core."""
        core, now_s = self.core, self.clock.now_s()
        if chunk.seen:
            core.observe(call, [(inputs.get(seen.sample_id, UNKNOWN), seen) for seen in chunk.seen])
        for timed_answers, settle in ((chunk.answers, core.answer), (chunk.early, core.answer_early)):
            for block, answered, answers in by_block(inputs, timed_answers):
                self.do(settle(call, answered, block, now_s, answers))
        for sample_id, error in chunk.lost:
            self.do(core.lose(call, [inputs.get(sample_id, UNKNOWN)], error, now_s))
        if chunk.going_on is not None:
            piece = chunk.going_on.piece
            survivors = [inputs.get(sample_id, UNKNOWN) for sample_id in piece.sample_ids]
            self.do(core.go_on(call, survivors, piece.next_block, piece, now_s))
        # Scheduled even if nothing is due yet: sequences submit their next steps before `_pump` runs.
        self._schedule_pump()
        if chunk.timings:
            inside_s = max(timing.queue_s + timing.compute_s for timing in chunk.timings)
            self.hops.append((call.stage.slot, max(0.0, now_s - call.started_s - inside_s)))


def by_block(
    inputs: Mapping[str, PendingInput], answers: Sequence[tuple[Answer, Timing]]
) -> Iterable[tuple[int, list[PendingInput], list[Answer]]]:
    """Yields, for each exit block, the inputs that left after it and their answers."""
    groups: defaultdict[int, tuple[list[PendingInput], list[Answer]]] = defaultdict(lambda: ([], []))
    for answer, _ in answers:
        group_inputs, group_answers = groups[answer.exit]
        group_inputs.append(inputs.get(answer.sample_id, UNKNOWN))
        group_answers.append(answer)
    for block, (group_inputs, group_answers) in groups.items():
        yield block, group_inputs, group_answers


def settle_all(outcomes: Iterable[tuple[PendingInput, Answer | OfframpError]]) -> None:
    """Settles every input. An error in one callback does not keep the others from theirs."""
    for pending, outcome in outcomes:
        try:
            pending.settle(pending, outcome)
        except Exception:
            logger.exception("the callback for an input of %s failed", pending.request_id)


def requests_of(inputs: Inputs) -> str:
    """Returns the ids of the inputs' first few requests, for the log."""
    ids = sorted({each.request_id for each in inputs})
    return ", ".join(ids[:5]) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")


def sample_id_of(ingress: str, pending: PendingInput) -> str:
    """Returns the id that an input has on the wire: unique in the service and for each attempt."""
    return f"{pending.key}#{ingress}.{pending.serial}.{pending.attempt}"


def serial_and_attempt(sample_id: str) -> tuple[int, int]:
    """Returns an input's serial number and attempt from its id on the wire."""
    _, serial, attempt = sample_id.rpartition("#")[2].split(".")
    return int(serial), int(attempt)


THREAD_FACTOR = 10
"""Rows are encoded in a thread if this many times as many rows would be slow at the API. On the event loop, encoding
delays replies, so the bound is stricter than at the API (for texts 2,000 characters, one or two milliseconds)."""


class NetworkEntry:
    """Inputs that enter a network of a cascade: new inputs, or survivors of the previous network.

    Words of survivors may be pruned. Every input is encoded once for each network that it reaches.
    """

    def __init__(
        self,
        ingress: str,
        codec: ChainCodec,
        call: Call,
        block: int,
        network: int,
        going_on: WirePiece | None,
        plan: Plan,
    ) -> None:
        """`block`: the network's first block. `going_on`: the output of the previous network; None for new inputs."""
        self.inputs = call.inputs
        """After `enter`, the inputs of the piece, in its order."""
        self.refused: list[tuple[PendingInput, Exception]] = []
        """Inputs that the network's codec cannot encode."""
        self._ingress = ingress
        self._codec = codec
        self._block = block
        self._network = network
        self._going_on = going_on
        self._alike = codec.alike(network)
        self._is_unpruned = call.watch == "unpruned"
        """Whether the inputs are unpruned copies of probes."""
        self._before = 0 if going_on is None else bisect_right(plan.networks, going_on.next_block - 1)
        """The network that the inputs come from."""
        self._may_prune = going_on is not None and bool(plan.networks)
        self._alpha: float | None = None
        """The pruning rate; None: no words are pruned here, but words that were pruned earlier stay pruned."""
        self._importance: Mapping[str, npt.NDArray[np.floating[Any]]] = {}
        """By sample id, the importance of each token in the previous network. Empty if it was not measured."""
        # Pruning needs the attention of the whole network, which inputs lack if the plan now skips their network.
        if going_on is not None and going_on.next_block in plan.networks:
            alpha = plan.prune.get(going_on.next_block - 1)
            if alpha is not None and going_on.tensors:
                by_input = np.split(going_on.tensors[-1].astype(np.float64), np.cumsum(going_on.lengths_B)[:-1])
                self._alpha = alpha
                self._importance = dict(zip(going_on.sample_ids, by_input, strict=True))

    @property
    def crosses(self) -> bool:
        """Whether the inputs come from another network."""
        return self._going_on is not None

    def is_slow(self) -> bool:
        """Whether `prepare` takes milliseconds, so that it must run in a thread."""
        rows = [_encoded(each).row for each in (self.inputs if self._importance else self._missing())]
        return bool(rows) and self._codec.of(self._network).is_slow(rows * THREAD_FACTOR)

    def prepare(self) -> None:
        """Prunes the inputs, and encodes those that have no encoding for the network yet.

        It may run in a thread, and a second call does nothing. If the codec fails, no input is encoded, and `enter`
        finds the input that causes the error. A text that cannot be pruned keeps its words.
        """
        for each in self.inputs if self._may_prune else ():
            try:
                self._prune(_encoded(each), sample_id_of(self._ingress, each))
            except Exception as error:
                logger.warning("a text of %s could not be pruned: %r", each.request_id, error)
        if missing := self._missing():
            with suppress(Exception):
                self._encode(missing)

    def enter(self, plan: Plan) -> WirePiece:
        """Returns the inputs as a piece for the network's first block, and sets their `tokens` for the network.

        If the plan prunes words after the network, the network is told to measure the attention that tokens receive.
        """
        if self._going_on is None and not self._is_unpruned:  # every attempt begins without pruned words
            for each in self.inputs:
                _encoded(each).cut.clear()
        self.prepare()
        entered, encodings = list[PendingInput](), list[Encoded]()
        for each in self.inputs:
            encoding = self._encoding(each)
            if encoding is None:
                try:
                    [encoding] = self._encode([each])
                except Exception as error:
                    self.refused.append((each, error))
                    continue
            each.tokens = encoding.length
            entered.append(each)
            encodings.append(encoding)
        self.inputs = entered
        ids = [sample_id_of(self._ingress, each) for each in entered]
        states_BS = None if self._going_on is None else _states_of(ids, self._going_on)
        measured = bool(plan.networks) and plan.networks[self._network] - 1 in plan.prune
        return entry_piece(ids, encodings, block=self._block, state_BS=states_BS, measured=measured)

    def words(self) -> tuple[int, int]:
        """Returns the words of the inputs whose attention is known, and how many of them were pruned."""
        words = pruned = 0
        for each in self.inputs if self._importance else ():
            chain_encoded = _encoded(each)
            earlier, pruned_row = chain_encoded.cut.get(self._before), chain_encoded.cut.get(self._network)
            before = num_words(chain_encoded.row if earlier is None else earlier.row)
            words += before
            pruned += 0 if pruned_row is None else before - num_words(pruned_row.row)
        return words, pruned

    def _prune(self, chain_encoded: ChainEncoded, sample_id: str) -> None:
        """Sets the pruned row of an input for the network, if it has lost words here or earlier."""
        if self._network in chain_encoded.cut:
            return
        earlier = chain_encoded.cut.get(self._before)
        row = chain_encoded.row if earlier is None else earlier.row
        importance_N = self._importance.get(sample_id)
        if self._alpha is not None and importance_N is not None:
            pruned = self._codec.pruned_for(self._network, self._before, row, importance_N, self._alpha)
            # A row that loses no words is stored too, so that it is not examined again.
            chain_encoded.cut[self._network] = PrunedRow(row, pruned.encoded) if pruned.row == row else pruned
        elif earlier is not None and earlier.row is not chain_encoded.row:
            chain_encoded.cut[self._network] = self._codec.pruned_row(self._network, row)

    def _encoding(self, each: PendingInput) -> Encoded | None:
        """Returns an input's encoding for the network; None if it has none yet."""
        pruned_row = None if self._is_unpruned else _encoded(each).cut.get(self._network)
        return _encoded(each).of(self._alike) if pruned_row is None else pruned_row.encoded

    def _missing(self) -> list[PendingInput]:
        return [each for each in self.inputs if self._encoding(each) is None]

    def _encode(self, inputs: Inputs) -> list[Encoded]:
        chain_encoded = [_encoded(each) for each in inputs]
        encodings = self._codec.encoded([each.row for each in chain_encoded], self._alike, truncate=True)
        for each, encoding in zip(chain_encoded, encodings, strict=True):
            each.others[self._alike] = encoding
        return encodings


def _encoded(each: PendingInput) -> ChainEncoded:
    return cast("ChainEncoded", each.encoded)


def _states_of(ids: Sequence[str], going_on: WirePiece) -> Any:
    """Returns the exit policy's states of some of a piece's inputs."""
    if going_on.state_BS is None or tuple(ids) == going_on.sample_ids:
        return going_on.state_BS
    row_of = {sample_id: row for row, sample_id in enumerate(going_on.sample_ids)}
    return going_on.state_BS[np.array([row_of[each] for each in ids], dtype=np.int64)]
