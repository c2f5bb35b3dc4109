"""Random chains under random plans that change while inputs are everywhere: each answer is that of the path it took."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
from torch import Tensor

from earlyexit.clock import ManualClock
from earlyexit.engine.device import Answered, Device, Release, Survivors
from earlyexit.engine.engine import Batch, BatchEngine
from earlyexit.engine.queue import Member
from earlyexit.engine.times import ObservedTimes
from earlyexit.network.boundary import Answer, Split
from earlyexit.network.chain_network import ChainNetwork
from earlyexit.network.cut import TorchRunner
from earlyexit.network.model import from_wire
from earlyexit.network.piece import Piece
from earlyexit.policies.base import ExitPolicy, Opinion
from earlyexit.policies.counting import PatiencePolicy
from earlyexit.policies.ensemble import EnsemblePolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from earlyexit.training.ramps import exit_outputs
from optimizer.plan import Plan, PolicySpec, Stage
from tests.earlyexit.network.chains import Inputs, chained, inputs_for
from tests.earlyexit.network.cuts import assert_same

DEVICES = 3
STEPS = 60


def random_chain(rng: random.Random) -> ChainNetwork:
    lengths = [rng.randint(1, 3) for _ in range(rng.randint(2, 3))]
    at = [[block for block in range(length - 1) if rng.random() < 0.7] for length in lengths]
    return chained(*lengths, seed=rng.randrange(1000), at=at)


def random_policy(network: ChainNetwork, rng: random.Random) -> ExitPolicy:
    limits = {ramp: rng.uniform(0.4, 0.9) for ramp in network.ramp_indices}
    weights = {end: rng.uniform(0, 0.6) for end in network.chain.end_ramps if rng.random() < 0.8}
    return rng.choice(
        [
            ConfidencePolicy(limits),
            EntropyPolicy({ramp: 1.6 * (1 - limit) for ramp, limit in limits.items()}),
            EnsemblePolicy(ConfidencePolicy(limits), weights),
            PatiencePolicy(rng.randint(1, 2)),
        ]
    )


def random_plan(network: ChainNetwork, rng: random.Random) -> Plan:
    """Of any networks but without the last never, cut anywhere, any ramps on; a stage for each device at most."""
    chain = network.chain
    used = [place for place in range(len(network.members) - 1) if rng.random() < 0.6] + [len(network.members) - 1]
    splits: list[Split] = []
    tokens = rng.choice([None, None, 25])
    for place in used:
        first, end = chain.starts[place], chain.bounds[place]
        cuts = [block for block in range(first + 1, end) if rng.random() < 0.5]
        for a, b in pairwise([first, *cuts, end]):
            ramps = tuple(ramp for ramp in chain.ramps if a <= ramp < b and rng.random() < 0.7)
            splits.append(Split(first=a, end=b, batch=rng.randint(1, 6), tokens=tokens, ramps=ramps))
    cuts = sorted(rng.sample(range(1, len(splits)), min(len(splits) - 1, rng.randint(0, DEVICES - 1))))
    stages = tuple(
        Stage(device="cpu", replicas=1, splits=tuple(splits[a:b])) for a, b in pairwise([0, *cuts, len(splits)])
    )
    return Plan(stages=stages, networks=chain.networks, policy=PolicySpec(name="patience", patience=1))


@dataclass(frozen=True)
class Ran:
    """A split that an input went through, and what decided there."""

    split: Split
    policy: ExitPolicy


class Service:
    """Devices under one plan, and the encoding of inputs for them: a service without its processes."""

    def __init__(self, network: ChainNetwork, inputs: Inputs, rng: random.Random) -> None:
        self.network, self.inputs, self.rng = network, inputs, rng
        self.answers: dict[str, Answer] = {}
        self.done: set[str] = set()
        self.paths: dict[str, list[Ran]] = defaultdict(list)
        self.counted = {"crossings": 0, "skipped": 0, "passing": 0}
        self.plan = random_plan(network, rng)
        self.policy = random_policy(network, rng)
        self.devices = [self._device() for _ in range(DEVICES)]
        self.probes = {each for each in inputs.ids if rng.random() < 0.2}
        self.follow(self.plan)

    def _device(self) -> Device[Piece]:
        runner = TorchRunner(self.network, self.policy)
        engine: BatchEngine[Piece] = BatchEngine((), ObservedTimes(), starts=self.network.chain.starts)
        return Device(engine, runner, ManualClock(), self.deliver, self.note)

    def follow(self, plan: Plan) -> None:
        self.plan = plan
        self.policy = random_policy(self.network, self.rng)
        places = self.rng.sample(range(DEVICES), len(plan.stages))
        self.device_of = dict(zip(places, plan.stages, strict=True))
        for place, device in enumerate(self.devices):
            device.engine.follow(self.device_of[place].splits if place in self.device_of else (), "work-conserving")
            device.runner.follow(self.policy)

    def enter(self, sample_id: str, block: int, before: Piece | None = None) -> None:
        """Encoded for the network that begins with a block, or the next one that the plan uses."""
        to = next(split.first for split in self.plan.splits if split.first >= block)
        wire = self.inputs.wire(self.network.chain.network_of(to), to, [sample_id])
        if before is not None:
            wire = replace(wire, state_BS=before.to_wire().state_BS)
        self.send(to, sample_id, from_wire(self.network, wire, self.policy), answered=sample_id in self.answers)

    def send(self, block: int, sample_id: str, piece: Piece, *, answered: bool) -> None:
        hosts = [
            (place, stage)
            for place, stage in self.device_of.items()
            if any(split.first <= block < split.end for split in stage.splits)
        ]
        [(place, stage)] = hosts
        member = Member(
            sample_id=sample_id,
            payload=piece,
            tokens=int(piece.lengths_B.sum()),
            probe=sample_id in self.probes,
            answered=answered,
        )
        self.devices[place].engine.submit(block, [member], 0.0, stage.splits)

    def deliver(self, releases: list[Release[Piece]]) -> None:
        for release in releases:
            if isinstance(release, Answered):
                self.answers.setdefault(release.answer.sample_id, release.answer)
                if not release.stays:
                    assert release.answer.sample_id not in self.done
                    self.done.add(release.answer.sample_id)
            elif isinstance(release, Survivors):
                for member, single in zip(release.members, release.piece.singles(), strict=True):
                    self.goes_on(member, single)

    def goes_on(self, member: Member[Piece], piece: Piece) -> None:
        block, chain = piece.next_block, self.network.chain
        if block in chain.starts:
            assert piece.tensors == ()
            self.counted["crossings"] += 1
            self.enter(member.sample_id, block, piece)
        elif chain.network_of(block) not in self.plan.used:
            self.counted["skipped"] += 1
            self.enter(member.sample_id, chain.bounds[chain.network_of(block)], piece)
        else:
            arrived = from_wire(self.network, piece.to_wire(), self.policy)
            self.send(block, member.sample_id, arrived, answered=member.answered)

    def note(self, batch: Batch[Piece], seconds: float) -> None:
        self.counted["passing"] += batch.split not in self.plan.splits
        for member in batch.members:
            self.paths[member.sample_id].append(Ran(batch.split, self.policy))

    def kill(self, place: int) -> None:
        """A device is lost with the inputs that wait there, which begin anew."""
        engine = self.devices[place].engine
        lost = [member.sample_id for queue in engine._deepest_first for member in queue.members]
        self.devices[place] = self._device()
        splits = self.device_of[place].splits if place in self.device_of else ()
        self.devices[place].engine.follow(splits, "work-conserving")
        for sample_id in lost:
            self.paths[sample_id].clear()
            self.answers.pop(sample_id, None)
            self.enter(sample_id, self.plan.entry)

    def run_one(self, place: int) -> bool:
        device = self.devices[place]
        batch = device.start_next()
        if not isinstance(batch, Batch):
            return False
        device.requeue(device.run(batch))
        return True

    def run_until_idle(self) -> None:
        while any(self.run_one(place) for place in range(DEVICES)):
            pass


def outputs_of(network: ChainNetwork, inputs: Inputs) -> dict[int, Tensor]:
    """Every exit's, each network run alone on all inputs as it takes them."""
    found: dict[int, Tensor] = {}
    for place, member in enumerate(network.members):
        start = network.chain.starts[place]
        found |= {start + block: each for block, each in exit_outputs(member, inputs.of_network[place]).items()}
    return found


def expected_answer(
    network: ChainNetwork, outputs: dict[int, Tensor], sample_id: str, path: Sequence[Ran]
) -> tuple[Answer, int]:
    """What the exits on a path say, and the block where it must have ended unless the input stays."""
    row = int(sample_id[1:])
    state = path[0].policy.initial_state(1, network.task.num_outputs, network.device)
    for ran in path:
        policy = ran.policy
        fresh = policy.initial_state(1, network.task.num_outputs, network.device)
        if (fresh.shape, fresh.shape[1] and fresh.dtype) != (state.shape, state.shape[1] and state.dtype):
            state = fresh
        for ramp in ran.split.ramps:
            if not policy.can_decide(ramp):
                continue
            opinion = Opinion(network.task, outputs[ramp][row : row + 1])
            verdict = policy.decide(ramp, opinion, state, (sample_id,))
            state = verdict.state_BS
            if verdict.leave_B[0]:
                value_B = opinion.value_B if verdict.value_B is None else verdict.value_B
                return _answer(sample_id, value_B, verdict.score_B, ramp), ramp
    last = network.num_blocks - 1
    value_B, score_B = path[-1].policy.conclude(
        Opinion(network.task, outputs[last][row : row + 1]), state, (sample_id,)
    )
    return _answer(sample_id, value_B, score_B, last), last


def _answer(sample_id: str, value_B: Tensor, score_B: Tensor, block: int) -> Answer:
    return Answer(sample_id=sample_id, value=int(value_B[0]), score=float(score_B[0]), exit=block)


def check_path(network: ChainNetwork, path: Sequence[Ran], ended: int, *, stays: bool) -> None:
    """Within a network without a gap from its start on, from one network to a later one, to the end of the last."""
    chain = network.chain
    assert path[0].split.first in chain.starts
    for before, after in pairwise(path):
        first = after.split.first
        assert first == before.split.end or (
            first in chain.starts and chain.network_of(first) > chain.network_of(before.split.first)
        )
    last = path[-1].split
    assert last.end == network.num_blocks or (not stays and last.first <= ended < last.end)


def play(seed: int) -> dict[str, int]:
    """One service's life; gives what happened how often."""
    rng = random.Random(seed)
    network = random_chain(rng)
    inputs = inputs_for(network, count=24, seed=seed)
    service, waiting = Service(network, inputs, rng), inputs.ids
    kills = changes = 0
    for _ in range(STEPS):
        what = rng.random()
        if what < 0.3 and waiting:
            for _ in range(min(len(waiting), rng.randint(1, 4))):
                service.enter(waiting.pop(), service.plan.entry)
        elif what < 0.4:
            service.follow(random_plan(network, rng))
            changes += 1
        elif what < 0.43:
            service.kill(rng.randrange(DEVICES))
            kills += 1
        else:
            service.run_one(rng.randrange(DEVICES))
    while waiting:
        service.enter(waiting.pop(), service.plan.entry)
    service.run_until_idle()
    outputs = outputs_of(network, inputs)
    assert service.done == set(inputs.ids)
    expected = {}
    for sample_id in inputs.ids:
        path = service.paths[sample_id]
        expected[sample_id], ended = expected_answer(network, outputs, sample_id, path)
        stays = sample_id in service.probes and path[-1].policy.can_look(0)  # else a probe runs as any other
        check_path(network, path, ended, stays=stays)
    assert_same(service.answers, expected, within=1e-3)
    return {**service.counted, "kills": kills, "changes": changes}


@pytest.mark.parametrize("seeds", [range(first, first + 5) for first in range(0, 20, 5)], ids=str)
def test_every_answer_is_that_of_the_path_that_its_input_took(seeds: range) -> None:
    counted = [play(seed) for seed in seeds]
    assert all(sum(each[name] for each in counted) for name in ("crossings", "changes", "kills"))


def test_inputs_are_met_everywhere_by_a_change() -> None:
    counted = [play(seed) for seed in range(100, 106)]
    assert all(sum(each[name] for each in counted) for name in ("crossings", "skipped", "passing"))
