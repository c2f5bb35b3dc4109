"""Every network over images answers under every cut, and in every company, as it does uncut to each image alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from earlyexit.network.wire import Answer, stacked
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.base import Task
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.cuts import answers_alone, answers_in_cuts
from tests.earlyexit.vision import MODELS, noise

each_model = pytest.mark.parametrize("name", MODELS)
NUMBER = 14


def some_leave(model: EarlyExitModel) -> ConfidencePolicy:
    """Thresholds that let two of those leave at every ramp that no earlier one let out, and the rest run to the end."""
    thresholds, inside = {}, np.arange(NUMBER)
    outputs = exit_outputs(model, noise(model, NUMBER))
    for block in model.ramp_indices:
        scores = model.task.score(outputs[block]).numpy()
        lowest, *_ = surest = np.sort(scores[inside])[-3:]
        thresholds[block] = float(lowest + surest[1]) / 2
        inside = inside[scores[inside] < thresholds[block]]
        if len(inside) < 4:
            break
    return ConfidencePolicy({block: thresholds.get(block, 2.0) for block in model.ramp_indices})


def assert_nearly_same(task: Task, answers: dict[str, Answer], expected: dict[str, Answer]) -> None:
    """Exits are equal, scores nearly; of maps hardly a pixel may turn on the order of a sum."""
    assert answers.keys() == expected.keys()
    assert {name: each.exit for name, each in answers.items()} == {name: each.exit for name, each in expected.items()}
    scores = np.array([[answers[name].score, each.score] for name, each in expected.items()])
    np.testing.assert_allclose(scores[:, 0], scores[:, 1], atol=1e-5)
    found, right = (stacked([each[name].value for name in expected]) for each in (answers, expected))
    assert task.loss(found, right).max() < 2e-3


@each_model
def test_answers_do_not_depend_on_cuts_or_company(name: str) -> None:
    model = MODELS[name]()
    policy, encoded = some_leave(model), noise(model, NUMBER)
    expected = answers_alone(model, policy, encoded)
    assert len({answer.exit for answer in expected.values()}) > 2
    blocks = model.num_blocks
    halves, each_block = (0, blocks // 2, blocks), tuple(range(blocks + 1))
    for seed, bounds in enumerate([(0, blocks), halves, (0, 1, blocks - 1, blocks), each_block]):
        assert_nearly_same(model.task, answers_in_cuts(model, policy, encoded, bounds, seed=seed), expected)


@each_model
def test_outputs_are_the_same_in_batches_of_one_two_and_seven(name: str) -> None:
    model = MODELS[name]()
    encoded = noise(model, 7)
    alone = [exit_outputs(model, [each]) for each in encoded]
    for batch in (2, 7):
        for block, outputs in exit_outputs(model, encoded, batch=batch).items():
            assert outputs.shape == (7, *model.task.output_shape)
            torch.testing.assert_close(outputs, torch.cat([each[block] for each in alone]), rtol=1e-4, atol=1e-5)


@each_model
@torch.inference_mode()
def test_hidden_states_have_the_shapes_that_boundaries_say(name: str) -> None:
    model = MODELS[name]()
    hidden = model.backbone.embed(tuple(torch.from_numpy(each) for each in noise(model, 1)[0].tensors), None)  # type: ignore[arg-type]
    for block in range(model.num_blocks):
        hidden = model.backbone.run_block(block, hidden, None)  # type: ignore[arg-type] # images have no tokens
        assert [tuple(each.shape[1:]) for each in hidden] == [each.shape for each in model.boundary(block)]


@each_model
def test_a_saved_model_is_loaded_as_it_was(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    save_model(model, tmp_path / "model")
    found = exit_outputs(load_model(tmp_path / "model"), noise(model, 2))
    for block, outputs in exit_outputs(model, noise(model, 2)).items():
        assert found[block].equal(outputs)
