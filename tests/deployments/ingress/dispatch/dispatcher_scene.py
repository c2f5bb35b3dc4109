"""A dispatcher between fake stages, whose replies the test gives."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from deployments.ingress.core.calls import RETRY_PAUSE_S, Call
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions, PendingInput
from deployments.ingress.core.routes import StageReplicas
from deployments.ingress.dispatcher import Dispatcher
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.codecs.base import Codec
from earlyexit.errors import OfframpError
from earlyexit.network.boundary import Answer, Encoded, Split, WirePiece
from optimizer.plans.plan import PlacedPlan, Plan, Stage
from profiles.stream import StreamShape
from tests.clock import ManualClock
from tests.deployments.wire_fakes import FixedLinks, turns

BATCH = 4
PLAN = Plan(
    stages=(
        Stage(device="cpu", replicas=1, splits=(Split(first=0, end=2, batch=BATCH),)),
        Stage(device="cpu", replicas=1, splits=(Split(first=2, end=3, batch=2), Split(first=3, end=4, batch=2))),
        Stage(device="cpu", replicas=1, splits=(Split(first=4, end=6, batch=BATCH),)),
    ),
    epoch=7,
)
SLOTS = ("split-cpu-0", "split-cpu-1", "split-cpu-2")
TIMING = Timing(queue_s=0.25, compute_s=0.5)
TWO_TOKENS = Encoded(2, (np.array([1, 2], dtype=np.int32),))


@dataclass
class StageCallLog:
    """A call to a stage, whose reply the test gives part by part."""

    sent: Call
    call: StageCall
    _owner: Dispatcher

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return self.call.piece.sample_ids

    @property
    def names(self) -> str:
        return "".join(sample_id.partition("#")[0] for sample_id in self.sample_ids)

    def id_of(self, name: str) -> str:
        return next(sample_id for sample_id in self.sample_ids if sample_id.startswith(f"{name}#"))

    def answer(self, names: Sequence[str], *, exit_block: int = 1) -> None:
        self.say(Chunk(answers=self._answers(names, exit_block)))

    def say(self, chunk: Chunk) -> None:
        try:
            self._owner.replied(self.sent, chunk)
        except Exception as error:
            self._owner.ended(self.sent, error)
        else:
            if not self.sent.num_remaining:
                self.end()

    def send_on(self, names: str, *, next_block: int) -> None:
        piece = survivors([self.id_of(name) for name in names], next_block)
        self.say(Chunk(survivors=piece, survivor_timings=(TIMING,) * len(names)))

    def lose(self, name: str, error: OfframpError) -> None:
        self.say(Chunk(lost=((self.id_of(name), error),)))

    def end(self) -> None:
        self._owner.ended(self.sent, None)

    def fail(self) -> None:
        self._owner.ended(self.sent, ConnectionError("the replica died"))

    def _answers(self, names: Sequence[str], exit_block: int) -> tuple[tuple[Answer, Timing], ...]:
        return tuple(
            (Answer(sample_id=self.id_of(name), value=0, score=1.0, exit=exit_block), TIMING) for name in names
        )


def survivors(sample_ids: Sequence[str], next_block: int) -> WirePiece:
    """Returns survivors with one token each, whose hidden state has two numbers."""
    return WirePiece(
        sample_ids=tuple(sample_ids),
        next_block=next_block,
        lengths_B=np.ones(len(sample_ids), dtype=np.int32),
        tensors=(np.zeros((len(sample_ids), 2), dtype=np.float32),),
        state_BS=None,
    )


class ManualStage:
    """A fake stage, which keeps its calls so that the test can reply."""

    name, is_up = "r1", True

    def __init__(self) -> None:
        self.calls: list[StageCallLog] = []
        self.called = asyncio.Event()
        self._replicas = StageReplicas[ManualStage](0.0)
        self._replicas.set_replicas([self])

    def end(self, sequence: int) -> None:
        """Does nothing, because it has no memory of sequences."""

    def call(self, call: Call, message: StageCall, owner: Dispatcher) -> None:
        call.choose_replica(self._replicas, message.piece.next_block)
        self.calls.append(StageCallLog(call, message, owner))
        self.called.set()

    @property
    def names(self) -> list[str]:
        return [call.names for call in self.calls]


class HastyDispatcher(Dispatcher):
    """A dispatcher whose retry pauses end at once, and whose deadlines never expire."""

    _soon: asyncio.Handle | None = None

    def set_timer(self, at_s: float) -> None:
        if self._soon is not None:
            self._soon.cancel()
        is_pause = at_s - self.clock.now_s() <= RETRY_PAUSE_S
        self._soon = asyncio.get_running_loop().call_soon(self.wake) if is_pause else None


@dataclass
class Scene:
    """A dispatcher between fake stages and callbacks that record every outcome."""

    max_queued: int = 100
    max_attempts: int = 3
    plan: Plan = PLAN
    chain_codec: Codec[Any] | None = None
    slo_s: float = math.inf
    shape: StreamShape | None = None
    probe_share: float = 1.0
    clock: ManualClock = field(default_factory=ManualClock)
    stages: list[ManualStage] = field(default_factory=lambda: [ManualStage(), ManualStage(), ManualStage()])
    outcomes: list[tuple[str, Answer | OfframpError]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rules = IngressOptions(
            max_queued=self.max_queued,
            max_attempts=self.max_attempts,
            slo_s=self.slo_s,
            shape=self.shape,
            probe_share=self.probe_share,
        )
        links = FixedLinks(dict(zip(SLOTS, self.stages, strict=True)))
        self.core = IngressCore("i", PlacedPlan(plan=self.plan), rules, random.Random(0))
        self.dispatcher = HastyDispatcher(self.core, links, self.clock, codec=self.chain_codec)

    def submit(self, names: str, *, deadline_s: float = 10.0, encoded: Encoded = TWO_TOKENS) -> list[PendingInput]:
        """Submits one input per letter."""
        return self.dispatcher.submit([(name, encoded) for name in names], deadline_s, self._settle)

    async def sent(self, names: str) -> StageCallLog:
        """Submits inputs, and returns the resulting call to the first stage."""
        self.submit(names)
        await turns()
        return self.stages[0].calls[-1]

    @property
    def answered(self) -> str:
        return "".join(name for name, outcome in self.outcomes if isinstance(outcome, Answer))

    @property
    def errors(self) -> list[tuple[str, str]]:
        return [(name, outcome.kind) for name, outcome in self.outcomes if isinstance(outcome, OfframpError)]

    def _settle(self, flight: PendingInput, outcome: Answer | OfframpError) -> None:
        self.outcomes.append((flight.key, outcome))
