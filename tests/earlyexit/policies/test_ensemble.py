from __future__ import annotations

import pytest
import torch
from torch import Tensor

from earlyexit.network.chain import check_weights, proportional
from earlyexit.policies.base import ExitPolicy, Opinion
from earlyexit.policies.ensemble import EnsemblePolicy
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from earlyexit.tasks.label import LabelTask

TASK = LabelTask(("a", "b", "c"))
SMALL = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.2, 0.6]])
MIDDLE = torch.tensor([[0.1, 0.8, 0.1], [0.1, 0.1, 0.8]])
LARGE = torch.tensor([[0.2, 0.45, 0.35], [0.5, 0.3, 0.2]])
IDS = ("x", "y")
HALF = 2.5e-4
"""What half precision may cost a probability."""
CPU = torch.device("cpu")
NEVER = ConfidencePolicy(2.0)


def says(probabilities_BC: Tensor) -> Opinion:
    return Opinion(TASK, probabilities_BC.log() + 3.0)  # logits are known up to a constant


def ended(policy: ExitPolicy, *said: tuple[int, Tensor]) -> Tensor:
    """What is carried after these ends said so."""
    state_BS = policy.initial_state(2, 3, CPU)
    for end, probabilities_BC in said:
        state_BS = policy.decide(end, says(probabilities_BC), state_BS, IDS).state_BS
    return state_BS


def test_the_last_exit_says_equation_6() -> None:
    policy = EnsemblePolicy(NEVER, {5: 0.25})
    labels_B, score_B = policy.conclude(says(LARGE), ended(policy, (5, SMALL)), IDS)
    expected_BC = 0.75 * LARGE + 0.25 * SMALL  # (0.3, 0.4125, ...), (0.425, 0.275, 0.3)
    assert labels_B.tolist() == [1, 0]
    assert score_B.tolist() == pytest.approx(expected_BC.amax(1).tolist(), abs=HALF)


def test_of_three_networks_every_end_adds_its_part() -> None:
    policy = EnsemblePolicy(NEVER, {5: 0.4, 11: 0.5})
    _, score_B = policy.conclude(says(LARGE), ended(policy, (5, SMALL), (11, MIDDLE)), IDS)
    expected_BC = 0.5 * LARGE + 0.5 * (0.6 * MIDDLE + 0.4 * SMALL)
    assert score_B.tolist() == pytest.approx(expected_BC.amax(1).tolist(), abs=2 * HALF)


def test_inputs_of_both_kinds_share_a_batch() -> None:
    policy = EnsemblePolicy(NEVER, {5: 0.4})
    state_BS = ended(policy, (5, SMALL))
    state_BS[0] = 0
    _, score_B = policy.conclude(says(LARGE), state_BS, IDS)
    assert score_B[0] == says(LARGE).score_B[0]
    assert score_B[1] == pytest.approx(float((0.6 * LARGE + 0.4 * SMALL)[1].amax()), abs=HALF)


def test_ramps_of_a_later_network_judge_and_answer_the_mixture_and_carry_what_came() -> None:
    policy = EnsemblePolicy(EntropyPolicy({5: 0.0, 7: 0.99}), {5: 0.25})
    state_BS = ended(policy, (5, SMALL))
    verdict = policy.decide(7, says(LARGE), state_BS, IDS)
    expected_BC = 0.75 * LARGE + 0.25 * SMALL
    entropy_B = -(expected_BC * expected_BC.log()).sum(1)
    looked_B, labels_B = policy.look(7, says(LARGE), state_BS, IDS)
    assert looked_B.tolist() == pytest.approx(entropy_B.tolist(), abs=1e-3)
    assert verdict.leave_B.tolist() == (entropy_B <= 0.99).tolist()
    assert verdict.value_B is not None
    assert verdict.value_B.tolist() == labels_B.tolist() == expected_BC.argmax(1).tolist()
    assert torch.equal(verdict.state_BS, state_BS)


def test_inside_the_first_network_nothing_is_mixed() -> None:
    policy = EnsemblePolicy(ConfidencePolicy(0.5), {5: 0.25})
    verdict = policy.decide(2, says(SMALL), policy.initial_state(2, 3, CPU), IDS)
    assert torch.equal(verdict.score_B, says(SMALL).score_B)
    assert not verdict.state_BS.any()


def test_losses_are_against_the_last_network_by_itself() -> None:
    policy = EnsemblePolicy(NEVER, {5: 0.9})
    state_BS = ended(policy, (5, SMALL))
    assert policy.conclude(says(LARGE), state_BS, IDS)[0].tolist() == [0, 2]
    assert policy.full_answers(says(LARGE), IDS).tolist() == [1, 0]


def test_half_precision_keeps_probabilities_of_many_classes_to_a_thousandth() -> None:
    task = LabelTask(tuple(f"label {k}" for k in range(150)))
    generator = torch.Generator().manual_seed(0)
    first, last = (3 * torch.randn(500, 150, generator=generator) for _ in range(2))
    policy = EnsemblePolicy(NEVER, {5: 0.4})
    state_BS = policy.initial_state(500, 150, CPU)
    state_BS = policy.decide(5, Opinion(task, first), state_BS, [""] * 500).state_BS
    _, score_B = policy.conclude(Opinion(task, last), state_BS, [""] * 500)
    exact_BC = 0.6 * last.double().softmax(1) + 0.4 * first.double().softmax(1)
    assert state_BS.dtype == torch.float16
    assert float((score_B - exact_BC.amax(1)).abs().max()) < 1e-3


def test_what_no_network_holds_possible_stays_a_number() -> None:
    certain = Opinion(TASK, torch.tensor([[0.0, -1e4, -1e4]] * 2))
    policy = EnsemblePolicy(EntropyPolicy(0.1), {5: 0.5})
    state_BS = policy.decide(5, certain, policy.initial_state(2, 3, CPU), IDS).state_BS
    entropy_B, labels_B = policy.look(7, certain, state_BS, IDS)
    assert entropy_B.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert labels_B.tolist() == [0, 0]


def test_weights_in_proportion_give_every_network_its_part() -> None:
    weights = proportional({5: 0.72, 11: 0.81}, 0.9)
    last = 1 - weights[11]
    middle = weights[11] * (1 - weights[5])
    first = weights[11] * weights[5]
    assert [first / last, middle / last] == pytest.approx([0.72 / 0.9, 0.81 / 0.9])
    check_weights(weights)
