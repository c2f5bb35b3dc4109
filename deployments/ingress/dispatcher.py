"""The live driver of an ingress: calls go over connections to replicas, outcomes to the callers of an event loop.

Inputs travel as pieces for a network's first block: new inputs, and those that cross into a chain's next network.
"""

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
    Action,
    Answered,
    Call,
    Dropped,
    HungUp,
    SendCall,
    homes_of,
    weigh,
)
from deployments.ingress.core.ingress_core import Driver, IngressCore
from deployments.ingress.core.inputs import Inputs, PendingInput, Settle
from deployments.ingress.core.routes import KVPlacement
from deployments.ingress.link import ReplicaLinks
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import Clock
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec, ChainEncoded, CutRow
from earlyexit.errors import ExecutionError, OfframpError
from earlyexit.network.boundary import Answer, Encoded, WirePiece, entry_piece
from earlyexit.words import num_words
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan


class Alarm(Protocol):
    """A timer that can be cancelled."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Alarm]
"""Has something called after so many seconds."""


def on_loop(seconds: float, call: Callable[[], None]) -> Alarm:
    """Sets a timer of the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, call)


UNKNOWN = PendingInput(0, 0.0, 0.0)
"""Stands for the inputs that a reply mentions but its call did not contain. No call and no chain has it."""
MISFIT = "the encoded inputs do not fit together"

# A child of the logger that Serve writes as JSON, with the request id where there is one.
logger = logging.getLogger(f"ray.serve.{__name__}")


MOST_HOPS = 100_000
"""Hops that are kept until metrics take them, once a second."""


class Dispatcher(Driver):
    """One per ingress, on its event loop."""

    def __init__(
        self,
        core: IngressCore,
        links: ReplicaLinks,
        clock: Clock,
        *,
        later: Later = on_loop,
        codec: Codec[Any] | None = None,
    ) -> None:
        """`codec`: the model's; a chain's encodes inputs for every network that they enter."""
        super().__init__(core, clock)
        self._links = links
        self._codec = codec if isinstance(codec, ChainCodec) else None
        self.hops: deque[tuple[str, float]] = deque(maxlen=MOST_HOPS)
        """By a stage's slot, the seconds that parts of replies spent outside the stage."""
        self._later = later
        self._serial = 0
        self._turn_planned = False
        self._alarm: Alarm | None = None
        # Calls to stages belong to no HTTP request: in a request's context Serve would take them for its children.
        self._context = contextvars.copy_context()
        self._tasks: dict[Call, asyncio.Task[None]] = {}

    def follow(self, placed: PlacedPlan) -> None:
        self._links.check(placed)
        super().follow(placed)
        self._links.follow(self.core.placed)

    # Receive

    def check(self, num_inputs: int, deadline_s: float, *, num_coming: int = 0) -> None:
        """Refuse a request before work is spent on it: raises AdmissionError or StageUnavailableError.

        `num_coming`: inputs that were admitted before and are still to be submitted.
        """
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
        """Take a request's inputs, each with its id; `settle` is called once for every one that is not given up.

        `arrived_s`: since when the caller waits; None for now. Raises what `IngressCore.submit` raises.
        """
        now_s = self.clock.now_s()
        since_s = now_s if arrived_s is None else arrived_s
        pending = [
            PendingInput(serial, since_s, deadline_s, encoded.length, encoded, settle, key=key, request_id=request_id)
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
        """Take an input of a sequence; see `submit` and `IngressCore.step`. Nothing ends it at its deadline: `expire`.

        Raises what `submit` raises, and SequenceLostError.
        """
        serial = self._serial + 1
        pending = PendingInput(serial, arrived_s, deadline_s, encoded.length, encoded, settle, request_id=request_id)
        self.core.step(pending, placement, self.clock.now_s())
        self._serial = serial
        self.do(())
        return pending

    def expire(self, pending: PendingInput) -> None:
        """End a sequence's input, whose deadline has come, and stop a call that hangs under it."""
        self.do(self.core.expire(pending, self.clock.now_s()))

    def end(self, placement: KVPlacement) -> None:
        """Let replicas forget a sequence that has ended, or that begins anew elsewhere."""
        placement.is_over = True
        for slot, replica in placement.replicas.items():
            self._links.end(slot, replica, placement.number)

    def give_up(self, inputs: Inputs, reason: str) -> None:
        """Forget inputs whose caller no longer waits; those without an outcome count as dropped for this reason."""
        self.do(self.core.give_up(inputs, reason, self.clock.now_s()))

    # Drive

    def pump(self) -> bool:
        if self.core.is_due:
            self._plan_turn()
        return False

    def _plan_turn(self) -> None:
        # Not at once: requests that arrive in the same turn of the loop leave in the same call.
        if not self._turn_planned:
            self._turn_planned = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._turn_planned = False
        if self.core.is_due:
            self.do(self.core.pump(self.clock.now_s()))

    def set_timer(self, at_s: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = self._later(max(0.0, at_s - self.clock.now_s()), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.wake()

    def carry_out(self, action: Action) -> None:
        """Carry out an action, whatever became of the one before; a call that cannot be sent has failed."""
        try:
            super().carry_out(action)
        except Exception:
            logger.exception("an ingress cannot carry out %s", type(action).__name__)
            if isinstance(action, SendCall) and action.call not in self._tasks:
                self._fail(action.call)

    def answered(self, answered: Answered) -> None:
        settle_all(zip(answered.inputs, answered.answers, strict=True))

    def dropped(self, dropped: Dropped) -> None:
        if dropped.error is not None:
            settle_all((pending, dropped.error) for pending in dropped.inputs)

    def hung_up(self, hung_up: HungUp) -> None:
        call = hung_up.call
        logger.warning("%s hangs under %d inputs of %s", call.stage.slot, len(call.inputs), requests_of(call.inputs))
        task = self._tasks.pop(call, None)
        if task is not None:
            task.cancel()

    def _fail(self, call: Call) -> None:
        """Have what a call has left start again."""
        self.do(self.core.fail(call, call.inside(), self.clock.now_s()))

    def _lose(self, call: Call, inputs: Inputs, error: Exception, why: str) -> None:
        logger.warning("%d inputs of %s are lost, %s: %r", len(inputs), requests_of(inputs), why, error)
        told = ExecutionError(f"{why}: {type(error).__name__}: {error}")
        self.do(self.core.lose(call, inputs, told, self.clock.now_s()))

    # Send

    def send(self, send: SendCall) -> None:
        call, block, payload, network, rows = send
        if network is None:
            self._send(call, payload if rows is None else payload.select(rows), call.inputs)
        elif self._codec is None:
            # Of a model that is one network, inputs were encoded as they came.
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
                self._tasks[call] = self._begin(self._enter_slowly(call, entry))
            else:
                self._enter(call, entry)

    async def _enter_slowly(self, call: Call, entry: NetworkEntry) -> None:
        """Encode the inputs beside the event loop first."""
        try:
            await asyncio.to_thread(entry.prepare)
            self._enter(call, entry)
        except Exception as error:
            self._tasks.pop(call, None)
            self._lose(call, call.inside(), error, MISFIT)

    def _enter(self, call: Call, entry: NetworkEntry) -> None:
        """Send inputs to a network's first block."""
        self._tasks.pop(call, None)  # what encoded them beside the event loop is done
        try:
            piece = entry.enter(self.core.placed.plan)
        except Exception as error:
            self._lose(call, call.inputs, error, MISFIT)
            return
        for pending, refusal in entry.refused:
            self._lose(call, (pending,), refusal, "the next network's codec makes nothing of it")
        if entry.crosses:
            waited_s = [self.clock.now_s() - call.started_s] * len(entry.inputs)
            words, pruned_words = entry.words()
            self.core.counts.cross(piece.next_block, waited_s, words=words, pruned_words=pruned_words)
        if entry.inputs:
            self._send(call, piece, entry.inputs)

    def _send(self, call: Call, piece: WirePiece, inputs: Inputs) -> None:
        now_s = self.clock.now_s()
        homes = homes_of(inputs)
        stage_call = StageCall(
            piece=piece,
            # An input that no request waits for any more has no time left: the stage drops it unrun.
            remaining_s=tuple(each.deadline_s - now_s if self.core.is_awaited(call, each) else -1.0 for each in inputs),
            reserve_s=call.reserve_s,
            assignment=call.stage.assignment,
            probe=call.probe,
            sequences=tuple([home.number for home in homes]),
        )
        self._tasks[call] = self._begin(self._carry(call, stage_call, inputs, homes))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    async def _carry(self, call: Call, stage_call: StageCall, inputs: Inputs, homes: Sequence[KVPlacement]) -> None:
        """Have a stage run a call; what it leaves unsettled, because it or the way to it failed, starts again."""
        by_id = dict(zip(stage_call.piece.sample_ids, inputs, strict=True))
        weight, batch = weigh(call.stage, stage_call.piece.next_block, inputs)
        take = partial(self._take, call, by_id)
        try:
            await self._links.call(stage_call, weight=weight, batch=batch, take=take, homes=homes)
        except Exception as error:
            left = call.inside()
            logger.warning("%s failed under %d inputs of %s: %r", call.stage.slot, len(left), requests_of(left), error)
        finally:  # also where the call was hung up: the replica may have begun the sequence in the meantime
            for home in homes:
                if home.is_over:
                    self.end(home)
        self._tasks.pop(call, None)  # not when cancelled: nothing starts while an ingress ends
        if call.num_inside:
            self._fail(call)

    # Settle

    def _take(self, call: Call, inputs: Mapping[str, PendingInput], chunk: Chunk) -> None:
        """Pass a part of a call's reply to the core."""
        core, now_s = self.core, self.clock.now_s()
        if chunk.seen:
            core.see(call, [(inputs.get(seen.sample_id, UNKNOWN), seen) for seen in chunk.seen])
        for given, take in ((chunk.answers, core.answer), (chunk.early, core.answer_early)):
            for block, mine, answers in by_block(inputs, given):
                self.do(take(call, mine, block, now_s, answers))
        for sample_id, error in chunk.lost:
            self.do(core.lose(call, [inputs.get(sample_id, UNKNOWN)], error, now_s))
        if chunk.going_on is not None:
            piece = chunk.going_on.piece
            mine = [inputs.get(sample_id, UNKNOWN) for sample_id in piece.sample_ids]
            self.do(core.go_on(call, mine, piece.next_block, piece, now_s))
        # Even if nothing is due yet: sequences ask for their next steps before this turn comes, and it sends them.
        self._plan_turn()
        if chunk.timings:
            inside_s = max(timing.queue_s + timing.compute_s for timing in chunk.timings)
            self.hops.append((call.stage.slot, max(0.0, now_s - call.started_s - inside_s)))


def by_block(
    inputs: Mapping[str, PendingInput], answers: Sequence[tuple[Answer, Timing]]
) -> Iterable[tuple[int, list[PendingInput], list[Answer]]]:
    """Groups answers by the block after which they left; nearly always one."""
    found: defaultdict[int, tuple[list[PendingInput], list[Answer]]] = defaultdict(lambda: ([], []))
    for answer, _ in answers:
        mine, given = found[answer.exit]
        mine.append(inputs.get(answer.sample_id, UNKNOWN))
        given.append(answer)
    for block, (mine, given) in found.items():
        yield block, mine, given


def settle_all(outcomes: Iterable[tuple[PendingInput, Answer | OfframpError]]) -> None:
    """Give every caller its outcome, even where giving the one before failed."""
    for pending, outcome in outcomes:
        try:
            pending.settle(pending, outcome)
        except Exception:
            logger.exception("an input of %s has an outcome that its caller cannot take", pending.request_id)


def requests_of(inputs: Inputs) -> str:
    """Names the first few requests of the inputs, for the log."""
    found = sorted({each.request_id for each in inputs})
    return ", ".join(found[:5]) + (f" and {len(found) - 5} more" if len(found) > 5 else "")


def sample_id_of(ingress: str, pending: PendingInput) -> str:
    """Returns the id by which an input travels: unique in the service, and another one for each attempt."""
    return f"{pending.key}#{ingress}.{pending.serial}.{pending.attempt}"


def serial_and_attempt(sample_id: str) -> tuple[int, int]:
    """Reads an input's serial number and attempt from the id by which it travels."""
    _, serial, attempt = sample_id.rpartition("#")[2].split(".")
    return int(serial), int(attempt)


TIMES_SLOWER = 10
"""So many times as many rows are asked about before some are encoded on the event loop: there, replies wait meanwhile.
Of texts it is 2,000 characters, a millisecond or two."""


class NetworkEntry:
    """Inputs on their way into a network of a chain: new ones, or those that cross, of which some may lose words.

    Every input is encoded once for every network that it gets to.
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
        """`block`: the first that they wait for; `going_on`: what the network before let go of, None of new inputs."""
        self.inputs = call.inputs
        """After `enter`, the inputs of the piece, in its order."""
        self.refused: list[tuple[PendingInput, Exception]] = []
        """Those that the network's codec makes nothing of, though it took them, or did not doubt, when they came."""
        self._ingress = ingress
        self._codec = codec
        self._block = block
        self._network = network
        self._going_on = going_on
        self._alike = codec.alike(network)
        self._whole = call.watch == "whole"
        """Whether they go with all words, beside others of the same texts that lost some."""
        self._before = 0 if going_on is None else bisect_right(plan.networks, going_on.next_block - 1)
        """The network that they come from."""
        self._may_cut = going_on is not None and bool(plan.networks)
        self._alpha: float | None = None
        """None: no input loses words here, but texts that lost some before go on without them."""
        self._importance: Mapping[str, npt.NDArray[np.floating[Any]]] = {}
        """By sample id, of every token that the network before was given; nothing of inputs that came without."""
        # An input that left a network before its end, because the plan now skips it, has not met all its attention.
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
        """Whether `prepare` takes milliseconds and leaves the event loop."""
        rows = [_given(each).row for each in (self.inputs if self._importance else self._missing())]
        return bool(rows) and self._codec.of(self._network).is_slow(rows * TIMES_SLOWER)

    def prepare(self) -> None:
        """Encodes the inputs that were not encoded for the network yet, together, without the words that they lose.

        May be called beside the event loop, and again after. If the codec fails, all of them stay as they are, and
        `enter` finds the input that it fails on. A text whose words cannot be cut goes on whole.
        """
        for each in self.inputs if self._may_cut else ():
            try:
                self._cut(_given(each), sample_id_of(self._ingress, each))
            except Exception as error:
                logger.warning("a text of %s keeps its words: %r", each.request_id, error)
        if missing := self._missing():
            with suppress(Exception):
                self._encode(missing)

    def enter(self, plan: Plan) -> WirePiece:
        """Returns the inputs as the piece that waits for the network's first block.

        Every input's `tokens` are those of the network from now on. Where the plan prunes words behind the network,
        they are to bring what attention their tokens receive in it.
        """
        if self._going_on is None and not self._whole:  # an attempt begins, with whole texts
            for each in self.inputs:
                _given(each).cut.clear()
        self.prepare()
        entered, encoded = list[PendingInput](), list[Encoded]()
        for each in self.inputs:
            made = self._made(each)
            if made is None:
                try:
                    [made] = self._encode([each])
                except Exception as error:
                    self.refused.append((each, error))
                    continue
            each.tokens = made.length
            entered.append(each)
            encoded.append(made)
        self.inputs = entered
        ids = [sample_id_of(self._ingress, each) for each in entered]
        states_BS = None if self._going_on is None else _states_of(ids, self._going_on)
        measured = bool(plan.networks) and plan.networks[self._network] - 1 in plan.prune
        return entry_piece(ids, encoded, block=self._block, state_BS=states_BS, measured=measured)

    def words(self) -> tuple[int, int]:
        """Returns the words of the inputs whose attention is known, and how many of them were pruned."""
        words = pruned = 0
        for each in self.inputs if self._importance else ():
            given = _given(each)
            earlier, cut = given.cut.get(self._before), given.cut.get(self._network)
            before = num_words(given.row if earlier is None else earlier.row)
            words += before
            pruned += 0 if cut is None else before - num_words(cut.row)
        return words, pruned

    def _cut(self, given: ChainEncoded, sample_id: str) -> None:
        """Make of an input what the network is given of it, where that is not the row as it came."""
        if self._network in given.cut:
            return
        earlier = given.cut.get(self._before)
        row = given.row if earlier is None else earlier.row
        importance_N = self._importance.get(sample_id)
        if self._alpha is not None and importance_N is not None:
            found = self._codec.pruned_for(self._network, self._before, row, importance_N, self._alpha)
            # An input that loses nothing is remembered too, with its own row, or it would be examined again.
            given.cut[self._network] = CutRow(row, found.encoded) if found.row == row else found
        elif earlier is not None and earlier.row is not given.row:
            given.cut[self._network] = self._codec.cut_row(self._network, row)

    def _made(self, each: PendingInput) -> Encoded | None:
        cut = None if self._whole else _given(each).cut.get(self._network)
        return _given(each).of(self._alike) if cut is None else cut.encoded

    def _missing(self) -> list[PendingInput]:
        return [each for each in self.inputs if self._made(each) is None]

    def _encode(self, inputs: Inputs) -> list[Encoded]:
        given = [_given(each) for each in inputs]
        made = self._codec.encoded([each.row for each in given], self._alike, truncate=True)
        for each, encoded in zip(given, made, strict=True):
            each.others[self._alike] = encoded
        return made


def _given(each: PendingInput) -> ChainEncoded:
    return cast("ChainEncoded", each.encoded)


def _states_of(ids: Sequence[str], going_on: WirePiece) -> Any:
    """The exit policy's states of some of a piece's inputs."""
    if going_on.state_BS is None or tuple(ids) == going_on.sample_ids:
        return going_on.state_BS
    row_of = {sample_id: row for row, sample_id in enumerate(going_on.sample_ids)}
    return going_on.state_BS[np.array([row_of[each] for each in ids], dtype=np.int64)]
