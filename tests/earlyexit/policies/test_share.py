"""The share of principal values above a confidence (PAME section 5.3), as a policy and in cuts."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from earlyexit.network.boundary import Numbers, values_of
from earlyexit.network.cut import cut_out
from earlyexit.policies import make_policy
from earlyexit.policies.base import Opinion
from earlyexit.policies.threshold import SharePolicy, share_above, shares_above
from earlyexit.tasks.segmentation import SegmentationTask
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds, piece_of
from tests.earlyexit.tasks.maps import BODY, STREET, encoded_images, logits_of, model_of_maps, peaks

SURE, UNSURE = logits_of([[0, 1, 2]] * 2, probability=0.9), logits_of([[0, 1, 2]] * 2, probability=0.6)


def mixed(num_sure: int) -> torch.Tensor:
    """A map of six pixels, so many of them sure by 0.9, the others by 0.6."""
    sure = (torch.arange(6) < num_sure).reshape(1, 1, 2, 3)
    return torch.where(sure, SURE, UNSURE)


def test_an_input_leaves_if_enough_of_its_pixels_are_sure_enough() -> None:
    policy = make_policy("share", thresholds=4 / 6, confidences=0.8)
    opinion = Opinion(STREET, torch.cat([mixed(3), mixed(4), mixed(5)]))
    assert isinstance(policy, SharePolicy)
    assert policy.score(0, opinion).tolist() == pytest.approx([3 / 6, 4 / 6, 5 / 6])
    verdict = policy.decide(0, opinion, torch.zeros(3, 0), ("a", "b", "c"))
    assert verdict.leave_B.tolist() == [False, True, True]
    assert verdict.value_B is None
    assert verdict.score_B.tolist() == pytest.approx([0.75, 0.8, 0.85]), "how sure the exit is: the mean of all"


def test_of_heatmaps_the_highest_values_are_counted() -> None:
    maps = peaks((1, 1, 0.9), (2, 2, 0.7), (3, 3, 0.4))
    maps[0, 0, 1, 2] = 0.8
    opinion = Opinion(BODY, maps)  # six values: 0.9, 0.8; 0.7, 0; 0.4, 0
    scores = [SharePolicy(1.0, confidence).score(0, opinion).item() for confidence in (0.0, 0.4, 0.75, 0.95)]
    assert scores == pytest.approx([4 / 6, 3 / 6, 2 / 6, 0])


def test_every_ramp_has_a_confidence_of_its_own() -> None:
    policy = SharePolicy({0: 0.5, 1: 0.5}, {0: 0.5, 1: 0.8, 2: 0.95})
    opinion = Opinion(STREET, mixed(3))
    assert [policy.score(ramp, opinion).item() for ramp in (0, 1, 2)] == [1.0, 0.5, 0.0]
    assert [policy.can_decide(ramp) for ramp in (0, 1, 2, 3)] == [True, True, False, False]
    assert [policy.can_look(ramp) for ramp in (2, 3)] == [True, False]


def test_counting_for_many_confidences_at_once_is_counting_for_each() -> None:
    values = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    values[0, 0] = torch.nan
    levels = torch.arange(1, 100) / 100
    together = shares_above(values, levels)
    for column, level in enumerate(levels.tolist()):
        assert together[:, column].equal(share_above(values, round(level, 4)))


def test_a_map_that_is_no_number_is_not_sure() -> None:
    opinion = Opinion(STREET, mixed(6) * torch.nan)
    assert SharePolicy(0.1, 0.0).score(0, opinion).tolist() == [0.0]


def halves() -> SharePolicy:
    """Some inputs leave at each of both ramps."""
    outputs = exit_outputs(model_of_maps(), encoded_images(24))
    confidences = {ramp: float(STREET.principal_values(outputs[ramp]).median()) for ramp in (0, 1)}
    return SharePolicy({0: 0.6, 1: 0.4}, confidences)


def test_class_maps_are_the_same_in_all_cuts_whatever_their_batch_mates() -> None:
    model, policy, encoded = model_of_maps(), halves(), encoded_images(24)
    alone = answers_alone(model, policy, encoded)
    assert {answer.exit for answer in alone.values()} == {0, 1, 2}
    outputs = exit_outputs(model, encoded)
    for row in range(24):
        answer = alone[f"i{row}"]
        assert isinstance(answer.value, Numbers)
        right = STREET.answer(outputs[answer.exit][row : row + 1])[0].numpy()
        np.testing.assert_array_equal(answer.value.numpy(), right)
    for seed, bounds in enumerate(every_bounds(3)):
        assert_same(answers_in_cuts(model, policy, encoded, bounds, seed=seed), alone)


def test_probes_tell_every_exits_share_and_map() -> None:
    model, policy, encoded = model_of_maps(), halves(), encoded_images(6)
    steps = list(cut_out(model, 0, 3, (0,), policy).for_probes().run(piece_of(model, policy, encoded)))
    assert [{each.block for each in step.seen} for step in steps] == [{0}, {1}, {2}]
    outputs = exit_outputs(model, encoded)
    for block in (0, 1):
        shares = policy.score(block, Opinion(STREET, outputs[block])).tolist()
        assert [each.score for each in steps[block].seen] == shares
    maps = [each.value for each in steps[2].seen]
    assert [each.numpy().tolist() for each in maps if isinstance(each, Numbers)] == STREET.answer(outputs[2]).tolist()


def test_a_ramp_that_looks_at_every_input_makes_each_map_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy, encoded = model_of_maps(), halves(), encoded_images(6)
    made: list[int] = []
    answer = SegmentationTask.answer

    def counted(self: SegmentationTask, outputs_BC: torch.Tensor) -> torch.Tensor:
        made.append(len(outputs_BC))
        return answer(self, outputs_BC)

    monkeypatch.setattr(SegmentationTask, "answer", counted)
    cut = cut_out(model, 0, 3, (0, 1), policy)
    for staying in (cut.staying(), cut.for_probes()):
        steps = list(staying.run(piece_of(model, policy, encoded)))
        assert 0 < len(steps[0].answers) < 6
        assert made == [6, 6, 6]
        made.clear()


def test_large_answers_that_nobody_waits_for_are_packed() -> None:
    class_maps = np.zeros((2, 180, 240), dtype=np.uint8)
    class_maps[1, 50:] = 7
    plain, packed = values_of(class_maps), values_of(class_maps, pack=True)
    for one, other, right in zip(plain, packed, class_maps, strict=True):
        assert isinstance(one, Numbers)
        assert isinstance(other, Numbers)
        assert len(other.raw) < len(one.raw) / 20
        assert one.num_bytes == other.num_bytes == len(one.raw) == 43200
        np.testing.assert_array_equal(other.numpy(), right)
        np.testing.assert_array_equal(pickle.loads(pickle.dumps(other)).numpy(), right)
    assert values_of(np.zeros((1, 3))) == values_of(np.zeros((1, 3)), pack=True), "small ones stay as they are"
