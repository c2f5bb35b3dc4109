from __future__ import annotations

import numpy as np
import pytest
import torch

from earlyexit.network.layout import Layout
from earlyexit.ramps.pooling import Pooling, pool


def layout_of(*lengths: int) -> Layout:
    return Layout(np.array(lengths, dtype=np.int32))


def test_every_token_knows_its_input_its_position_and_its_slot() -> None:
    layout = layout_of(2, 3, 1)
    assert (layout.num_inputs, layout.num_tokens, layout.longest) == (3, 6, 3)
    assert layout.first_token_B.tolist() == [0, 2, 5]
    assert layout.position_N.tolist() == [0, 1, 0, 1, 2, 0]
    assert layout.place_N.tolist() == [0, 1, 3, 4, 5, 6]
    assert layout.lengths_B1.tolist() == [[2.0], [3.0], [1.0]]
    assert layout.mask_BT.tolist() == [[True, True, False], [True, True, True], [True, False, False]]


def test_padding_puts_zeros_behind_every_input_and_unpadding_takes_them_away() -> None:
    layout = layout_of(2, 1)
    packed_ND = torch.tensor([[1.0], [2.0], [3.0]])
    padded_BTD = layout.pad(packed_ND)
    assert padded_BTD.tolist() == [[[1.0], [2.0]], [[3.0], [0.0]]]
    assert layout.unpad(padded_BTD).equal(packed_ND)


@pytest.mark.parametrize(
    ("lengths", "uniform"), [((3, 3), True), ((4,), True), ((3, 2), False)], ids=["equal", "one input", "mixed"]
)
def test_inputs_of_one_length_are_uniform(lengths: tuple[int, ...], uniform: bool) -> None:
    assert layout_of(*lengths).uniform == uniform


def test_a_uniform_layout_pads_nothing() -> None:
    layout = layout_of(2, 2)
    packed_ND = torch.arange(4.0)[:, None]
    assert layout.pad(packed_ND).tolist() == [[[0.0], [1.0]], [[2.0], [3.0]]]
    assert layout.unpad(layout.pad(packed_ND)).equal(packed_ND)


@pytest.mark.parametrize(("pooling", "expected"), [("mean", [[2.0], [5.0]]), ("first", [[1.0], [5.0]])])
def test_pooling_looks_at_an_inputs_own_tokens_only(pooling: Pooling, expected: list[list[float]]) -> None:
    layout = layout_of(2, 1)
    packed_ND = torch.tensor([[1.0], [3.0], [5.0]])
    assert pool(packed_ND, layout, pooling).tolist() == expected


def test_the_mean_of_many_bfloat16_tokens_is_their_mean() -> None:
    # Summed in bfloat16, which has 8 significant bits, 256 + 1 stays 256.
    mean_BD = pool(torch.ones(512, 1, dtype=torch.bfloat16), layout_of(512), "mean")
    assert mean_BD.dtype == torch.bfloat16
    assert mean_BD.tolist() == [[1.0]]
