"""The share of principal values above a confidence (PAME section 5.3), as a policy and in cuts."""

from __future__ import annotations

import math
import pickle
from math import exp, log
from typing import Any

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from torch import Tensor

from earlyexit.network.boundary import PackedArray, values_of
from earlyexit.network.model import Cut
from earlyexit.policies import make_policy
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy
from earlyexit.policies.counting import PatiencePolicy, TabiPolicy, VotingPolicy
from earlyexit.policies.ensemble import EnsemblePolicy, RecordedAnswers, RecordedPolicy
from earlyexit.policies.reroute import coin, reroute_probability
from earlyexit.policies.threshold import (
    ConfidencePolicy,
    EntropyPolicy,
    SharePolicy,
    ThresholdPolicy,
    decayed,
    share_above,
    shares_above,
)
from earlyexit.policies.wrapper import exit_wrapper
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.segmentation import SegmentationTask
from earlyexit.tasks.token import TokenTask
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds, piece_of
from tests.earlyexit.tasks.maps import BODY, STREET, encoded_images, logits_of, model_of_maps, peaks

EVEN = [0.0, 0.0]
"""Probabilities 1/2 and 1/2; entropy ln 2 = 0.693."""
THREE_TO_ONE = [log(3.0), 0.0]
"""Probabilities 3/4 and 1/4; entropy 3/4 ln(4/3) + 1/4 ln 4 = 0.562."""
ONE_TO_NINE = [0.0, log(9.0)]
"""Probabilities 1/10 and 9/10; entropy 0.1 ln 10 + 0.9 ln(10/9) = 0.325."""
TASK = LabelTask(("no", "yes"))
OUTPUT = ExitOutput(TASK, torch.tensor([EVEN, THREE_TO_ONE, ONE_TO_NINE]))
IDS = ("a", "b", "c")
CPU = torch.device("cpu")


NOTHING: dict[str, Any] = {"scores_NR": np.zeros((0, 0), np.float32), "answers_NE": np.zeros((0, 1))}


@exit_wrapper
def at_ramp_one(ramp: int, logits_BC: Tensor) -> Tensor:
    return torch.full((len(logits_BC),), ramp == 1)


def decide(policy: ExitPolicy, ramp: int = 0) -> Decision:
    return policy.decide(ramp, OUTPUT, policy.initial_state(3, 2, CPU), IDS)


def labels_of(*labels: int) -> ExitOutput:
    """Returns the output of inputs whose most likely labels are `labels`."""
    logits_BC = 5 * torch.nn.functional.one_hot(torch.tensor(labels), 3).float()
    return ExitOutput(LabelTask(("a", "b", "c")), logits_BC)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("entropy", {"thresholds": 0.4}),
        ("confidence", {"thresholds": {0: 0.5}}),
        ("share", {"thresholds": {0: 0.5}, "confidences": 0.9}),
        ("tabi", {"c": 0.9, "k": 10.0}),
        ("patience", {"patience": 2}),
        ("voting", {"votes": 2}),
        ("recorded", {"answers": RecordedAnswers(row_of={}, ramps=(), **NOTHING), "judge": EntropyPolicy(0.5)}),
        ("own", {"own": f"{__name__}:at_ramp_one"}),
    ],
)
def test_a_policy_is_made_by_the_name_that_it_has(name: str, settings: dict[str, Any]) -> None:
    assert make_policy(name, **settings).name == name


@pytest.mark.parametrize(
    ("policy", "leave"),
    [
        pytest.param(EntropyPolicy(0.4), [False, False, True], id="entropy at most 0.4"),
        pytest.param(EntropyPolicy(0.6), [False, True, True], id="entropy at most 0.6"),
        pytest.param(ConfidencePolicy(0.5), [True, True, True], id="confidence at least 0.5, exactly met"),
        pytest.param(ConfidencePolicy(0.8), [False, False, True], id="confidence at least 0.8"),
        pytest.param(ConfidencePolicy({0: 0.7, 1: 2.0}), [False, True, True], id="a threshold of its own"),
    ],
)
def test_an_input_leaves_if_its_score_passes_the_threshold(policy: ThresholdPolicy, leave: list[bool]) -> None:
    decision = decide(policy)
    assert decision.leave_B.tolist() == leave
    assert decision.value_B is None, "the exit's own"
    assert decision.score_B.tolist() == pytest.approx([0.5, 0.75, 0.9])
    assert decision.state_BS.shape == (3, 0)


def test_impossible_labels_add_no_entropy_and_infinite_outputs_have_none() -> None:
    output = ExitOutput(LabelTask("abc"), torch.tensor([[*EVEN, -math.inf], [*EVEN, math.inf], [-math.inf] * 3]))
    assert EntropyPolicy(0.7).score(0, output).tolist() == pytest.approx([log(2.0), math.nan, math.nan], nan_ok=True)


@pytest.mark.parametrize("threshold", [0.0, 0.3, 0.9, 1.0])
def test_a_decaying_threshold_equals_calms_at_every_position(threshold: float) -> None:
    """Schuster et al. 2022, equation 5, by hand, on scores around it; N / tau is 4 tokens."""
    task, policy = TokenTask(2), ConfidencePolicy(threshold, decay=4.0)
    for place in (0, 1, 4, 40):
        calms = min(max(0.9 * threshold + 0.1 * exp(-place / 4), 0.0), 1.0)
        for score in [each for each in (calms - 1e-3, calms + 1e-3) if 0 <= each < 1]:
            output = ExitOutput(task, torch.tensor([[log(1 + score), log(1 - score)]]))
            decision = policy.decide(0, output, torch.tensor([[place]], dtype=torch.int32), ("a",))
            assert decision.leave_B.item() == (score > calms), (place, score)
            assert decision.score_B.item() == pytest.approx(score, abs=1e-6), "what is said is how sure the ramp is"
    assert decayed(torch.ones(1), torch.tensor([10_000]), 4.0).tolist() == [1.0], "none passes a threshold above 1"


def leaves_at(policy: ExitPolicy, labels: list[int]) -> int | None:
    """The ramp at which one input leaves whose ramps answer `labels`; None if it never does."""
    state_BS = policy.initial_state(1, 3, CPU)
    for ramp, label in enumerate(labels):
        decision = policy.decide(ramp, labels_of(label), state_BS, ("a",))
        if decision.leave_B.item():
            return ramp
        state_BS = decision.state_BS
    return None


@pytest.mark.parametrize(
    ("policy", "labels", "ramp"),
    [
        pytest.param(PatiencePolicy(1), [0, 0], 1, id="one repetition"),
        pytest.param(PatiencePolicy(2), [0, 0, 0], 2, id="two repetitions"),
        pytest.param(PatiencePolicy(2), [0, 0, 1, 1, 1], 4, id="another label starts anew"),
        pytest.param(PatiencePolicy(1), [0, 1, 2, 0], None, id="never the same twice"),
        pytest.param(VotingPolicy(1), [2], 0, id="one vote"),
        pytest.param(VotingPolicy(2), [0, 1, 0], 2, id="two votes, not in a row"),
        pytest.param(VotingPolicy(3), [0, 1, 2, 0, 1, 2], None, id="votes spread too thin"),
    ],
)
def test_patience_counts_repetitions_and_voting_all(policy: ExitPolicy, labels: list[int], ramp: int | None) -> None:
    assert leaves_at(policy, labels) == ramp


def recorded() -> RecordedPolicy:
    """Entropies 0.1 and 0.9 at ramp 2, 0.8 and 0.2 at ramp 5."""
    answers = RecordedAnswers(
        row_of={"x": 0, "y": 1},
        ramps=(2, 5),
        scores_NR=np.array([[0.1, 0.8], [0.9, 0.2]], dtype=np.float32),
        answers_NE=np.column_stack([np.array([[10, 11], [20, 21]]), np.array([12, 22])]),
    )
    return RecordedPolicy(answers, EntropyPolicy({2: 0.5, 5: 0.5}))


def test_recorded_policies_ignore_the_logits() -> None:
    policy, state_BS = recorded(), torch.zeros(3, 0)
    decision = policy.decide(2, OUTPUT, state_BS, ("y", "x", "y#7"))
    assert decision.leave_B.tolist() == [False, True, False]
    np.testing.assert_array_equal(decision.value_B, [20, 10, 20])
    assert policy.decide(5, OUTPUT, state_BS, ("y", "x", "y#7")).leave_B.tolist() == [True, False, True]
    assert policy.conclude(OUTPUT, state_BS, ("y#1", "x#2", "y"))[0].tolist() == [22, 12, 22]
    score_B, label_B = policy.observe(5, OUTPUT, state_BS, ("y#3", "x", "y"))
    assert score_B.tolist() == pytest.approx([0.2, 0.8, 0.2])
    assert label_B.tolist() == [21, 11, 21]
    assert [policy.can_observe(ramp) for ramp in (2, 3, 5)] == [True, False, True]


def test_an_own_rule_with_a_state_becomes_a_dependent_policy() -> None:
    @exit_wrapper(state_width=1)
    def total_logit(ramp: int, logits_BC: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        state_BS = state_BS + logits_BC.amax(1, keepdim=True)
        return state_BS[:, 0] >= 10, state_BS

    assert total_logit.initial_state(2, 3, CPU).tolist() == [[0.0], [0.0]]
    assert leaves_at(total_logit, [0, 1, 2]) == 1  # 5, then 5 + 5


THREE = LabelTask(("a", "b", "c"))
SMALL = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
MIDDLE = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
LARGE = torch.tensor([[0.2, 0.45, 0.35], [0.5, 0.3, 0.2]])
PAIR = ("x", "y")
HALF = 2.5e-4
"""The largest error of a probability in half precision."""
NEVER = ConfidencePolicy(2.0)


def says(probabilities_BC: Tensor) -> ExitOutput:
    return ExitOutput(THREE, probabilities_BC.log() + 3.0)  # logits are known up to a constant


def ended(policy: ExitPolicy, *said: tuple[int, Tensor]) -> Tensor:
    """Returns the policy's state after these exits."""
    state_BS = policy.initial_state(2, 3, CPU)
    for end, probabilities_BC in said:
        state_BS = policy.decide(end, says(probabilities_BC), state_BS, PAIR).state_BS
    return state_BS


def test_the_last_exit_computes_equation_6_from_every_networks_end() -> None:
    policy = EnsemblePolicy(NEVER, {5: 0.25})
    labels_B, score_B = policy.conclude(says(LARGE), ended(policy, (5, SMALL)), PAIR)
    expected_BC = 0.75 * LARGE + 0.25 * SMALL  # (0.3, 0.4125, ...), (0.425, 0.275, 0.3)
    assert labels_B.tolist() == [1, 0]
    assert score_B.tolist() == pytest.approx(expected_BC.amax(1).tolist(), abs=HALF)
    policy = EnsemblePolicy(NEVER, {5: 0.4, 11: 0.5})
    _, score_B = policy.conclude(says(LARGE), ended(policy, (5, SMALL), (11, MIDDLE)), PAIR)
    expected_BC = 0.5 * LARGE + 0.5 * (0.6 * MIDDLE + 0.4 * SMALL)
    assert score_B.tolist() == pytest.approx(expected_BC.amax(1).tolist(), abs=2 * HALF)
    # An input that did not come through the first network shares a batch with one that did.
    policy = EnsemblePolicy(NEVER, {5: 0.4})
    state_BS = ended(policy, (5, SMALL))
    state_BS[0] = 0
    _, score_B = policy.conclude(says(LARGE), state_BS, PAIR)
    assert score_B[0] == says(LARGE).score_B[0]
    assert score_B[1] == pytest.approx(float((0.6 * LARGE + 0.4 * SMALL)[1].amax()), abs=HALF)


def test_ramps_of_later_networks_judge_and_answer_by_the_mixture() -> None:
    policy = EnsemblePolicy(EntropyPolicy({5: 0.0, 7: 0.99}), {5: 0.25})
    state_BS = ended(policy, (5, SMALL))
    decision = policy.decide(7, says(LARGE), state_BS, PAIR)
    expected_BC = 0.75 * LARGE + 0.25 * SMALL
    entropy_B = -(expected_BC * expected_BC.log()).sum(1)
    looked_B, labels_B = policy.observe(7, says(LARGE), state_BS, PAIR)
    assert looked_B.tolist() == pytest.approx(entropy_B.tolist(), abs=1e-3)
    assert decision.leave_B.tolist() == (entropy_B <= 0.99).tolist()
    assert decision.value_B is not None
    assert decision.value_B.tolist() == labels_B.tolist() == expected_BC.argmax(1).tolist()
    assert torch.equal(decision.state_BS, state_BS)


def test_losses_of_an_ensemble_are_against_the_last_network_alone() -> None:
    policy = EnsemblePolicy(ConfidencePolicy(0.5), {5: 0.25})
    decision = policy.decide(2, says(SMALL), policy.initial_state(2, 3, CPU), PAIR)
    assert torch.equal(decision.score_B, says(SMALL).score_B)
    assert not decision.state_BS.any()
    policy = EnsemblePolicy(NEVER, {5: 0.9})
    state_BS = ended(policy, (5, SMALL))
    assert policy.conclude(says(LARGE), state_BS, PAIR)[0].tolist() == [0, 2]
    assert policy.full_answers(says(LARGE), PAIR).tolist() == [1, 0]


def test_half_precision_keeps_probabilities_to_a_thousandth() -> None:
    task = LabelTask(tuple(f"label {k}" for k in range(150)))
    generator = torch.Generator().manual_seed(0)
    first, last = (3 * torch.randn(500, 150, generator=generator) for _ in range(2))
    policy = EnsemblePolicy(NEVER, {5: 0.4})
    state_BS = policy.initial_state(500, 150, CPU)
    state_BS = policy.decide(5, ExitOutput(task, first), state_BS, [""] * 500).state_BS
    _, score_B = policy.conclude(ExitOutput(task, last), state_BS, [""] * 500)
    exact_BC = 0.6 * last.double().softmax(1) + 0.4 * first.double().softmax(1)
    assert state_BS.dtype == torch.float16
    assert float((score_B - exact_BC.amax(1)).abs().max()) < 1e-3
    certain = ExitOutput(THREE, torch.tensor([[0.0, -1e4, -1e4]] * 2))
    policy = EnsemblePolicy(EntropyPolicy(0.1), {5: 0.5})
    state_BS = policy.decide(5, certain, policy.initial_state(2, 3, CPU), PAIR).state_BS
    entropy_B, labels_B = policy.observe(7, certain, state_BS, PAIR)
    assert entropy_B.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert labels_B.tolist() == [0, 0]


CONFIDENCES = np.linspace(0, 1, 1001)


def test_the_probability_is_equation_4_and_at_c_1_all_inputs_continue() -> None:
    assert (reroute_probability(CONFIDENCES, 1.0) == 1).all()
    c, k, con = 0.9, 8.0, 0.93
    [found] = reroute_probability(np.array([con]), c, k)
    assert found == pytest.approx(1 / (1 + math.exp(k * ((con - c) / (1 - c) - 0.5))), rel=1e-12)


@pytest.mark.parametrize("c", [0.0, 0.5, 0.9, 0.95])
@pytest.mark.parametrize("k", [0.0, 1.0, 10.0, 1e4])
def test_the_probability_to_continue_falls_with_confidence(c: float, k: float) -> None:
    probability = reroute_probability(CONFIDENCES, c, k)
    assert (np.diff(probability) <= 0).all()
    assert (probability[np.less_equal(CONFIDENCES, c)] == 1).all()
    assert ((probability >= 0) & (probability <= 1)).all()


@pytest.mark.parametrize(("c", "k"), [(0.9, 10.0), (0.5, 3.0)])
def test_the_share_that_continues_is_the_mean_probability(c: float, k: float) -> None:
    confidence = c + (1 - c) * (np.arange(100_000) + 0.5) / 100_000
    expected, _ = quad(lambda con: float(reroute_probability(np.array([con]), c, k)[0]) / (1 - c), c, 1)
    outputs_NC = torch.from_numpy(np.stack([np.log(confidence / (1 - confidence)), np.zeros(100_000)], axis=1))
    output = ExitOutput(LabelTask(("sure", "other")), outputs_NC)
    decision = TabiPolicy(c, k).decide(2, output, torch.zeros(100_000, 0), [f"{n}" for n in range(100_000)])
    share = 1 - float(decision.leave_B.double().mean())
    assert share == pytest.approx(expected, abs=4 * 0.5 / math.sqrt(100_000))


def test_the_coin_of_an_input_and_ramp_is_the_same_for_every_attempt() -> None:
    assert coin("tweet#ingress-1.17.0", 5) == coin("tweet#ingress-1.17.12", 5)
    assert coin("tweet#ingress-1.17.0", 5) == 0.0428821056667833
    attempts, no_attempts, callers_ids = ("t#i-1.17.0", "t#i-1.18.0"), ("row.1", "row.2"), ("a#1.2.3", "b#1.2.3")
    for one, other in (attempts, no_attempts, callers_ids):
        assert len({coin(one, 5), coin(other, 5), coin(one, 11)}) == 3


def test_coins_are_uniform() -> None:
    coins = np.sort([coin(f"#i.{n}.0", 0) for n in range(20_000)])
    assert np.abs(coins - (np.arange(20_000) + 0.5) / 20_000).max() < 1.63 / math.sqrt(20_000)


SURE, UNSURE = logits_of([[0, 1, 2]] * 2, probability=0.9), logits_of([[0, 1, 2]] * 2, probability=0.6)


def mixed(num_sure: int) -> torch.Tensor:
    """A map of six pixels, so many of them sure by 0.9, the others by 0.6."""
    sure = (torch.arange(6) < num_sure).reshape(1, 1, 2, 3)
    return torch.where(sure, SURE, UNSURE)


def test_an_input_leaves_if_enough_pixels_exceed_the_ramps_confidence() -> None:
    policy = make_policy("share", thresholds=4 / 6, confidences=0.8)
    output = ExitOutput(STREET, torch.cat([mixed(3), mixed(4), mixed(5)]))
    assert isinstance(policy, SharePolicy)
    assert policy.score(0, output).tolist() == pytest.approx([3 / 6, 4 / 6, 5 / 6])
    decision = policy.decide(0, output, torch.zeros(3, 0), ("a", "b", "c"))
    assert decision.leave_B.tolist() == [False, True, True]
    assert decision.value_B is None
    assert decision.score_B.tolist() == pytest.approx([0.75, 0.8, 0.85]), "how sure the exit is: the mean of all"
    policy = SharePolicy({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.8, 2: 0.95})
    output = ExitOutput(STREET, mixed(3))
    assert [policy.score(ramp, output).item() for ramp in (0, 1, 2)] == [1.0, 0.5, 0.0]
    assert [policy.can_decide(ramp) for ramp in (0, 1, 2, 3)] == [True, True, False, False]
    assert [policy.can_observe(ramp) for ramp in (2, 3)] == [True, False]
    no_numbers = ExitOutput(STREET, mixed(6) * torch.nan)
    assert SharePolicy(0.1, 0.0).score(0, no_numbers).tolist() == [0.0]


def test_of_heatmaps_the_highest_values_are_counted() -> None:
    maps = peaks((1, 1, 0.9), (2, 2, 0.7), (3, 3, 0.4))
    maps[0, 0, 1, 2] = 0.8
    output = ExitOutput(BODY, maps)  # six values: 0.9, 0.8; 0.7, 0; 0.4, 0
    scores = [SharePolicy(1.0, confidence).score(0, output).item() for confidence in (0.0, 0.4, 0.75, 0.95)]
    assert scores == pytest.approx([4 / 6, 3 / 6, 2 / 6, 0])


def test_counting_for_many_confidences_at_once_is_counting_for_each() -> None:
    values = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    values[0, 0] = torch.nan
    levels = torch.arange(1, 100) / 100
    together = shares_above(values, levels)
    for column, level in enumerate(levels.tolist()):
        assert together[:, column].equal(share_above(values, round(level, 4)))


def halves() -> SharePolicy:
    """Some inputs leave at each of both ramps."""
    outputs = exit_outputs(model_of_maps(), encoded_images(24))
    confidences = {ramp: float(STREET.principal_values(outputs[ramp]).median()) for ramp in (0, 1)}
    return SharePolicy({0: 0.6, 1: 0.4}, confidences)


def test_class_maps_are_the_same_in_all_cuts_and_batches() -> None:
    model, policy, encoded = model_of_maps(), halves(), encoded_images(24)
    alone = answers_alone(model, policy, encoded)
    assert {answer.exit for answer in alone.values()} == {0, 1, 2}
    outputs = exit_outputs(model, encoded)
    for row in range(24):
        answer = alone[f"i{row}"]
        assert isinstance(answer.value, PackedArray)
        right = STREET.answer(outputs[answer.exit][row : row + 1])[0].numpy()
        np.testing.assert_array_equal(answer.value.numpy(), right)
    for seed, bounds in enumerate(every_bounds(3)):
        assert_same(answers_in_cuts(model, policy, encoded, bounds, seed=seed), alone)


def test_probes_have_every_exits_share_and_map() -> None:
    model, policy, encoded = model_of_maps(), halves(), encoded_images(6)
    steps = list(Cut(model, 0, 3, (0,), policy).observing((0, 1)).run(piece_of(model, policy, encoded)))
    assert [{each.exit for each in step.seen} for step in steps] == [{0}, {1}, {2}]
    outputs = exit_outputs(model, encoded)
    for block in (0, 1):
        shares = policy.score(block, ExitOutput(STREET, outputs[block])).tolist()
        assert [each.score for each in steps[block].seen] == shares
    maps = [each.value for each in steps[2].seen if isinstance(each.value, PackedArray)]
    assert [each.numpy().tolist() for each in maps] == STREET.answer(outputs[2]).tolist()


def test_a_ramp_that_observes_every_input_computes_each_map_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy, encoded = model_of_maps(), halves(), encoded_images(6)
    made: list[int] = []
    answer = SegmentationTask.answer

    def counted(self: SegmentationTask, outputs_BC: torch.Tensor) -> torch.Tensor:
        made.append(len(outputs_BC))
        return answer(self, outputs_BC)

    monkeypatch.setattr(SegmentationTask, "answer", counted)
    cut = Cut(model, 0, 3, (0, 1), policy)
    for staying in (cut.observing((0, 1)), cut.observing(model.ramp_indices)):
        steps = list(staying.run(piece_of(model, policy, encoded)))
        assert 0 < len(steps[0].answers) < 6
        assert made == [6, 6, 6]
        made.clear()


def test_large_answers_of_observations_are_packed() -> None:
    class_maps = np.zeros((2, 180, 240), dtype=np.uint8)
    class_maps[1, 50:] = 7
    plain, packed = values_of(class_maps), values_of(class_maps, pack=True)
    for one, other, right in zip(plain, packed, class_maps, strict=True):
        assert isinstance(one, PackedArray)
        assert isinstance(other, PackedArray)
        assert len(other.raw) < len(one.raw) / 20
        assert one.num_bytes == other.num_bytes == len(one.raw) == 43200
        np.testing.assert_array_equal(other.numpy(), right)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(other)).numpy(), right)
    assert values_of(np.zeros((1, 3))) == values_of(np.zeros((1, 3)), pack=True), "small ones stay as they are"
