"""TCB's batching schemes are the same encoder: whatever the rows, every input is answered as alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Layout
from experiments.studies.packing import Timed, concatenated_rows, outputs_of, padded_rows, schemes_of
from experiments.tcb_device import Cost
from tests.earlyexit.network.models import SMALL, small

LENGTHS = st.lists(st.integers(1, 20), min_size=1, max_size=8)
COST = Cost(fixed_s=40.0, token_s=1.0, cell_s=0.1)


@pytest.fixture(scope="module", params=["bert", "mpnet"])
def model(request: pytest.FixtureRequest) -> EarlyExitModel:
    return small(family=request.param, num_blocks=2)


def outputs(model: EarlyExitModel, lengths: list[int], layout: Layout) -> torch.Tensor:
    tokens = np.random.default_rng(0).integers(0, SMALL["vocab_size"], size=sum(lengths), dtype=np.int32)
    return outputs_of(model, torch.from_numpy(tokens), layout)


def packed_outputs(model: EarlyExitModel, lengths: list[int]) -> torch.Tensor:
    return outputs(model, lengths, Layout(np.array(lengths, dtype=np.int32)))


@settings(deadline=None)
@given(lengths=LENGTHS, slots=st.integers(1, 3))
def test_rows_answer_as_packed_inputs_do(model: EarlyExitModel, lengths: list[int], slots: int) -> None:
    expected = packed_outputs(model, lengths)
    for layout in (padded_rows(lengths), concatenated_rows(lengths, max(lengths) * slots, slots)):
        torch.testing.assert_close(outputs(model, lengths, layout), expected, atol=1e-5, rtol=0)


@settings(deadline=None, max_examples=20)
@given(lengths=LENGTHS)
def test_every_scheme_of_the_study_gives_the_same_in_the_order_of_the_inputs(lengths: list[int]) -> None:
    timed = Timed(SMALL | {"num_blocks": 1})
    expected, *others = (timed.outputs(lengths, scheme) for scheme in schemes_of(COST).values())
    for found in others:
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
