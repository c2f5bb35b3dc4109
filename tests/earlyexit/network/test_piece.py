"""Pieces with tensors of a row per token beside tensors of a row per input."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.encoder import EncoderBackbone
from earlyexit.network.boundary import Encoded, PackedArray, Segment, stack_values, values_of
from earlyexit.network.layers import ReorderedConvolution, ReorderedLinear, reorder_convolutions, reorder_linears
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece, fuse, to_host
from earlyexit.network.store import save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.ramps.heads import Ramp
from earlyexit.training.ramps import exit_outputs
from tests.earlyexit.families.vision import MODELS, noise
from tests.earlyexit.network.cuts import piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import layout_of, random_inputs

all_lengths = st.lists(st.integers(1, 5), min_size=1, max_size=6)


def mixed(lengths: Sequence[int], *, dtype: torch.dtype = torch.float32, state: int = 1, next_block: int = 2) -> Piece:
    """Token t of input k is k + t / 100 in all tensors; the per-input tensors and the state are k."""
    per_token = torch.tensor([k + token / 100 for k, length in enumerate(lengths) for token in range(length)])
    per_input = torch.arange(len(lengths))
    return Piece(
        sample_ids=tuple(f"i{k}" for k in range(len(lengths))),
        next_block=next_block,
        lengths_B=np.array(lengths, dtype=np.int32),
        tensors=(
            per_token[:, None].repeat(1, 3).to(dtype),
            per_input[:, None, None, None].repeat(1, 2, 2, 2).to(torch.uint8),
            (100 * per_token).to(torch.int32),
            per_input[:, None].to(dtype),
        ),
        state_BS=per_input[:, None].repeat(1, state).to(torch.int32),
    )


def rows_of(piece: Piece, k: int) -> list[Tensor]:
    """Returns input k's rows of every tensor, and its state; the second and fourth tensor are per input."""
    first, end = int(piece.lengths_B[:k].sum()), int(piece.lengths_B[: k + 1].sum())
    whole, single = slice(first, end), slice(k, k + 1)
    tokens, picture, ids, number = piece.tensors
    return [tokens[whole], picture[single], ids[whole], number[single], piece.state_BS[single]]


def assert_holds(piece: Piece, expected: Piece, chosen: Sequence[int]) -> None:
    """Checks that the piece consists of the chosen inputs of another, in that order."""
    assert piece.sample_ids == tuple(expected.sample_ids[k] for k in chosen)
    assert len(piece) == len(chosen)
    assert piece.next_block == expected.next_block
    assert piece.lengths_B.tolist() == [expected.lengths_B[k] for k in chosen]
    assert [each.layout("padded").num_inputs for each in (expected, piece)] == [len(expected), len(chosen)]
    for at, k in enumerate(chosen):
        for found, wanted in zip(rows_of(piece, at), rows_of(expected, k), strict=True):
            assert found.dtype == wanted.dtype
            assert found.equal(wanted)
    assert [len(values) for values in piece.tensors] == [piece.lengths_B.sum(), len(piece)] * 2


@given(all_lengths, st.integers(0, 2), st.randoms())
@example([1, 1, 1, 1], 0, Random(0))
@example([2, 2, 2, 2], 2, Random(0))
def test_any_inputs_are_selected_with_their_rows_of_all_tensors(lengths: list[int], state: int, random: Random) -> None:
    piece = mixed(lengths, state=state)
    chosen = [k for k in range(len(lengths)) if random.random() < 0.6]
    random.shuffle(chosen)
    assert_holds(piece.select(chosen), piece, chosen)


@given(all_lengths, st.integers(0, 2))
@example([2, 2, 2], 0)
@example([2, 2, 2], 2)
def test_singles_hold_their_rows_and_fuse_to_the_piece(lengths: list[int], state: int) -> None:
    piece = mixed(lengths, state=state)
    singles = piece.singles()
    for k, single in enumerate(singles):
        assert_holds(single, piece, [k])
    order = list(reversed(range(len(lengths))))
    assert_holds(fuse([singles[k] for k in order]), piece, order)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("lengths", [[1], [1, 1, 1], [4, 4], [3, 1, 2]], ids=str)
def test_every_tensor_survives_the_wire(lengths: list[int], dtype: torch.dtype, small_model: EarlyExitModel) -> None:
    piece = mixed(lengths, dtype=dtype)
    wire = piece.to_wire()
    assert [values.dtype.name for values in wire.tensors] == [
        name if name != "bfloat16" else "uint16"
        for name in (str(values.dtype).removeprefix("torch.") for values in piece.tensors)
    ]
    assert_holds(from_wire(small_model, wire, ConfidencePolicy(0.5)), piece, range(len(lengths)))


def piece_with(values: Sequence[float]) -> Piece:
    piece = mixed([1] * len(values), state=2)
    return replace(
        piece, tensors=(torch.tensor(values)[:, None], *piece.tensors[1:]), state_BS=torch.full((len(values), 2), 1e-30)
    )


def test_hidden_states_travel_in_half_precision_and_nothing_else_does(small_model: EarlyExitModel) -> None:
    piece = piece_with([1.0, -2.5, 0.1])
    wire = piece.to_wire("float16")
    assert [values.dtype.name for values in wire.tensors] == ["float16", "uint8", "int32", "float16"]
    back = from_wire(small_model, wire, ConfidencePolicy(0.5))
    assert [values.dtype for values in back.tensors] == [values.dtype for values in piece.tensors]
    assert back.tensors[0].flatten().tolist() == [1.0, -2.5, pytest.approx(0.1, rel=2**-11)]
    assert back.state_BS.equal(piece.state_BS), "far below the least of half precision"
    assert from_wire(small_model.bfloat16(), wire, ConfidencePolicy(0.5)).tensors[0].equal(back.tensors[0])
    assert all(one.equal(other) for one, other in zip(back.tensors[1:], piece.tensors[1:], strict=True))


def test_values_beyond_half_precision_are_clamped() -> None:
    piece = piece_with([7e4, -1e30, 65504.0, math.inf, -math.inf, math.nan, 1e-9])
    *numbers, nan, tiny = piece.to_wire("float16").tensors[0].flatten().tolist()
    assert numbers == [65504.0, -65504.0, 65504.0, 65504.0, -65504.0]
    assert math.isnan(nan)
    assert tiny == 0.0
    assert piece.tensors[0].flatten().tolist()[:2] == [7e4, float(np.float32(-1e30))], "those on the device stay"
    piece = mixed([2, 1], dtype=torch.bfloat16)
    for half, same in zip(piece.to_wire("float16").tensors, piece.to_wire().tensors, strict=True):
        assert half.dtype == same.dtype
        assert np.array_equal(half, same)


def test_single_inputs_of_a_piece_are_views() -> None:
    piece = Piece(
        sample_ids=("a", "b", "c"),
        next_block=1,
        lengths_B=np.array([2, 1, 2], dtype=np.int32),
        tensors=(),
        state_BS=torch.zeros(3, 0),
    )
    fused = fuse([piece.singles()[2], piece.select([1, 0])])
    assert (fused.sample_ids, fused.tensors, fused.lengths_B.tolist()) == (("c", "b", "a"), (), [2, 1, 2])
    piece = mixed([2, 3])
    _, second = piece.singles()
    assert [values.data_ptr() for values in second.tensors] == [
        values[rows:].data_ptr() for values, rows in zip(piece.tensors, (2, 1, 2, 1), strict=True)
    ]
    assert fuse([piece]) is piece


@pytest.mark.parametrize(
    "array",
    [
        pytest.param(np.array([2, 0, 1]), id="labels"),
        pytest.param(np.array([0.5, -1.0], dtype=np.float32), id="numbers"),
        pytest.param(np.arange(12, dtype=np.float32).reshape(2, 3, 2), id="arrays"),
    ],
)
def test_answers_survive_splitting_and_stacking(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> None:
    values = values_of(array)
    assert {type(value) for value in values} == {PackedArray if array.ndim > 1 else type(array.tolist()[0])}
    assert stack_values(values).tolist() == array.tolist()


def test_the_mean_of_many_bfloat16_tokens_is_their_mean() -> None:
    # Summed in bfloat16, which has 8 significant bits, 256 + 1 stays 256.
    mean_BD = Ramp("mean").gather(torch.ones(512, 1, dtype=torch.bfloat16), layout_of(512))
    assert mean_BD.dtype == torch.bfloat16
    assert mean_BD.tolist() == [[1.0]]


@pytest.mark.gpu
def test_a_gpu_tensor_is_copied_after_it_is_computed() -> None:
    copy = to_host(torch.arange(1000, device="cuda").cumsum(0))
    assert (copy.device.type, copy[-1].item()) == ("cpu", 499500)


needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(),  # type: ignore[no-untyped-call] # torch's
    reason="this torch has no oneDNN",
)
TEXTS = {family: partial(small, family=family) for family in ("bert", "mpnet")}


def reordered(make: Callable[[], EarlyExitModel]) -> EarlyExitModel:
    """Returns a copy of the model as it runs on CPUs."""
    model = make()
    (reorder_linears if isinstance(model.backbone, EncoderBackbone) else reorder_convolutions)(model)
    return model


def inputs_of(model: EarlyExitModel, count: int) -> list[Encoded]:
    if isinstance(model.backbone, EncoderBackbone):
        return random_inputs(np.random.default_rng(count), (3, 7, 1, 2, 20, 9, 5)[:count])
    return noise(model, count)


@needs_onednn
@pytest.mark.parametrize("name", [*TEXTS, *MODELS])
def test_a_reordered_model_gives_the_same_outputs_at_every_exit(name: str) -> None:
    make = (TEXTS | dict(MODELS))[name]
    model, other = make(), reordered(make)
    for number in (1, 7):
        found = exit_outputs(other, inputs_of(model, number))
        for block, outputs in exit_outputs(model, inputs_of(model, number)).items():
            torch.testing.assert_close(found[block], outputs, atol=1e-4, rtol=1e-4)
    assert other.dtype == torch.float32


@needs_onednn
@pytest.mark.parametrize(
    ("make", "layer", "gone"),
    [
        (small, ReorderedLinear, (nn.Linear,)),
        (MODELS["basic, bridges"], ReorderedConvolution, (nn.BatchNorm2d, nn.Conv2d)),
    ],
    ids=["linear", "convolutions and the norms behind them"],
)
def test_every_supported_layer_is_reordered(
    make: Callable[[], EarlyExitModel], layer: type[nn.Module], gone: tuple[type[nn.Module], ...], tmp_path: Path
) -> None:
    model = reordered(make)
    assert any(isinstance(module, layer) for module in model.modules())
    assert not any(isinstance(module, gone) for module in model.modules())
    with pytest.raises(ModelFolderError, match="cannot be saved"):
        save_model(model, tmp_path)


@needs_onednn
def test_a_bfloat16_model_runs_on_every_processor_one_over_images_as_it_is(encoded: list[Encoded]) -> None:
    plain, other = small().to(torch.bfloat16), small().to(torch.bfloat16)
    reorder_linears(other)  # oneDNN multiplies bfloat16 on some processors only
    last = plain.num_blocks - 1
    found, expected = (exit_outputs(each, encoded[:5])[last] for each in (other, plain))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.1)
    model = MODELS["basic"]().to(torch.bfloat16)
    reorder_convolutions(model)
    assert not any(isinstance(module, ReorderedConvolution) for module in model.modules())


@needs_onednn
@torch.inference_mode()
def test_padding_rows_once_for_all_blocks_changes_no_output() -> None:
    model, other = small(), reordered(small)
    assert isinstance(other.backbone, EncoderBackbone)
    assert other.backbone.fills_rows
    piece = piece_of(model, ConfidencePolicy(0.5), inputs_of(model, 4))
    whole = Segment(first=0, end=model.num_blocks, ramp=None)
    torch.testing.assert_close(other.run(whole, piece)[1], model.run(whole, piece)[1], atol=1e-5, rtol=0)
    (inside_ND,), _ = other.run(Segment(first=0, end=1, ramp=None), piece)
    assert len(inside_ND) == 13
