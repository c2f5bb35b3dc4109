"""One ingress core on a manual clock. It logs every action, and the test gives the replies to calls.

Inputs are letters, and may belong to sequences. Every input gets at most one outcome, or the world fails.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from deployments.ingress.core.calls import AbortCall, Action, Call, ReturnAnswers, ReturnErrors, SendCall, placements_of
from deployments.ingress.core.ingress_core import IngressCore
from deployments.ingress.core.inputs import IngressOptions, Inputs, PendingInput
from deployments.ingress.core.routes import KVPlacement, ReplicaLoad
from earlyexit.engine.engine import Dispatch
from earlyexit.errors import ExecutionError, OfframpError
from earlyexit.network.boundary import AfterAnswer, Answer, Split
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from profiles.stream import Observations, StreamShape

NAMES = {"split-cpu-0": "first", "split-cpu-1": "second", "split-cpu-2": "third", "split-V100-0": "elsewhere"}
"""The names of stages in logs, by slot."""
BATCH = 4


def stage(*splits: Split, replicas: int = 1, device: str = "cpu") -> Stage:
    return Stage(device=device, replicas=replicas, splits=splits)


def split(first: int, end: int, ramps: tuple[int, ...] = (), **options: Any) -> Split:
    return Split(first=first, end=end, batch=BATCH, ramps=ramps, **options)


def placed(*stages: Stage, **options: Any) -> PlacedPlan:
    return PlacedPlan(plan=Plan(stages=stages, **{"epoch": 1} | options))


def plan(
    *,
    epoch: int = 1,
    replicas: int = 1,
    cut: int = 2,
    first: str = "cpu",
    dispatch: Dispatch = "work-conserving",
    tokens: int | None = None,
    predicted: Mapping[str, float] | None = None,
) -> PlacedPlan:
    """Returns a plan of four blocks in two stages. `first`: accelerator type of the first; `tokens`: budget of both."""
    stages = stage(split(0, cut, tokens=tokens), replicas=replicas, device=first), stage(split(cut, 4, tokens=tokens))
    return placed(*stages, epoch=epoch, dispatch=dispatch, predicted=predicted or {})


def chains(
    *cuts: Sequence[int], shares: tuple[float, ...], epoch: int = 1, rate_per_s: float | None = None
) -> PlacedPlan:
    """Returns chains of four blocks. `cuts`: for each chain, the first blocks of its stages but the first."""
    bounds = [pair for each in cuts for pair in zip((0, *each), (*each, 4), strict=True)]
    predicted = {} if rate_per_s is None else {"rate_per_s": rate_per_s}
    return placed(*[stage(split(*pair)) for pair in bounds], shares=shares, epoch=epoch, predicted=predicted)


def side_by_side(epoch: int = 1, rate_per_s: float | None = None) -> PlacedPlan:
    """Returns a plan whose first slot gets three quarters of the inputs, and whose other chain has two slots."""
    return chains((), (2,), shares=(0.75, 0.25), epoch=epoch, rate_per_s=rate_per_s)


SMALL, LARGE = split(0, 2, (1,)), split(2, 6)
THREE = (2, 4, 6)


def networks(
    *stages: tuple[Split, ...], epoch: int = 1, ends: tuple[int, ...] = (2, 6), prunes: int | None = None
) -> PlacedPlan:
    """Returns a plan of networks, by default of 2 and 4 blocks. `prunes`: the block after which words are pruned."""
    policy = PolicySpec(name="confidence", thresholds=0.9)
    made = [stage(*splits) for splits in stages]
    return placed(*made, epoch=epoch, networks=ends, policy=policy, prune={} if prunes is None else {prunes: 0.7})


def cascade(epoch: int = 1) -> PlacedPlan:
    return networks((SMALL,), (LARGE,), epoch=epoch)


def single(epoch: int = 1) -> PlacedPlan:
    """Returns a plan of the large network alone."""
    return networks((LARGE,), epoch=epoch)


SHAPE = StreamShape(score="entropy", num_blocks=4, ramps=(1, 2))
OF_NETWORKS = StreamShape(score="confidence", num_blocks=6, ramps=(1, 4))
ENTROPY = PolicySpec(name="entropy", thresholds=0.5)


def observed_plan(
    policy: PolicySpec | None = ENTROPY,
    *,
    epoch: int = 1,
    ramps: tuple[int, ...] = (1, 2),
    cut: int = 2,
    after: AfterAnswer = "stop",
) -> PlacedPlan:
    """Returns a plan of four blocks in two stages, with ramps."""
    bounds = (0, cut), (cut, 4)
    splits = [split(*pair, tuple(r for r in ramps if pair[0] <= r < pair[1]), after_answer=after) for pair in bounds]
    return placed(*map(stage, splits), policy=policy, epoch=epoch)


class Up(NamedTuple):
    """A fake replica that accepts calls."""

    name: str
    is_up: bool = True

    def end(self, sequence: int) -> None:
        raise AssertionError("no sequence was begun here")


@cache
def keeper(name: str) -> ReplicaLoad[Up]:
    """The replica of this name."""
    return ReplicaLoad(Up(name))


class CoreWorld:
    """A core whose events happen at `now_s`, and whose due calls are sent at once."""

    def __init__(self, placed: PlacedPlan | None = None, **rules: Any) -> None:
        self.now_s = 0.0
        self.log: list[str] = []
        self.calls: list[Call] = []
        self.inputs: dict[str, PendingInput] = {}
        self.outcomes: dict[str, str] = {}
        self.placements: dict[str, KVPlacement] = {}
        """The placements of sequences by name."""
        self.room = "r1"
        """The replica that gets sequences without a replica at a slot."""
        self._retries: Counter[str] = Counter()
        given = IngressOptions(**{"max_attempts": 3} | rules)
        self.core = IngressCore("i", placed or plan(), given, random.Random(0))

    # Requests

    def submit(self, letters: str, *lengths: int, deadline_s: float = 10.0) -> None:
        """Submits a request. `lengths`: of its inputs, if they have any."""
        made = [
            self._pending(letter, deadline_s, tokens)
            for letter, tokens in zip(letters, lengths or (1,) * len(letters), strict=True)
        ]
        self.core.submit(made, self.now_s)
        self.inputs |= dict(zip(letters, made, strict=True))
        self.do()

    def begin(self, name: str, letter: str, *, again: bool = False) -> None:
        """Starts a sequence with its first input."""
        self.placements[name] = KVPlacement(len(self.placements) + 1, is_retry=again)
        self.step(name, letter, tokens=5)

    def step(self, name: str, letter: str, *, tokens: int = 1) -> None:
        """Submits the next input of a sequence, which is sent at the end of this moment."""
        pending = self._pending(letter, 10.0, tokens)
        pending.placement = self.placements[name]
        self.core.submit((pending,), self.now_s)
        self.inputs[letter] = pending

    def give_up(self, letters: str) -> None:
        self.do(self.core.give_up(self.named(letters), "abandoned", self.now_s))

    # Replies

    def answer(self, call: int, letters: str, *, block: int = 3) -> None:
        said = [f"{letter} is {letter}" for letter in letters]
        self.do(self.core.answer(self.calls[call], self.named(letters), block, self.now_s, said))

    def answer_early(self, call: int, letters: str, *, block: int) -> None:
        said = [f"{letter} is {letter}" for letter in letters]
        self.do(self.core.answer_early(self.calls[call], self.named(letters), block, self.now_s, said))

    def go_on(self, call: int, letters: str, *, block: int = 2) -> None:
        self.do(self.core.go_on(self.calls[call], self.named(letters), block, f"({letters})", self.now_s))

    def lose(self, call: int, letters: str, error: OfframpError | None = None) -> None:
        why = error or ExecutionError("the model failed on it")
        self.do(self.core.lose(self.calls[call], self.named(letters), why, self.now_s))

    def fail(self, call: int) -> None:
        self.do(self.core.fail(self.calls[call], self.calls[call].remaining(), self.now_s))

    def see(self, call: int, letters: str, *blocks: int, score: float = 0.5, label: int = 0) -> None:
        """Reports the results of exits after these blocks; the last block's exit has no score."""
        last = self.core.placed.plan.num_blocks - 1
        for letter in letters:
            for block in blocks:
                said = Answer(sample_id="", exit=block, score=math.nan if block == last else score, value=label)
                self.core.observe(self.calls[call], [(self.inputs[letter], said)])

    def observed(self, wall_s: float = 0.0) -> Observations | None:
        return self.core.report(self.now_s, wall_s).probes

    # Plans and time

    def suspend(self) -> None:
        self.do(self.core.suspend("nothing is left", self.now_s))

    def follow(self, placed: PlacedPlan) -> None:
        self.core.follow(placed)
        self.do()

    def set_available(self, *slots: str) -> None:
        self.core.chains.set_available(dict.fromkeys(slots, 9))
        self.do()

    def until(self, now_s: float) -> None:
        """Calls `wake` for all timers up to a time."""
        while self.core.wake_s <= now_s:
            self.now_s = max(self.now_s, self.core.wake_s)
            actions = []
            while self.core.wake_s <= self.now_s:
                actions += self.core.wake(self.now_s)
            self.do(actions)
        self.now_s = now_s

    def do(self, actions: Iterable[Action] = ()) -> None:
        for slot, number in (self.core.counts.retries - self._retries).items():
            self._say(f"again {number} of {NAMES[slot]}")
        self._retries = self.core.counts.retries.copy()
        for action in actions:
            self._write(action)
        while self.core.is_due:
            for action in self.core.pump(self.now_s):
                self._write(action)

    def named(self, letters: str) -> list[PendingInput]:
        return [self.inputs[letter] for letter in letters]

    def awaited(self, call: int) -> list[bool]:
        return [self.core.is_awaited(self.calls[call], each) for each in self.calls[call].inputs]

    def _pending(self, letter: str, deadline_s: float, tokens: int) -> PendingInput:
        return PendingInput(0, self.now_s, deadline_s, tokens, key=letter)

    def _write(self, action: Action) -> None:
        match action:
            case SendCall():
                self._write_send(action)
            case ReturnAnswers(inputs, block, answers, _):
                self._settle(inputs, "answered")
                self._say(f"answer {', '.join(answers)} after block {block}")
            case ReturnErrors(inputs, reason, error):
                self._settle(inputs, reason)
                self._say(f"drop {letters_of(inputs)}: {reason if error is None else error}")
            case AbortCall(call):
                self._say(f"hang up {self.calls.index(call)}")

    def _write_send(self, send: SendCall) -> None:
        call, block, payload, network, rows = send
        self.calls.append(call)
        crosses = network is not None and payload is not None
        what = letters_of(call.inputs) if crosses else payload or letters_of(call.inputs)
        words = f"send {len(self.calls) - 1}: {what} to {NAMES[call.stage.slot]} for block {block}"
        words += f" of network {network}" if network else ""
        placements = placements_of(call.inputs)
        for placement in placements[:1]:
            found = placement.keepers.get(call.stage.slot)
            words += f" at {found.replica.name if found else 'any'}" + (", probes" if call.probe else "")
            words += "" if rows is None else f", rows {list(rows)}"
        for placement in placements:
            placement.keepers.setdefault(call.stage.slot, keeper(self.room))
        self._say(words)

    def _settle(self, inputs: Inputs, outcome: str) -> None:
        for each in inputs:
            assert each.key not in self.outcomes, "an input has one outcome"
            self.outcomes[each.key] = outcome

    def _say(self, what: str) -> None:
        self.log.append(f"{self.now_s:g} {what}")


def observing(placed: PlacedPlan | None = None, **rules: Any) -> CoreWorld:
    """Returns a world in which every call with new inputs is a probe."""
    return CoreWorld(placed or observed_plan(), **{"shape": SHAPE, "probe_share": 1.0, **rules})


def staying(placed: PlacedPlan | None = None, **rules: Any) -> CoreWorld:
    """Returns a world in which answered inputs stay, without probes."""
    return observing(placed or observed_plan(after="stay"), **{"probe_share": 0.0, **rules})


def letters_of(inputs: Inputs) -> str:
    return "".join(each.key for each in inputs)
