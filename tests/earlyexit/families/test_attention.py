"""However inputs attend, each to its own tokens, they are answered as alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.engine.queue import Attention
from earlyexit.errors import PlanError
from earlyexit.network.boundary import Segment
from earlyexit.network.model import EarlyExitModel
from earlyexit.policies.threshold import ConfidencePolicy
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds, piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import layout_of, random_inputs

MIXED = (5, 32, 1, 12, 5, 30, 7, 3)
POLICY = ConfidencePolicy(0.45)
"""Between the confidences of the random ramps, so that every ramp lets some inputs leave and some pass."""
SCHEMES: tuple[Attention, ...] = ("padded", "slotted", "apart")


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return small()


def test_on_a_cpu_inputs_of_unequal_lengths_attend_one_by_one_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    assert layout_of(7, 2).scheme == "apart"
    assert layout_of(6, 2).scheme == "padded", "calls would cost more than the padding"
    assert [layout_of(3, 2, attention=each).scheme for each in SCHEMES] == list(SCHEMES)
    assert layout_of(3, 3).scheme == "padded"
    assert layout_of(3, 3, attention="apart").scheme == "padded", "there is nothing to save"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert layout_of(*range(5, 16)).scheme == "padded"
    assert layout_of(*range(20, 400, 40)).scheme == "apart"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(1, 32), min_size=1, max_size=12), attention=st.sampled_from(SCHEMES))
def test_batch_mates_change_no_outputs(model: EarlyExitModel, lengths: list[int], attention: Attention) -> None:
    model.attention = attention
    inputs = random_inputs(np.random.default_rng(sum(lengths)), lengths)
    piece = piece_of(model, POLICY, inputs)
    segment = Segment(first=0, end=model.num_blocks, ramp=None)
    with torch.inference_mode():
        _, together = model.run(segment, piece)
        alone = [model.run(segment, single)[1] for single in piece.singles()]
    assert together is not None
    torch.testing.assert_close(together, torch.cat([each for each in alone if each is not None]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("attention", SCHEMES)
@pytest.mark.parametrize("family", ["bert", "distilbert", "roberta", "mpnet"])
def test_every_cut_answers_as_uncut_and_alone(family: str, attention: Attention) -> None:
    model = small(family=family, seed=2)
    inputs = random_inputs(np.random.default_rng(3), MIXED)
    alone = answers_alone(model, POLICY, inputs)
    model.attention = attention
    for seed, bounds in enumerate(every_bounds(model.num_blocks)):
        assert_same(answers_in_cuts(model, POLICY, inputs, bounds, seed=seed), alone)


def test_onnx_runtime_refuses_to_attend_apart(model: EarlyExitModel, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model.attention = "apart"
    with pytest.raises(PlanError, match="cannot attend one after the other"):
        OnnxSegments(model, cache=tmp_path)
