"""Sequences through a replica's engine and host: whatever becomes of them, what was kept of them is free again."""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deployments.replica.build import build_runner, expect_no_loss, warm_up
from deployments.replica.host import OpenCall, StageHost, chunks_by_call
from deployments.settings import ServeSettings
from deployments.wire.messages import Assignment, Chunk, StageCall
from earlyexit.clock import ManualClock, MonotonicClock
from earlyexit.engine.device import Release
from earlyexit.engine.engine import Batch
from earlyexit.errors import InputError, OverloadedError, SequenceLostError
from earlyexit.families.decoder import DecoderBackbone
from earlyexit.network.boundary import Encoded, Split, entering
from earlyexit.network.chain_network import open_memory, tokens_that_fit
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.sequences.memory import PAGE_TOKENS, MemoryUse
from earlyexit.sequences.sequence import run_of
from earlyexit.tasks.token import TokenTask
from optimizer.plan import Plan, PolicySpec, Stage

VOCABULARY, NUM_BLOCKS, NUM_PAGES = 32, 3, 64
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_blocks": NUM_BLOCKS,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_size": 8,
    "intermediate_size": 16,
    "max_length": 4096,
}
STAGE = Stage(
    device="cpu",
    replicas=1,
    splits=(Split(first=0, end=1, batch=32, ramps=(0,)), Split(first=1, end=NUM_BLOCKS, batch=32, ramps=(1,))),
)
PLAN = Plan(stages=(STAGE,), policy=PolicySpec(name="confidence", thresholds=0.04))
CHUNK = 8
"""Tokens of a prompt in one step."""
NUM_CONNECTIONS = 3


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    ramps = RampOptions(at=(0, 1), pooling="last")
    return random_model(SIZES, family="llama", task=TokenTask(VOCABULARY), ramps=ramps).requires_grad_(False)


@dataclass(eq=False)
class One:
    """A sequence as its ingress knows it."""

    number: int
    connection: int
    prompt: int
    limit: int
    seen: int = 0
    sent: int = 0
    """Tokens of the step under way; 0 between two."""
    opened: OpenCall | None = None
    is_in: bool = False
    """Whether pages are reserved for it."""
    error: Exception | None = None

    def step(self) -> Encoded:
        self.sent = min(CHUNK, self.prompt - self.seen) if self.seen < self.prompt else 1
        ids = np.arange(self.sent, dtype=np.int32) % VOCABULARY
        return Encoded(self.sent, (ids, np.array([run_of(self.number, self.seen, self.limit, self.prompt)], np.int32)))


@dataclass
class Scene:
    """A replica, and ingresses at the other ends of its connections."""

    model: EarlyExitModel
    rng: random.Random
    plan: Plan = PLAN
    answer_s: float = 0.0
    """What passes until answers are out."""
    alive: list[One] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    exits: Counter[int] = field(default_factory=Counter)
    finished: int = 0
    peak: int = 0
    last_number: int = 0

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new replica, which knows no sequence."""
        memory = open_memory(self.model, NUM_PAGES * PAGE_TOKENS, "compute", 0)
        runner = TorchRunner(self.model, ConfidencePolicy(1.0), memory=memory)
        settings = ServeSettings(model="none", plan=self.plan)
        self.clock = ManualClock()
        self.host = StageHost(settings, "cpu", runner, self.clock, self._deliver)
        self.device = self.host._device
        self.peak = 0

    @property
    def use(self) -> MemoryUse:
        use = self.host.memory
        assert use is not None
        return use

    def begin(self) -> None:
        self.last_number += 1
        prompt = self.rng.randint(1, 20)
        limit = prompt + self.rng.randint(1, 4) if self.rng.random() < 0.99 else NUM_PAGES * PAGE_TOKENS + 1
        self.alive.append(One(self.last_number, self.rng.randrange(NUM_CONNECTIONS), prompt, limit))

    def send(self, connection: int) -> None:
        """The next steps of the sequences that wait for none, as one call."""
        ones = [one for one in self.alive if one.connection == connection and not one.sent][:32]
        if not ones:
            return
        piece = entering([str(one.number) for one in ones], [one.step() for one in ones])
        call = StageCall(
            piece=piece,
            remaining_s=(math.inf,) * len(ones),
            reserve_s=0.0,
            assignment=Assignment.of(self.plan, self.plan.stages[0], "split-cpu-0"),
            sequences=tuple(one.number for one in ones),
        )
        opened = OpenCall(len(ones), partial(self._take, {str(one.number): one for one in ones}))
        for one in ones:
            one.opened, one.is_in = opened, True  # until it is said that it is not
        self.host.submit(call, opened)
        self.peak = max(self.peak, self.use.pages)

    def run_on(self, ones: list[One], until: int) -> None:
        """These alone, until those that are left have been shown so many tokens."""
        self.alive = list(ones)
        while any(one.seen < until for one in self.alive):
            self.send(0)
            while self.run_one():
                pass

    def end(self, ones: list[One]) -> None:
        """As their ingress does when they are over, or when their callers have gone."""
        self.alive = [one for one in self.alive if one not in ones]
        self.host.end({one.number for one in ones})

    def disconnect(self, connection: int) -> None:
        """As the replica does when a connection ends."""
        gone = [one for one in self.alive if one.connection == connection]
        for opened in {id(one.opened): one.opened for one in gone if one.opened is not None}.values():
            self.host.forget(opened)
        self.end(gone)

    def something_happens(self) -> None:
        chance = self.rng.random()
        if chance < 0.1 and self.alive:
            self.end(self.rng.sample(self.alive, 1))
        elif chance < 0.12:
            self.disconnect(self.rng.randrange(NUM_CONNECTIONS))
        elif chance < 0.6:
            self.send(self.rng.randrange(NUM_CONNECTIONS))

    def run_one(self) -> bool:
        """A batch, with things that happen before, within and after it."""
        batch = self.device.start_next()
        if not isinstance(batch, Batch):
            return False
        self.something_happens()
        coming_back = self.device.run(batch)
        self.something_happens()
        self.device.requeue(coming_back)
        return True

    def check(self) -> None:
        """Exactly what the sequences that are alive need is reserved."""
        kv = sum(-(-one.limit // PAGE_TOKENS) for one in self.alive if one.is_in)
        assert self.use.pages == kv
        assert self.use.sequences == sum(one.is_in for one in self.alive)

    def _deliver(self, releases: list[Release[Any]]) -> None:
        self.clock.advance(self.answer_s)
        for opened, chunk in chunks_by_call(releases):
            opened.take(chunk)

    def _take(self, ones: dict[str, One], chunk: Chunk) -> None:
        assert chunk.going_on is None
        for answer, _ in chunk.answers:
            one = ones[answer.sample_id]
            self.exits[answer.exit] += 1
            one.seen, one.sent, one.opened = one.seen + one.sent, 0, None
            if one in self.alive and one.seen >= one.limit - 1:
                self.finished += 1
                self.end([one])
        for name, error in chunk.lost:
            self.errors[type(error).__name__] += 1
            one = ones[name]
            one.is_in = one.is_in and one.seen > 0
            if one in self.alive:
                self.end([one])


@pytest.mark.parametrize("seed", [0, 1])
def test_of_a_thousand_sequences_nothing_is_left(model: EarlyExitModel, seed: int) -> None:
    scene = Scene(model, random.Random(seed))
    most = 0
    while scene.last_number < 1000:
        for _ in range(scene.rng.randint(0, 40)):
            scene.begin()
        for connection in range(NUM_CONNECTIONS):
            scene.send(connection)
        scene.something_happens()
        while scene.run_one() and scene.rng.random() < 0.5:
            pass
        scene.check()
        assert (scene.use.peak_pages, scene.use.num_pages) == (scene.peak, NUM_PAGES)
        most = max(most, scene.peak)
        if scene.rng.random() < 0.01:  # the replica is killed: its sequences are lost, and begin anew under new numbers
            scene.alive = []
            scene.start()
    for connection in range(NUM_CONNECTIONS):
        scene.disconnect(connection)
    while scene.run_one():
        pass
    assert (scene.use.pages, scene.use.sequences) == (0, 0)
    assert scene.finished > 100
    assert most == NUM_PAGES
    assert scene.errors.keys() == {each.__name__ for each in (InputError, OverloadedError, SequenceLostError)}
    assert set(scene.exits) == set(range(NUM_BLOCKS))


class Calm(random.Random):
    """Nothing happens by chance."""

    def random(self) -> float:
        return 1.0


def test_the_next_batch_waits_a_moment_for_the_next_steps_that_the_last_one_answered(model: EarlyExitModel) -> None:
    stage = replace(STAGE, splits=(Split(first=0, end=NUM_BLOCKS, batch=32),))
    scene = Scene(model, Calm(), replace(PLAN, stages=(stage,)), answer_s=0.1)
    scene.alive = [One(number, connection, prompt=1, limit=8) for number, connection in ((1, 0), (2, 1))]
    scene.send(0)
    batch = scene.device.start_next()
    assert isinstance(batch, Batch)
    scene.send(1)
    scene.device.run(batch)
    assert scene.device.start_next() == pytest.approx(0.105)
    scene.send(0)
    together = scene.device.start_next()
    assert isinstance(together, Batch)
    assert {member.sequence for member in together.members} == {1, 2}


@pytest.fixture(scope="module")
def folder(model: EarlyExitModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("decoder")
    save_model(model, folder)
    return folder


def test_a_replica_of_a_decoder_warms_up_and_tells_how_much_it_keeps(folder: Path) -> None:
    settings = ServeSettings(model=str(folder), plan=PLAN, kv_tokens=100, kv_fill="copy")
    clock = MonotonicClock()
    runner = build_runner(settings, "cpu", None, clock=clock)
    times = warm_up(runner, [STAGE.splits], clock=clock)
    assert all(times.batch_s(split, 16.0) > 0 for split in STAGE.splits)
    host = StageHost(settings, "cpu", runner, clock, expect_no_loss)
    kept = MemoryUse(num_pages=100 // PAGE_TOKENS, page_tokens=PAGE_TOKENS)
    assert host.report(replica="r", node="n").memory == kept, "warming up reserves nothing"
    assert host.stats()["memory"]["num_pages"] == 6


def test_where_no_setting_says_how_much_the_memory_that_is_free_does() -> None:
    assert tokens_that_fit(10_000, 100, 1000, on_gpu=True) == 80
    assert tokens_that_fit(10_000, 100, 1000, on_gpu=False) == 25
    assert tokens_that_fit(1 << 40, 1 << 20, 1 << 40, on_gpu=False) == 4 << 10
    assert tokens_that_fit(1 << 40, 1, 128, on_gpu=False) == 256 * 128
    assert tokens_that_fit(0, 100, 1000, on_gpu=False) == PAGE_TOKENS


def test_plain_inputs_are_told_to_generate(model: EarlyExitModel) -> None:
    memory = open_memory(model, 1024, "compute", 0)
    assert memory is not None
    wire = entering(["a"], [One(0, 0, prompt=2, limit=4).step()])
    [error] = memory.admit(wire, [0])
    assert isinstance(error, InputError)
    assert "ask it to generate" in str(error)


def test_a_sequence_without_numbers_fails_alone(model: EarlyExitModel) -> None:
    """Its logits are NaN, its keys and values too: no batch-mate looks at them, nor the next sequence on its pages."""
    model = copy.deepcopy(model)
    backbone = model.backbone
    assert isinstance(backbone, DecoderBackbone)
    scene = Scene(model, Calm())
    ones = [One(number, 0, prompt, limit=40) for number, prompt in ((1, 1), (2, 1), (3, 7))]
    backbone.word.weight[5] = torch.nan  # a token of the third one's prompt alone
    scene.run_on(ones, until=10)
    assert (scene.errors, scene.alive) == ({"ExecutionError": 1}, ones[:2])
    backbone.word.weight[5] = 0.0
    again = [One(number, 0, prompt, limit=40) for number, prompt in ((4, 1), (5, 1), (6, 7))]
    scene.run_on([*ones[:2], *again], until=20)
    assert (scene.errors, len(scene.alive)) == ({"ExecutionError": 1}, 5)
