"""A service of sequences between fake replicas, whose next token is a sum over all that they were shown.

A replica that was shown a sequence with a gap, or twice, would give another one.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from deployments.api.generation import GenerateRequest, GenerateService, Stream
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import Rules
from deployments.ingress.core.routes import KVPlacements
from deployments.ingress.dispatcher import Dispatcher
from deployments.ingress.link import LinkTransport
from deployments.settings import ServeSettings
from deployments.wire.messages import Chunk, StageCall, Timing
from earlyexit.clock import ManualClock
from earlyexit.errors import DeadlineError, OfframpError, SequenceLostError
from earlyexit.network.boundary import Answer, Numbers, Split
from earlyexit.sequences.sequence import sequence_of
from earlyexit.tasks.token import TokenTask
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.wire_fakes import FixedLinks, turns
from tests.earlyexit.families.decoders import VOCABULARY, byte_tokenizer

NUM_BLOCKS = 4
SLOTS = ("split-cpu-0", "split-V100-0")
TIMING = Timing(queue_s=0.0, compute_s=0.0)
MAX_LENGTH = 64


def placed(epoch: int = 1, device: str = "cpu", **predicted: float) -> PlacedPlan:
    """One stage of two replicas."""
    stage = Stage(device=device, replicas=2, splits=(Split(first=0, end=NUM_BLOCKS, batch=4),))
    return PlacedPlan(plan=Plan(stages=(stage,), epoch=epoch, predicted=predicted))


def next_token(tokens: Sequence[int]) -> int:
    """From 1 to 97."""
    return sum((place + 1) * token for place, token in enumerate(tokens)) % 97 + 1


def expected(prompt: Sequence[int], number: int) -> list[int]:
    """The tokens that come of a prompt."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + number:
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


class FakeReplicas(LinkTransport):
    """Of one slot. A call is answered when the test says so, or at once."""

    def __init__(self) -> None:
        super().__init__(phase=0.0)
        self.shown: dict[str, dict[int, list[int]]] = {"r1": {}, "r2": {}}
        """By replica and sequence, its tokens."""
        self.open: list[_Asked] = []
        self.holds = False
        """Whether calls are kept until the test answers them."""
        self.refuses: OfframpError | None = None
        """What sequences that begin get instead,"""
        self.full: set[str] = {"r1", "r2"}
        """at these."""
        self.is_late = False
        """Whether a replica drops the next step because it cannot meet its deadline."""
        self.garbles: int | None = None
        """An answer to this sequence is none."""
        self.ended: list[tuple[str, int]] = []
        self.log: list[str] = []
        self._some_start = asyncio.Event()

    async def call(
        self,
        call: StageCall,
        *,
        weight: int,
        batch: int,
        take: Callable[[Chunk], None],
        placements: KVPlacements | None = None,
    ) -> None:
        assert placements is not None
        assert placements.numbers == call.sequences
        while not self.shown:
            self._some_start.clear()
            await self._some_start.wait()
        others = self.shown.keys() - placements.avoids or self.shown.keys()
        name = placements.replica or min(others, key=lambda name: (len(self.shown[name]), name))
        if name not in self.shown:
            raise SequenceLostError(f"{name} is gone", retry_after_s=1.0)
        placements.choose(name)
        asked = _Asked(call, name)
        self.open.append(asked)
        self.log.append(f"{name} gets {len(call.sequences)}")
        if not self.holds:
            asked.answered.set()
        await asked.answered.wait()
        self.open.remove(asked)
        if asked.is_lost:
            raise ConnectionError(f"{name} died")
        take(self._run(call, name))

    def fail_waiting(self) -> None:
        """No call waits here for a replica."""

    def end(self, replica: str, sequence: int) -> None:
        self.ended.append((replica, sequence))
        self.shown.get(replica, {}).pop(sequence, None)

    def answer(self) -> None:
        """Everything that is kept."""
        for asked in self.open:
            asked.answered.set()

    def die(self, name: str) -> None:
        """It forgets all, and its calls fail."""
        del self.shown[name]
        for asked in self.open:
            if asked.replica == name:
                asked.is_lost = True
                asked.answered.set()

    def start(self, name: str) -> None:
        """It, or another of its name, is there."""
        self.shown[name] = {}
        self._some_start.set()

    def _run(self, call: StageCall, name: str) -> Chunk:
        answers, lost, shown = [], [], self.shown[name]
        ids_N, run_BS = call.piece.tensors
        rows = np.split(ids_N, np.cumsum(call.piece.lengths_B)[:-1])
        for sample_id, run, ids in zip(call.piece.sample_ids, run_BS.tolist(), rows, strict=True):
            number, start, limit = sequence_of(run[0], run[1]), run[2], run[3]
            tokens = shown.get(number, [])
            if start == 0 and self.refuses is not None and name in self.full:
                lost.append((sample_id, self.refuses))
            elif self.is_late:
                self.is_late = False
                lost.append((sample_id, DeadlineError("the input was not run")))
            elif len(tokens) != start:
                lost.append((sample_id, SequenceLostError(f"{len(tokens)} tokens, not {start}", retry_after_s=1.0)))
            else:
                shown[number] = [*tokens, *ids.tolist()]
                assert len(shown[number]) <= limit
                answers.append((self._answer(sample_id, number, shown[number]), TIMING))
        return Chunk(answers=tuple(answers), lost=tuple(lost))

    def _answer(self, sample_id: str, number: int, tokens: Sequence[int]) -> Answer:
        said = [[next_token(tokens), 0], [-0.25, -2.0]]
        value = np.zeros((2, 0)) if number == self.garbles else np.array(said, dtype=np.float32)
        return Answer(sample_id=sample_id, value=Numbers.of(value), score=0.5, exit=len(tokens) % NUM_BLOCKS)


class _Asked:
    """A call that a replica has."""

    def __init__(self, call: StageCall, replica: str) -> None:
        self.call = call
        self.replica = replica
        self.answered = asyncio.Event()
        self.is_lost = False


class Alarms:
    """Ring when the test moves the clock."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock = clock
        self._set: list[_Alarm] = []

    def later(self, seconds: float, call: Callable[[], None]) -> _Alarm:
        alarm = _Alarm(self._clock.now_s() + seconds, call)
        self._set.append(alarm)
        return alarm

    @property
    def num_set(self) -> int:
        return sum(alarm.call is not None for alarm in self._set)

    async def until(self, now_s: float) -> None:
        """Move the clock, and ring whatever is due on the way."""
        while due := [alarm for alarm in self._set if alarm.call is not None and alarm.at_s <= now_s]:
            first = min(due, key=lambda alarm: alarm.at_s)
            self._clock.advance(max(0.0, first.at_s - self._clock.now_s()))
            call, first.call = first.call, None
            assert call is not None
            call()
            await turns()
        self._clock.advance(max(0.0, now_s - self._clock.now_s()))


class _Alarm:
    def __init__(self, at_s: float, call: Callable[[], None]) -> None:
        self.at_s = at_s
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class GenerateScene:
    """Two replicas of one stage, and a service whose settings a test may change."""

    def __init__(self, plan: PlacedPlan | None = None, *, max_queued: int = 100, **settings: Any) -> None:
        self.clock = ManualClock()
        self.alarms = Alarms(self.clock)
        self.replicas = FakeReplicas()
        links = FixedLinks(dict.fromkeys(SLOTS, self.replicas))
        rules = Rules(max_queued=max_queued, calls_per_replica=2, max_attempts=3, admits=False)
        plan = plan or placed()
        self.core = IngressCore("i", plan, rules, random.Random(0))
        self.dispatcher = Dispatcher(self.core, links, self.clock, later=self.alarms.later)
        given = ServeSettings.model_validate(
            {"model": "", "plan": plan.plan, "max_attempts": 3, "prompt_chunk": 4} | settings
        )
        self.service = GenerateService(
            byte_tokenizer(),
            TokenTask(VOCABULARY),
            max_length=MAX_LENGTH,
            dispatcher=self.dispatcher,
            settings=given,
            clock=self.clock,
            later=self.alarms.later,
            rng=random.Random(1),
        )

    def start(self, *prompt: int, max_tokens: int = 5, **changes: Any) -> Stream:
        return self.service.start(GenerateRequest(prompt=prompt, max_tokens=max_tokens, **changes))

    def follow(self, plan: PlacedPlan) -> None:
        self.dispatcher.follow(plan)
        self.service.follow(plan)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of any sequence, anywhere."""
        shown = [each for sequences in self.replicas.shown.values() for each in sequences]
        return not shown and not self.service.loop.num_running and not self.core.num_unanswered


async def tokens_of(stream: Stream) -> list[int]:
    """All that is said."""
    return [said.chosen.token async for said in stream]
