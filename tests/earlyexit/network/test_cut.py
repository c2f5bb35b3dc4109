from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, combinations, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.engine.device import Step
from earlyexit.engine.engine import Batch
from earlyexit.engine.queue import Member
from earlyexit.network.boundary import Answer, Encoded, Segment, Split
from earlyexit.network.model import ChainNetwork, Cut, EarlyExitModel, SegmentRunner, TorchRunner, from_wire
from earlyexit.network.piece import Piece, Tensors, fuse
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.counting import PatiencePolicy, TabiPolicy, VotingPolicy
from earlyexit.policies.ensemble import EnsemblePolicy, RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy, ThresholdPolicy
from earlyexit.policies.wrapper import exit_wrapper
from earlyexit.ramps.heads import Ramp
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.network.chains import chained, follow, inputs_for, offline, spread
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, cuts_of, every_bounds, piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import wire_of

RAMPS = (0, 1, 2)
NUM_BLOCKS = 4
BOUNDS = every_bounds(NUM_BLOCKS)


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    """Returns a model of four blocks whose exits disagree: their logits are spread around zero over random inputs."""
    return spread(small())


def own_independent() -> ExitPolicy:
    @exit_wrapper
    def first_label_leads(ramp: int, logits_BC: Tensor) -> Tensor:
        return logits_BC[:, 0] > logits_BC[:, 1] + 0.5 - 0.25 * ramp

    return first_label_leads


def own_dependent() -> ExitPolicy:
    @exit_wrapper(state_width=2)
    def enough_confidence_in_all(ramp: int, logits_BC: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        confidence_B = logits_BC.softmax(-1).amax(-1)
        state_BS = state_BS + torch.stack([confidence_B, torch.ones_like(confidence_B)], 1)
        return state_BS[:, 0] > 0.45 + 0.3 * state_BS[:, 1], state_BS

    return enough_confidence_in_all


def recorded() -> ExitPolicy:
    rng = np.random.default_rng(3)
    answers = RecordedAnswers(
        row_of={f"i{k}": k for k in range(24)},
        ramps=RAMPS,
        scores_NR=rng.random((24, 3), dtype=np.float32),
        answers_NE=np.column_stack([rng.integers(0, 3, (24, 3)), rng.integers(0, 3, 24)]),
    )
    return RecordedPolicy(answers, EntropyPolicy(0.3))


POLICIES: dict[str, Callable[[], ExitPolicy]] = {
    "entropy": lambda: EntropyPolicy({0: 0.7, 1: 0.8, 2: 0.9}),
    "confidence": lambda: ConfidencePolicy(0.6),
    "tabi": lambda: TabiPolicy(0.4, 10.0),
    "ensemble": lambda: EnsemblePolicy(EntropyPolicy({0: 0.7, 1: 0.8, 2: 0.9}), {0: 0.3, 2: 0.4}),
    "patience": lambda: PatiencePolicy(1),
    "voting": lambda: VotingPolicy(2),
    "recorded": recorded,
    "own, independent": own_independent,
    "own, dependent": own_dependent,
}
each_policy = pytest.mark.parametrize("make_policy", [pytest.param(make, id=name) for name, make in POLICIES.items()])


@each_policy
def test_cuts_other_inputs_the_wire_and_probes_change_no_answer(
    make_policy: Callable[[], ExitPolicy], model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    policy = make_policy()
    expected = answers_alone(model, policy, encoded)
    assert len({answer.exit for answer in expected.values()}) >= 3
    assert len({answer.value for answer in expected.values()}) >= 2
    for seed, bounds in enumerate(BOUNDS):
        answers = answers_in_cuts(model, policy, encoded, bounds, seed=seed, over_the_wire=seed % 2 > 0)
        assert_same(answers, expected)
    uncut = probe(model, policy, encoded, (0, NUM_BLOCKS))
    assert {len(answers) for answers in uncut.answers.values()} == {1, 2}
    assert {answers[-1].exit for answers in uncut.answers.values()} == {NUM_BLOCKS - 1}, "also at the model's end"
    for bounds in BOUNDS:
        assert_same(probe(model, policy, encoded, bounds).first_answers, expected)


def test_a_cut_stops_when_all_inputs_have_left(model: EarlyExitModel, encoded: list[Encoded]) -> None:
    policy = ConfidencePolicy(0.0)
    steps = list(Cut(model, 0, NUM_BLOCKS, RAMPS, policy).run(piece_of(model, policy, encoded)))
    assert [(len(step.answers), step.survivors) for step in steps] == [(24, None)]


def test_a_piece_from_a_read_only_buffer_can_be_run(model: EarlyExitModel, encoded: list[Encoded]) -> None:
    wire = wire_of(encoded[:2])
    wire.tensors[0].setflags(write=False)
    policy = VotingPolicy(9)
    *_, last = Cut(model, 0, NUM_BLOCKS, RAMPS, policy).run(from_wire(model, wire, policy))
    assert [answer.exit for answer in last.answers] == [3, 3]


def numbers_with(number: float, *, block: int) -> EarlyExitModel:
    """Returns a model of two blocks, in which the exit after one of them always answers `number`."""
    model = small(RegressionTask(1.0), num_blocks=2)
    head = model.exit_head(block)
    assert isinstance(head.classifier, torch.nn.Linear)
    head.classifier.bias[0] = number
    return model


@pytest.mark.parametrize(("threshold", "block"), [(0.0, 0), (1.1, 1)], ids=["ramp", "full model"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
def test_an_answer_that_is_not_finite_is_an_error(
    threshold: float, block: int, number: float, encoded: list[Encoded]
) -> None:
    model, policy = numbers_with(number, block=block), ConfidencePolicy(threshold)
    with pytest.raises(ArithmeticError, match=f"the exit after block {block} gave an answer that is not finite"):
        list(Cut(model, 0, 2, (0,), policy).run(piece_of(model, policy, encoded[:2])))


def test_a_ramp_with_an_infinite_answer_costs_a_probe_its_record_but_not_its_answer(encoded: list[Encoded]) -> None:
    model, policy = numbers_with(np.nan, block=0), ConfidencePolicy(0.0)
    steps = list(Cut(model, 0, 2, (), policy).observing(model.ramp_indices).run(piece_of(model, policy, encoded[:2])))
    assert [each.exit for step in steps for each in step.seen] == [1, 1]
    assert [len(step.answers) for step in steps] == [0, 2]


def test_an_input_without_a_score_fails_no_other(encoded: list[Encoded], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LabelTask, "score", lambda _, outputs_BC: torch.tensor([1.0, math.nan])[: len(outputs_BC)])
    model, policy = small(num_blocks=2), ConfidencePolicy(0.5)
    steps = list(Cut(model, 0, 2, (0,), policy).run(piece_of(model, policy, encoded[:2])))
    assert [answer.exit for step in steps for answer in step.answers] == [0, 1]


class Watched(LabelTask):
    """Labels with outputs that count as large; it records how many inputs were answered at a time."""

    large = True

    def __init__(self, label_names: Sequence[str]) -> None:
        super().__init__(label_names)
        self.asked: list[int] = []

    def answer(self, outputs_BC: Tensor) -> Tensor:
        self.asked.append(len(outputs_BC))
        return super().answer(outputs_BC)


def test_large_outputs_become_answers_only_for_inputs_that_leave(encoded: list[Encoded]) -> None:
    task = Watched(("no", "yes"))
    model = small(task, num_blocks=2)
    scores = sorted(task.score(exit_outputs(model, encoded[:8])[0]).tolist())
    policy = ConfidencePolicy((scores[4] + scores[5]) / 2)
    steps = list(Cut(model, 0, 2, (0,), policy).run(piece_of(model, policy, encoded[:8])))
    assert [len(step.answers) for step in steps] == [3, 5]
    assert task.asked == [3, 5]
    alone = answers_alone(model, policy, encoded[:8])
    assert_same({answer.sample_id: answer for step in steps for answer in step.answers}, alone)


@dataclass
class Probed:
    """The releases of probes."""

    answers: dict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    """All answers to an input, in their order."""
    seen: dict[tuple[str, int], Answer] = field(default_factory=dict)

    @property
    def first_answers(self) -> dict[str, Answer]:
        return {sample_id: answers[0] for sample_id, answers in self.answers.items()}


def probe(
    model: EarlyExitModel,
    policy: ExitPolicy,
    encoded: Sequence[Encoded],
    bounds: Sequence[int],
    ramps: Sequence[int] = RAMPS,
) -> Probed:
    """Runs every input as a probe through the splits in turn, in random batches."""
    rng = random.Random(1)
    probed = Probed()
    waiting = piece_of(model, policy, encoded).singles()
    for cut in cuts_of(model, policy, bounds, ramps).values():
        rng.shuffle(waiting)
        survivors: list[Piece] = []
        while waiting:
            size = rng.randint(1, 6)
            batch, waiting = fuse(waiting[:size]), waiting[size:]
            for step in cut.observing(model.ramp_indices).run(batch):
                inside = step.survivors
                assert (inside is None) == (step.seen[0].exit == NUM_BLOCKS - 1 if step.seen else False)
                assert inside is None or inside.sample_ids == batch.sample_ids
                for answer in step.answers:
                    probed.answers[answer.sample_id].append(answer)
                for seen in step.seen:
                    assert (seen.sample_id, seen.exit) not in probed.seen
                    probed.seen[seen.sample_id, seen.exit] = seen
            survivors += inside.singles() if inside is not None else []
        waiting = survivors
    return probed


@pytest.mark.parametrize("active", [(), (1,), (0, 2)], ids=["none active", "one active", "two active"])
def test_inactive_ramps_do_nothing(active: tuple[int, ...], model: EarlyExitModel, encoded: list[Encoded]) -> None:
    policy = EntropyPolicy(dict.fromkeys(active, 0.8))
    for bounds in BOUNDS:
        probed = probe(model, policy, encoded, bounds, active)
        assert {answer.exit for answer in probed.first_answers.values()} == {*active, NUM_BLOCKS - 1}
        assert set(probed.seen) == {(f"i{k}", block) for k in range(24) for block in range(NUM_BLOCKS)}


@pytest.mark.parametrize("make", [EntropyPolicy, ConfidencePolicy], ids=["entropy", "confidence"])
def test_observed_scores_are_those_that_the_policy_compares_with_its_threshold(
    make: Callable[[float], ThresholdPolicy], model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    policy = make(0.7)
    probed = probe(model, policy, encoded, (0, 2, NUM_BLOCKS))
    for sample_id, answer in answers_alone(model, policy, encoded).items():
        sure = [
            ramp for ramp in RAMPS if policy.is_sure(ramp, torch.tensor([probed.seen[sample_id, ramp].score])).item()
        ]
        assert answer.exit == min([*sure, NUM_BLOCKS - 1])
        assert answer.value == probed.seen[sample_id, answer.exit].value
        assert math.isnan(probed.seen[sample_id, NUM_BLOCKS - 1].score)


WHOLE = Split(first=0, end=4, batch=8, ramps=(0, 1, 2))
HALVES = (Split(first=0, end=2, batch=8, ramps=(0,)), Split(first=2, end=4, batch=8, ramps=(2,)))
EVERYONE_LEAVES, NOBODY_LEAVES = ConfidencePolicy(0.0), ConfidencePolicy(1.1)


def batch_of(split: Split, piece: Piece, *, probe: bool = False) -> Batch[Piece]:
    members = tuple(Member(sample_id=one.sample_ids[0], payload=one, probe=probe) for one in piece.singles())
    return Batch(split=split, members=members, tokens=len(members), started_s=0.0, probe=probe)


def run(runner: TorchRunner, split: Split, piece: Piece, *, probe: bool = False) -> list[Step[Piece]]:
    return list(runner.run(batch_of(split, piece, probe=probe)))


def survivors_of(steps: Sequence[Step[Piece]]) -> Piece:
    assert steps[-1].survivors is not None
    return steps[-1].survivors


def exits(steps: Sequence[Step[Piece]]) -> list[int]:
    return [answer.exit for step in steps for answer in step.answers]


def test_another_policy_decides_from_the_next_batch_on(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    runner = TorchRunner(small_model, NOBODY_LEAVES)
    piece = runner.from_wire(wire_of(encoded[:2]))
    running = runner.run(batch_of(WHOLE, piece))
    first = next(running)
    runner.follow(EVERYONE_LEAVES)
    assert exits([first, *running]) == [3, 3]
    assert exits(run(runner, WHOLE, piece)) == [0, 0]


def test_no_input_leaves_at_a_ramp_without_a_threshold(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    for policy in (ConfidencePolicy({1: 0.0}), EnsemblePolicy(ConfidencePolicy({1: 0.0}), {3: 0.5})):
        runner = TorchRunner(small_model, policy)
        assert exits(run(runner, WHOLE, runner.from_wire(wire_of(encoded[:2])))) == [1, 1]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(NOBODY_LEAVES, PatiencePolicy(2), id="none, then patience"),
        pytest.param(PatiencePolicy(9), NOBODY_LEAVES, id="patience, then none"),
        pytest.param(VotingPolicy(9), PatiencePolicy(2), id="votes for two labels, then patience"),
    ],
)
def test_inputs_of_another_policy_start_anew(before: ExitPolicy, after: ExitPolicy, encoded: list[Encoded]) -> None:
    runner = TorchRunner(small(LabelTask(("a", "b"))), before)
    old = survivors_of(run(runner, HALVES[0], runner.from_wire(wire_of(encoded[:12]))))
    runner.follow(after)
    new = survivors_of(run(runner, HALVES[0], runner.from_wire(wire_of(encoded[12:]))))
    both = (*batch_of(HALVES[1], old).members, *batch_of(HALVES[1], new).members)
    steps = list(runner.run(Batch(split=HALVES[1], members=both, tokens=len(both), started_s=0.0)))
    assert set(exits(steps)) == {3}


def test_probes_run_as_other_inputs_if_the_policy_cannot_observe(
    small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    runner = TorchRunner(small_model, VotingPolicy(1))
    (step,) = run(runner, WHOLE, runner.from_wire(wire_of(encoded[:2])), probe=True)
    assert (exits([step]), step.seen, step.survivors) == ([0, 0], (), None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("split", [WHOLE, HALVES[1]], ids=["from tokens", "from a hidden state"])
def test_warm_up_inputs_run(split: Split, dtype: torch.dtype, small_model: EarlyExitModel) -> None:
    runner = TorchRunner(small_model.to(dtype), NOBODY_LEAVES)
    piece = runner.warm_up_pieces(split, 3)
    assert piece.lengths_B.tolist() == [16, 16, 16]
    assert exits(run(runner, split, piece)) == [3, 3, 3]


@dataclass
class SlowSegments(SegmentRunner):
    """Records the segments that it runs."""

    inner: EarlyExitModel
    ran: list[Segment] = field(default_factory=list)

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        self.ran.append(segment)
        return self.inner.run(segment, piece)


def test_inputs_that_stay_use_prepared_segments_and_probes_use_torch(
    small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    slow = SlowSegments(small_model)
    runner = TorchRunner(small_model, NOBODY_LEAVES, slow)
    some = replace(WHOLE, ramps=(1,))
    runner.prepare([some])
    assert exits(run(runner, some, runner.from_wire(wire_of(encoded[:2])), probe=True)) == [3, 3]
    assert slow.ran == []
    runner = TorchRunner(small_model, EVERYONE_LEAVES, slow)
    staying = replace(HALVES[0], after_answer="stay")
    runner.prepare([staying])
    (first, second) = run(runner, staying, runner.from_wire(wire_of(encoded[:2])))
    assert [segment.ramp for segment in slow.ran] == [0, None]
    assert ([answer.exit for answer in first.answers], len(first.seen), second.seen) == ([0, 0], 2, ())
    assert survivors_of([second]).sample_ids == ("i0", "i1")
    patient = TorchRunner(small_model, PatiencePolicy(1), slow)  # of which no ramp by itself has anything to show
    steps = run(patient, replace(WHOLE, after_answer="stay"), patient.from_wire(wire_of(encoded[:2])))
    assert [[seen.exit for seen in step.seen] for step in steps] == [[], [], [], [3, 3]]


CHAIN_POLICIES: dict[str, ExitPolicy] = {
    "entropy": EntropyPolicy(0.75),
    "confidence": ConfidencePolicy(0.6),
    "patience": PatiencePolicy(1),
    "voting": VotingPolicy(2),
    "ensemble": EnsemblePolicy(ConfidencePolicy(0.55), {1: 0.3}),
}


@pytest.fixture(scope="module")
def two() -> ChainNetwork:
    return chained(2, 3)


@pytest.fixture(scope="module")
def three() -> ChainNetwork:
    return chained(2, 1, 2)


def plans(network: ChainNetwork, ramps: Sequence[int]) -> list[tuple[tuple[int, ...], tuple[Split, ...]]]:
    """Yields every set of networks that ends with the last, with all cuts."""
    last = len(network.members) - 1
    found = []
    for used in chain.from_iterable(combinations(range(last), size) for size in range(last + 1)):
        places = (*used, last)
        parts: list[list[tuple[int, ...]]] = [[]]
        for place in places:
            first, end = network.chain.starts[place], network.chain.bounds[place]
            inner = [c for size in range(end - first) for c in combinations(range(first + 1, end), size)]
            parts = [[*before, (first, *cuts, end)] for before in parts for cuts in inner]
        for each in parts:
            splits = tuple(
                Split(first=a, end=b, batch=6, ramps=tuple(r for r in ramps if a <= r < b))
                for bounds in each
                for a, b in pairwise(bounds)
            )
            found.append((places, splits))
    return found


@pytest.mark.parametrize("policy", CHAIN_POLICIES.values(), ids=CHAIN_POLICIES)
@pytest.mark.parametrize("lengths", [(2, 3), (2, 1, 2)], ids=str)
def test_every_cut_of_every_set_of_networks_gives_the_answers_of_its_members(
    lengths: tuple[int, ...], policy: ExitPolicy, two: ChainNetwork, three: ChainNetwork
) -> None:
    network = two if lengths == (2, 3) else three
    inputs, exits = inputs_for(network), set[int]()
    for seed, (used, splits) in enumerate(plans(network, network.ramp_indices)):
        expected, _ = offline(network, policy, inputs, network.ramp_indices, used)
        answers, _ = follow(network, policy, inputs, splits, seed=seed)
        assert_same(answers, expected, within=1e-4)
        exits |= {answer.exit for answer in answers.values()}
    assert network.num_blocks - 1 in exits
    assert exits & set(network.chain.end_ramps)


@pytest.mark.parametrize("ramps", [(0, 3), (1,), (0, 1, 2), ()], ids=str)
def test_ramps_may_be_inactive_including_the_ends_of_networks(ramps: tuple[int, ...], two: ChainNetwork) -> None:
    inputs, policy = inputs_for(two), CHAIN_POLICIES["confidence"]
    for seed, (used, splits) in enumerate(plans(two, ramps)):
        expected, _ = offline(two, policy, inputs, ramps, used)
        answers, _ = follow(two, policy, inputs, splits, seed=seed)
        assert_same(answers, expected, within=1e-4)


@pytest.mark.parametrize("kind", ["stay", "probe"])
def test_exits_are_observed_in_every_network_of_a_chain(kind: str, three: ChainNetwork) -> None:
    inputs, policy, ramps = inputs_for(three), CHAIN_POLICIES["confidence"], (0, 2)
    for seed, (used, splits) in enumerate(plans(three, ramps)):
        expected, said = offline(three, policy, inputs, ramps, used)
        answers, seen = follow(three, policy, inputs, splits, seed=seed, kind=kind)
        whose = {block for block in three.ramp_indices if three.chain.network_of(block) in used}
        looked = whose & set(ramps) if kind == "stay" else whose
        last = three.num_blocks - 1
        assert set(seen) == {(each, block) for each in inputs.ids for block in (*looked, last)}
        for key in said.keys() & seen.keys():
            assert seen[key].score == pytest.approx(said[key][0], abs=1e-4)
            assert seen[key].value == said[key][1]
        assert {each.sample_id: each.exit for each in answers.values() if each.exit != last} == {
            each.sample_id: each.exit for each in expected.values() if each.exit != last
        }


def test_a_networks_head_is_computed_only_if_it_decides(two: ChainNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []
    heads = {id(member.head): member.info.name for member in two.members}
    classify = Ramp.classify

    def counted(head: Ramp, gathered: Tensor) -> Tensor:
        called.extend([heads[id(head)]] if id(head) in heads else [])
        return classify(head, gathered)

    monkeypatch.setattr(Ramp, "classify", counted)
    inputs = inputs_for(two, count=3)
    runs = [("plain", (0,), []), ("plain", (0, 1), ["m0"]), ("stay", (1,), ["m0"]), ("probe", (), ["m0"])]
    for kind, ramps, expected in runs:
        called.clear()
        cut = Cut(two, 0, 2, ramps, ConfidencePolicy(math.inf))
        cut = {"plain": cut, "stay": cut.observing(ramps), "probe": cut.observing(two.ramp_indices)}[kind]
        [*_, step] = cut.run(from_wire(two, inputs.wire(0, 0, inputs.ids), ConfidencePolicy(math.inf)))
        assert step.survivors is not None
        assert (called, step.survivors.next_block, step.survivors.tensors) == (expected, 2, ())


def test_no_hidden_state_passes_the_end_of_a_network(two: ChainNetwork) -> None:
    assert (two.takes(0), two.takes(2)) == tuple(member.takes(0) for member in two.members)
    assert (two.takes(1), two.takes(3)) == tuple(member.takes(1) for member in two.members)
