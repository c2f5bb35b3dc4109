from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose

from earlyexit.errors import DataError
from earlyexit.network.boundary import values_of
from earlyexit.policies.base import Opinion
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks import find_task
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.token import TokenTask
from tests.earlyexit.tasks.maps import BODY, STREET

HERE = __name__
LABELS = LabelTask(("bad", "fair", "good"))
STARS = RegressionTask(scale=4.0, offset=3.0)
"""Answers around 3, of which one that is off by 4 is wholly wrong."""
TOKENS = TokenTask(80, ends=[2])
EVERY = pytest.mark.parametrize("task", [LABELS, STARS, BODY, STREET, TOKENS], ids=lambda task: task.name)


def stars(scale: float) -> RegressionTask:
    return RegressionTask(scale)


def test_a_label_is_the_likeliest_and_its_score_its_probability() -> None:
    logits_BC = torch.tensor([[0.0, 0.0, math.log(2.0)], [math.log(6.0), 0.0, 0.0]])
    label_B, score_B = LABELS.answer(logits_BC), LABELS.score(logits_BC)
    assert label_B.tolist() == [2, 0]
    assert score_B.tolist() == pytest.approx([2 / 4, 6 / 8])
    assert LABELS.to_columns(values_of(label_B.numpy()), [0.5, 0.75]) == {
        "label": ["good", "bad"],
        "score": [0.5, 0.75],
    }
    assert LABELS.to_json(2, 0.12345678) == {"label": "good", "score": 0.123457}


def test_a_number_is_in_units_of_the_scale_and_its_score_falls_with_the_error_it_expects() -> None:
    outputs_BC = torch.tensor([[0.0, 0.0], [0.5, math.log(3.0)], [-1.0, -100.0]])
    value_B, score_B = STARS.answer(outputs_BC), STARS.score(outputs_BC)
    assert value_B.tolist() == [3.0, 5.0, -1.0]
    assert score_B.tolist() == pytest.approx([1 / 2, 1 / (1 + 3), 1.0])
    assert STARS.to_columns([5.0], [0.25]) == {"value": [5.0], "score": [0.25]}
    assert STARS.to_json(5.0, 0.25) == {"value": 5.0, "score": 0.25}


@EVERY
def test_what_callers_get_is_what_is_declared(task: Task) -> None:
    opinion = Opinion(task, torch.zeros(2, *task.output_shape))
    values = values_of(opinion.value_B.numpy())
    names = {column.name for column in task.columns}
    assert set(task.to_columns(values, opinion.score_B.tolist())) == names
    assert set(task.to_json(values[0], 0.5)) == set(task.json_schema) >= names


def test_labels_agree_or_not() -> None:
    loss_B = LABELS.loss(np.array([0, 1, 2]), np.array([0, 2, 2]))
    assert loss_B.tolist() == [0.0, 1.0, 0.0]
    assert loss_B.dtype == np.float64


def test_numbers_cost_their_distance_up_to_the_scale() -> None:
    early, full = np.array([3.0, 4.0, 9.0, -50.0], dtype=np.float32), np.array([3.0, 3.0, 5.0, 3.0], dtype=np.float32)
    loss_B = STARS.loss(early, full)
    assert loss_B.tolist() == [0.0, 0.25, 1.0, 1.0]
    assert loss_B.dtype == np.float64


@given(st.lists(st.tuples(st.floats(-1e6, 1e6, width=32), st.floats(-1e6, 1e6, width=32)), min_size=1))
def test_a_loss_is_at_most_one_and_nothing_where_answers_agree(pairs: list[tuple[float, float]]) -> None:
    early, full = np.array(pairs, dtype=np.float32).T
    loss_B = STARS.loss(early, full)
    assert ((loss_B >= 0) & (loss_B <= 1)).all()
    assert_allclose(loss_B, STARS.loss(full, early))
    assert not STARS.loss(early, early).any()


def test_targets_are_what_the_label_column_says() -> None:
    assert LABELS.targets(["good", "bad", "good"]).tolist() == [2, 0, 2]
    assert STARS.targets(["4.5", "-1", "3e0"]).tolist() == [4.5, -1.0, 3.0]


def test_the_loss_of_numbers_is_least_where_the_width_is_the_mean_absolute_error() -> None:
    # Errors of 1, 2 and 6 in units of the scale, so 3 on average: the negative log likelihood is 1 + ln 3.
    targets_B = torch.tensor([3.0 + 4, 3.0 + 8, 3.0 - 24])
    losses = {
        width: float(STARS.training_loss(torch.tensor([[0.0, math.log(width)]] * 3), targets_B)) for width in (2, 3, 4)
    }
    assert min(losses, key=losses.__getitem__) == 3
    assert losses[3] == pytest.approx(1 + math.log(3))


@pytest.mark.parametrize(
    ("task", "labels"),
    [(LABELS, ["good"] * 3 + ["bad"]), (STARS, ["5", "4.5", "5.5", "5"])],
    ids=["label", "regression"],
)
def test_descending_on_the_training_loss_finds_the_answer(task: Task, labels: list[str]) -> None:
    targets_B = torch.from_numpy(task.targets(labels))
    output_C = torch.zeros(task.num_outputs, requires_grad=True)
    optimizer = torch.optim.Adam([output_C], lr=0.05)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = task.training_loss(output_C.expand(len(labels), -1), targets_B)
        loss.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    (answer,) = task.answer(output_C.detach()[None]).tolist()
    assert answer == pytest.approx({"label": 2, "regression": 5.0}[task.name], abs=0.1)


@EVERY
def test_an_answer_does_not_depend_on_its_batch_mates(task: Task) -> None:
    outputs_BC = torch.randn(5, *task.output_shape, generator=torch.Generator().manual_seed(0))
    for row in range(5):
        alone = outputs_BC[row : row + 1]
        torch.testing.assert_close(task.answer(outputs_BC)[row], task.answer(alone)[0])
        torch.testing.assert_close(task.score(outputs_BC)[row], task.score(alone)[0])
        if task.num_principal_values:
            torch.testing.assert_close(
                task.principal_values(outputs_BC)[row].sort().values, task.principal_values(alone)[0].sort().values
            )


@EVERY
def test_a_card_holds_all_that_makes_an_equal_task(task: Task) -> None:
    again = find_task(task.spec())
    assert again == task
    assert hash(again) == hash(task)


class FiveStars(RegressionTask):
    def __init__(self) -> None:
        super().__init__(scale=4.0, offset=3.0)


def test_a_task_of_ones_own_is_named_by_its_function() -> None:
    assert FiveStars().spec() == STARS.spec(), "by the constructor of the class that has the name"
    assert find_task({"name": f"{HERE}:stars", "scale": 2.0}) == RegressionTask(2.0)


def test_confidence_lets_numbers_leave_that_expect_little_error() -> None:
    policy = ConfidencePolicy(0.5)
    policy.check_task(STARS)
    opinion = Opinion(STARS, torch.tensor([[0.5, 1.0], [0.25, -1.0]]))
    verdict = policy.decide(0, opinion, torch.zeros(2, 0), ("a", "b"))
    assert verdict.leave_B.tolist() == [False, True]
    assert verdict.value_B is None, "the exit's own answers"
    assert opinion.answers().tolist() == [5.0, 4.0]
    assert opinion.answers([1]).tolist() == [4.0]


def test_a_tokens_answer_is_the_likeliest_tokens_and_their_log_probabilities() -> None:
    task = find_task({"name": "token", "vocab_size": 5, "ends": [2]})
    logits_BC = torch.log(torch.tensor([[1.0, 5.0, 2.0, 1.0, 1.0], [4.0, 1.0, 3.0, 1.0, 1.0]])) + 7.0
    answer_B2k = task.answer(logits_BC)
    assert answer_B2k[:, 0, :2].tolist() == [[1, 2], [0, 2]]
    assert_allclose(answer_B2k[:, 1, :2].exp(), [[0.5, 0.2], [0.4, 0.3]], rtol=1e-5)
    assert_allclose(task.score(logits_BC), [0.3, 0.1], atol=1e-6)
    early, full = answer_B2k.numpy(), answer_B2k.flip(0).numpy()
    assert task.loss(early, full).tolist() == [1.0, 1.0]
    assert task.loss(early, early).tolist() == [0.0, 0.0]
    values = values_of(early)
    assert task.to_columns(values, [0.3, 0.1]) == {"token": [1, 0], "score": [0.3, 0.1]}
    assert task.to_json(values[0], 0.3) == {"token": 1, "score": 0.3}
    assert task.targets([4, 0]).tolist() == [4, 0]
    with pytest.raises(DataError, match="labels must be tokens, whole numbers from 0 to 4"):
        task.targets([5])
