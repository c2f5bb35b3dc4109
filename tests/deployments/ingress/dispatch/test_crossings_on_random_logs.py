"""Whatever changes while inputs wait, run and cross: each has one outcome, the answer of the path that it took."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from earlyexit.codecs.chain import ChainCodec
from earlyexit.network.boundary import AfterAnswer, Answer, Split
from earlyexit.network.chain import Chain, joined
from optimizer.plan import Plan, PolicySpec, Stage
from tests.chained_texts import LETTERS, chained
from tests.deployments.ingress.dispatch.chain_arithmetic import after, begun, is_sure
from tests.deployments.ingress.dispatch.chain_world import World

CHAIN = joined(("m0", "m1", "m2"), (2, 3, 3), ((0,), (0,), (0, 1)))
SURE = PolicySpec(name="confidence", thresholds=0.5)
EVENTS = ["submit"] * 8 + ["plan"] * 3 + ["kill", "give up", "wait"]
MAX_LENGTH = 16


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> ChainCodec:
    return chained(tmp_path_factory.mktemp("chain"), max_lengths=(MAX_LENGTH,) * 3, firsts=(4, 24, 54))


def random_plan(rng: random.Random, chain: Chain, epoch: int, after_answer: AfterAnswer) -> Plan:
    """Any networks with the last among them, cut anywhere, in one to three stages, with any ramps."""
    networks = [k for k in range(len(chain.lengths) - 1) if rng.random() < 0.6] + [len(chain.lengths) - 1]
    tokens = rng.choice((None, 8))
    splits: list[Split] = []
    for network in networks:
        start, end = chain.starts[network], chain.bounds[network]
        cuts = sorted(rng.sample(range(start + 1, end), rng.randint(0, min(2, end - start - 1))))
        for first, until in zip([start, *cuts], [*cuts, end], strict=True):
            ramps = tuple(ramp for ramp in chain.ramps if first <= ramp < until and rng.random() < 0.6)
            batch = rng.randint(1, 4)
            splits.append(
                Split(first=first, end=until, batch=batch, ramps=ramps, after_answer=after_answer, tokens=tokens)
            )
    bounds = sorted(rng.sample(range(1, len(splits)), min(rng.randint(0, 2), len(splits) - 1)))
    stages = tuple(
        Stage(device="cpu", replicas=rng.randint(1, 2), splits=tuple(splits[first:until]))
        for first, until in zip([0, *bounds], [*bounds, len(splits)], strict=True)
    )
    return Plan(stages=stages, policy=SURE, networks=chain.networks, epoch=epoch)


def some_text(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS + " ", k=rng.randint(1, 12)))


@dataclass
class RandomLog:
    """One service from its first plan to its last answer."""

    codec: ChainCodec
    seed: int
    num_events: int = 25

    def run(self) -> World:
        rng = random.Random(self.seed)
        self.after_answer: AfterAnswer = rng.choice(("stop", "stop", "stay"))
        world = World(CHAIN, self.codec, random_plan(rng, CHAIN, 1, self.after_answer), self.seed)
        self.texts: dict[str, str] = {}
        flights = []
        epoch = 1
        for _ in range(self.num_events):
            world.run(rng.random() * rng.choice((0.05, 0.5, 2.0)))
            match rng.choice(EVENTS):
                case "submit":
                    texts = [some_text(rng) for _ in range(rng.randint(1, 5))]
                    names = [f"{len(self.texts) + k}" for k in range(len(texts))]
                    self.texts |= zip(names, texts, strict=True)
                    flights += world.submit(texts, names)
                case "plan":
                    epoch += 1
                    world.follow_plan(random_plan(rng, CHAIN, epoch, self.after_answer))
                case "kill":
                    world.kill()
                case "give up" if flights:
                    world.give_up([rng.choice(flights)])
        world.run()
        return world

    def check(self, world: World) -> None:
        assert world.outcomes.keys() == self.texts.keys(), "nobody is lost"
        assert world.core.num_unanswered == world.core.num_waiting == 0
        for name, outcome in world.outcomes.items():
            if isinstance(outcome, Answer):
                self._check_path(name, outcome)
            else:
                assert outcome == "abandoned"

    def _check_path(self, name: str, answer: Answer) -> None:
        network = CHAIN.network_of(answer.exit)
        [encoded] = self.codec.of(network).encode([self.texts[name]])
        number = begun([int(each) for each in encoded.tensors[0]])
        for block in range(CHAIN.starts[network], answer.exit + 1):
            number = after(number, block)
        assert answer.value == number, "of this network's blocks, each once, on this network's own encoding"
        assert answer.exit == CHAIN.num_blocks - 1 or is_sure(name, answer.exit)


def check_logs(codec: ChainCodec, seeds: range) -> None:
    crossed = 0
    for seed in seeds:
        log = RandomLog(codec, seed)
        world = log.run()
        log.check(world)
        crossed += sum(block > 0 for _, block, _ in world.crossed)
    assert crossed > len(seeds), "there was something to be seen"


def test_each_input_has_one_outcome_and_the_answer_of_its_path(codec: ChainCodec) -> None:
    check_logs(codec, range(30))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_on_two_thousand_logs(codec: ChainCodec, part: int) -> None:
    check_logs(codec, range(200 * part, 200 * (part + 1)))
