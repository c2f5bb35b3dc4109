from __future__ import annotations

import numpy as np
import pytest
import torch

from earlyexit.model import EarlyExitModel
from earlyexit.record import exit_outputs
from earlyexit.signature import Encoded
from earlyexit.tasks.label import LabelTask
from earlyexit.train import pack


def test_every_exit_gives_its_logits_in_the_order_of_the_inputs(
    small_model: EarlyExitModel, encoded: list[Encoded]
) -> None:
    logits = exit_outputs(small_model, encoded, batch=5)
    assert {block: tuple(logits_NC.shape) for block, logits_NC in logits.items()} == dict.fromkeys(range(4), (24, 3))
    with torch.inference_mode():
        values, layout = pack([encoded[17]], small_model.device)
        for block in range(4):
            values = small_model.run_blocks(block, block + 1, values, layout)
            expected_BC = small_model.exit_outputs(block, values, layout)
            torch.testing.assert_close(logits[block][17:18], expected_BC, rtol=0, atol=1e-5)


def test_an_exits_temperature_divides_its_logits(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    before = exit_outputs(small_model, encoded)
    small_model.temperatures_E[1] = 2.0
    after = exit_outputs(small_model, encoded)
    torch.testing.assert_close(after[1] * 2, before[1])
    assert after[2].equal(before[2])


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_the_temperature_of_scaled_logits_is_recovered(temperature: float) -> None:
    # Labels drawn from softmax(logits): the honest temperature is 1, and that of `factor * logits` is the factor.
    rng = np.random.default_rng(0)
    logits_NC = rng.normal(size=(20_000, 3))
    probability_NC = np.exp(logits_NC) / np.exp(logits_NC).sum(1, keepdims=True)
    labels_N = (rng.random((20_000, 1)) > probability_NC.cumsum(1)).sum(1).clip(max=2)
    scaled_NC = torch.tensor(temperature * logits_NC, dtype=torch.float32)
    assert LabelTask(("a", "b", "c")).fit_temperature(scaled_NC, labels_N) == pytest.approx(temperature, rel=0.05)


def test_progress_counts_inputs(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    told: list[tuple[str, int, int]] = []
    exit_outputs(small_model, encoded, batch=16, progress=lambda *what: told.append(what))
    assert told == [("records", 16, 24), ("records", 24, 24)]
