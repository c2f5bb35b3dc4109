"""The live driver of an ingress: calls go over connections to replicas, outcomes to the callers of an event loop.

Inputs travel as pieces for a network's first block: new inputs, and those that cross into a chain's next network.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
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
    placements_of,
    weigh,
)
from deployments.ingress.core.ingress_core import Driver, IngressCore
from deployments.ingress.core.inputs import Inputs, PendingInput, Settle
from deployments.ingress.core.routes import KVPlacement, KVPlacements
from deployments.ingress.link import ReplicaLinks
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import Clock
from earlyexit.codecs.base import Codec
from earlyexit.codecs.chain import ChainCodec, ChainEncoded, CutRow
from earlyexit.errors import ExecutionError, OfframpError
from earlyexit.network.boundary import Answer, Encoded, WirePiece, entering
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


OnHop = Callable[[str, float], None]
"""Is called with a stage's slot and the seconds that a part of a reply spent outside the stage."""


def ignore_hop(slot: str, seconds: float) -> None:
    """The default of `on_hop`."""


class Dispatcher(Driver):
    """One per ingress, on its event loop."""

    def __init__(
        self,
        core: IngressCore,
        links: ReplicaLinks,
        clock: Clock,
        *,
        on_hop: OnHop = ignore_hop,
        later: Later = on_loop,
        encoder: CrossingEncoder | None = None,
    ) -> None:
        """`encoder`: of a chain, None where the model is one network."""
        super().__init__(core, clock)
        self._links = links
        self._encoder = encoder
        self._on_hop = on_hop
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
            self._links[slot].end(replica, placement.number)

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
        elif self._encoder is None:
            self._depart(call)
        else:
            self._enter(self._encoder, call, block, network, payload)

    def _depart(self, call: Call) -> None:
        """Send new inputs of a model that is one network, for which all were encoded as they came."""
        try:
            piece = departure(self.core.name, call.inputs)
        except Exception as error:
            self._lose(call, call.inputs, error, MISFIT)
        else:
            self._send(call, piece, call.inputs)

    def _enter(
        self, encoder: CrossingEncoder, call: Call, block: int, network: int, going_on: WirePiece | None
    ) -> None:
        """Send inputs to a network's first block, new ones or those that cross."""
        cuts = cuts_of(going_on, self.core.placed.plan)
        whole = call.watch == "whole"
        entry = NetworkEntry(
            inputs=call.inputs, block=block, network=network, going_on=going_on, cuts=cuts, whole=whole
        )
        if encoder.is_slow(entry):
            self._tasks[call] = self._begin(self._enter_slowly(encoder, call, entry))
        else:
            self._enter_network(encoder, call, entry)

    async def _enter_slowly(self, encoder: CrossingEncoder, call: Call, entry: NetworkEntry) -> None:
        """Encode the inputs beside the event loop first."""
        try:
            await asyncio.to_thread(encoder.prepare, entry)
            self._enter_network(encoder, call, entry)
        except Exception as error:
            self._tasks.pop(call, None)
            self._lose(call, call.inside(), error, MISFIT)

    def _enter_network(self, encoder: CrossingEncoder, call: Call, entry: NetworkEntry) -> None:
        self._tasks.pop(call, None)  # what encoded them beside the event loop is done
        measured = is_measured(self.core.placed.plan, entry.network)
        try:
            entered = encoder.enter(entry, measured=measured)
        except Exception as error:
            self._lose(call, call.inputs, error, MISFIT)
            return
        for pending, refusal in entered.refused:
            self._lose(call, (pending,), refusal, "the next network's codec makes nothing of it")
        if entry.going_on is not None:
            took_s = self.clock.now_s() - call.started_s
            waited_s = [took_s] * len(entered.inputs)
            self.core.counts.cross(entry.block, waited_s, words=entered.words, pruned_words=entered.pruned_words)
        if entered.inputs:
            self._send(call, entered.piece, entered.inputs)

    def _send(self, call: Call, piece: WirePiece, inputs: Inputs) -> None:
        now_s = self.clock.now_s()
        placements = None if inputs[0].placement is None else placements_of(call.stage.slot, inputs)
        stage_call = StageCall(
            piece=piece,
            # An input that no request waits for any more has no time left: the stage drops it unrun.
            remaining_s=tuple(each.deadline_s - now_s if self.core.is_awaited(call, each) else -1.0 for each in inputs),
            reserve_s=call.reserve_s,
            assignment=call.stage.assignment,
            probe=call.probe,
            sequences=() if placements is None else placements.numbers,
        )
        self._tasks[call] = self._begin(self._carry(call, stage_call, inputs, placements))

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work, context=self._context.copy())

    async def _carry(self, call: Call, stage_call: StageCall, inputs: Inputs, placements: KVPlacements | None) -> None:
        """Have a stage run a call; what it leaves unsettled, because it or the way to it failed, starts again."""
        by_id = dict(zip(stage_call.piece.sample_ids, inputs, strict=True))
        weight, batch = weigh(call.stage, stage_call.piece.next_block, inputs)
        take = partial(self._take, call, by_id)
        try:
            await self._links[call.stage.slot].call(
                stage_call, weight=weight, batch=batch, take=take, placements=placements
            )
        except Exception as error:
            left = call.inside()
            logger.warning("%s failed under %d inputs of %s: %r", call.stage.slot, len(left), requests_of(left), error)
        finally:  # also where the call was hung up: the replica may have begun the sequence in the meantime
            for placement in () if placements is None else placements.each:
                if placement.is_over:
                    self.end(placement)
        self._tasks.pop(call, None)  # not when cancelled: nothing starts while an ingress ends
        if call.num_inside:
            self._fail(call)

    # Settle

    def _take(self, call: Call, inputs: Mapping[str, PendingInput], chunk: Chunk) -> None:
        """Pass a part of a call's reply to the core."""
        core, now_s = self.core, self.clock.now_s()
        core.hear(call, chunk.busy, now_s)
        if chunk.seen:
            core.see(call, [(inputs.get(seen.sample_id, UNKNOWN), seen) for seen in chunk.seen])
        for block, mine, answers in by_block(inputs, chunk.answers):
            self.do(core.answer(call, mine, block, now_s, answers))
        for block, mine, answers in by_block(inputs, chunk.early):
            self.do(core.answer_early(call, mine, block, now_s, answers))
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
            try:
                self._on_hop(call.stage.slot, max(0.0, now_s - call.started_s - inside_s))
            except Exception:  # the reply is taken all the same
                logger.exception("a hop to %s is not counted", call.stage.slot)


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


def departure(ingress: str, inputs: Inputs) -> WirePiece:
    """Returns new inputs as a piece that waits for block 0."""
    return entering([sample_id_of(ingress, each) for each in inputs], [each.encoded for each in inputs])


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """What is known of inputs at a crossing, of which some may lose words."""

    before: int
    """The network that they come from."""
    alpha: float | None
    """None: no input loses words here, but texts that lost some before go on without them."""
    importance: Mapping[str, npt.NDArray[np.floating[Any]]]
    """By sample id, of every token that the network before was given; nothing of inputs that came without."""

    def cut(self, codec: ChainCodec, given: ChainEncoded, sample_id: str, network: int) -> None:
        """Make of an input what the next network is given of it, where that is not the row as it came."""
        if network in given.cut:
            return
        earlier = given.cut.get(self.before)
        row = given.row if earlier is None else earlier.row
        importance_N = self.importance.get(sample_id)
        if self.alpha is not None and importance_N is not None:
            found = codec.pruned_for(network, self.before, row, importance_N, self.alpha)
            # An input that loses nothing is remembered too, with its own row, or it would be examined again.
            given.cut[network] = CutRow(row, found.encoded) if found.row == row else found
        elif earlier is not None and earlier.row is not given.row:
            given.cut[network] = codec.cut_row(network, row)


def cuts_of(going_on: WirePiece | None, plan: Plan) -> Cuts | None:
    """Returns what inputs may lose at a crossing under a plan; None for new inputs, and for a plan of one network.

    An input that left a network before its end, because the plan now skips it, has not met all its attention and loses
    no words.
    """
    if going_on is None or not plan.networks:
        return None
    at_an_end = going_on.next_block in plan.networks
    before = bisect_right(plan.networks, going_on.next_block - 1)
    alpha = plan.prune.get(going_on.next_block - 1) if at_an_end else None
    carried = going_on.tensors if at_an_end and alpha is not None else ()
    if not carried:
        return Cuts(before=before, alpha=None, importance={})
    ends = np.cumsum(going_on.lengths_B)[:-1]
    by_input = np.split(carried[-1].astype(np.float64), ends)
    return Cuts(before=before, alpha=alpha, importance=dict(zip(going_on.sample_ids, by_input, strict=True)))


def is_measured(plan: Plan, network: int) -> bool:
    """Whether inputs that enter a network are to bring what attention their tokens receive in it."""
    return bool(plan.networks) and plan.networks[network] - 1 in plan.prune


TIMES_SLOWER = 10
"""So many times as many rows are asked about before some are encoded on the event loop: there, replies wait meanwhile.
Of texts it is 2,000 characters, a millisecond or two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkEntry:
    """Inputs on their way into a network: new ones, or those that cross."""

    inputs: Inputs
    block: int
    """The first that they wait for."""
    network: int
    going_on: WirePiece | None
    """What the network before let go of; None of new ones."""
    cuts: Cuts | None = None
    """Words that they lose on it."""
    whole: bool = False
    """Whether they go with all words, beside others of the same texts that lost some."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnteredPiece:
    """Inputs before a network's first block."""

    piece: WirePiece
    inputs: Inputs
    """In the piece's order."""
    refused: Sequence[tuple[PendingInput, Exception]] = ()
    """Those that the network's codec makes nothing of, though it took them, or did not doubt, when they came."""
    words: int = 0
    """Of the texts that words could be pruned of."""
    pruned_words: int = 0


class CrossingEncoder:
    """Of a chain: every input is encoded once for every network that it gets to."""

    def __init__(self, ingress: str, codec: ChainCodec) -> None:
        self._ingress = ingress
        self._codec = codec

    def is_slow(self, entry: NetworkEntry) -> bool:
        """Whether `prepare` takes milliseconds and leaves the event loop."""
        anew = entry.inputs if entry.cuts is not None and entry.cuts.importance else self._missing(entry)
        rows = [_given(each).row for each in anew]
        return bool(rows) and self._codec.of(entry.network).is_slow(rows * TIMES_SLOWER)

    def prepare(self, entry: NetworkEntry) -> None:
        """Encodes the inputs that were not encoded for the network yet, together, without the words that they lose.

        May be called beside the event loop, and again after. If the codec fails, all of them stay as they are, and
        `enter` finds the input that it fails on. A text whose words cannot be cut goes on whole.
        """
        if entry.cuts is not None:
            self._cut(entry, entry.cuts)
        missing = self._missing(entry)
        if missing:
            with suppress(Exception):
                self._encode(missing, entry.network)

    def enter(self, entry: NetworkEntry, *, measured: bool = False) -> EnteredPiece:
        """Inputs as the piece that waits for a network's first block.

        Every input's `tokens` are those of the network from now on. `measured`: they are to bring what attention their
        tokens receive in it.
        """
        if entry.going_on is None and not entry.whole:  # an attempt begins, with whole texts
            for each in entry.inputs:
                _given(each).cut.clear()
        self.prepare(entry)
        refused = list[tuple[PendingInput, Exception]]()
        entered, encoded = list[PendingInput](), list[Encoded]()
        for each in entry.inputs:
            made = self._made(each, entry)
            if made is None:
                try:
                    [made] = self._encode([each], entry.network)
                except Exception as error:
                    refused.append((each, error))
                    continue
            each.tokens = made.length
            entered.append(each)
            encoded.append(made)
        ids = [sample_id_of(self._ingress, each) for each in entered]
        states_BS = None if entry.going_on is None else _states_of(ids, entry.going_on)
        piece = entering(ids, encoded, block=entry.block, state_BS=states_BS, measured=measured)
        return EnteredPiece(
            piece=piece, inputs=entered, refused=refused, **_words_of(entered, entry.network, entry.cuts)
        )

    def _cut(self, entry: NetworkEntry, cuts: Cuts) -> None:
        for each in entry.inputs:
            try:
                cuts.cut(self._codec, _given(each), sample_id_of(self._ingress, each), entry.network)
            except Exception as error:
                logger.warning("a text of %s keeps its words: %r", each.request_id, error)

    def _made(self, each: PendingInput, entry: NetworkEntry) -> Encoded | None:
        given = _given(each)
        cut = None if entry.whole else given.cut.get(entry.network)
        return given.of(self._codec.alike(entry.network)) if cut is None else cut.encoded

    def _encode(self, inputs: Inputs, network: int) -> list[Encoded]:
        alike, given = self._codec.alike(network), [_given(each) for each in inputs]
        made = self._codec.encoded([each.row for each in given], alike, truncate=True)
        for each, encoded in zip(given, made, strict=True):
            each.others[alike] = encoded
        return made

    def _missing(self, entry: NetworkEntry) -> list[PendingInput]:
        alike = self._codec.alike(entry.network)
        lacking = [each for each in entry.inputs if _given(each).of(alike) is None]
        return [each for each in lacking if entry.whole or entry.network not in _given(each).cut]


def encoder_of(ingress: str, codec: Codec[Any]) -> CrossingEncoder | None:
    """Of a chain; None where there is one network, for which inputs are encoded as they come."""
    return CrossingEncoder(ingress, codec) if isinstance(codec, ChainCodec) else None


def _words_of(inputs: Inputs, network: int, cuts: Cuts | None) -> dict[str, int]:
    """Of inputs whose attention is known: their words at this crossing, and how many of them were pruned."""
    if cuts is None or not cuts.importance:
        return {}
    words = pruned = 0
    for each in inputs:
        given = _given(each)
        earlier, cut = given.cut.get(cuts.before), given.cut.get(network)
        before = num_words(given.row if earlier is None else earlier.row)
        words += before
        pruned += 0 if cut is None else before - num_words(cut.row)
    return {"words": words, "pruned_words": pruned}


def _given(each: PendingInput) -> ChainEncoded:
    return cast("ChainEncoded", each.encoded)


def _states_of(ids: Sequence[str], going_on: WirePiece) -> Any:
    """The exit policy's states of some of a piece's inputs."""
    if going_on.state_BS is None or tuple(ids) == going_on.sample_ids:
        return going_on.state_BS
    row_of = {sample_id: row for row, sample_id in enumerate(going_on.sample_ids)}
    return going_on.state_BS[np.array([row_of[each] for each in ids], dtype=np.int64)]
