"""What attention every token receives: as `transformers` has it, in every layout, over every cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.engine.queue import Attention
from earlyexit.families import find_family
from earlyexit.network.boundary import Encoded, Segment
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece, fuse
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import importance_of, pack
from tests.earlyexit.families.checkpoints import FAMILIES, hf_inputs, hf_model
from tests.earlyexit.network.chains import chained
from tests.earlyexit.network.cuts import piece_of
from tests.earlyexit.network.models import small
from tests.earlyexit.network.tokens import random_inputs

NOBODY_LEAVES = ConfidencePolicy(1.1)
MIXED = (5, 32, 1, 12, 5, 30, 7, 3)
SCHEMES: tuple[Attention, ...] = ("padded", "slotted", "apart")
each_family = pytest.mark.parametrize("family", FAMILIES)


def inputs_of(lengths: Sequence[int]) -> list[Encoded]:
    return random_inputs(np.random.default_rng(3), lengths, least=2)


def measured(piece: Piece) -> Piece:
    """The piece, with no attention received as yet."""
    return replace(piece, tensors=(*piece.tensors, torch.zeros(int(piece.lengths_B.sum()))))


def run(model: EarlyExitModel, piece: Piece, end: int) -> Piece:
    segment = Segment(first=piece.next_block, end=end, ramp=None)
    with torch.inference_mode():
        tensors, _ = model.run(segment, piece)
    return replace(piece, next_block=end, tensors=tensors)


def importance(model: EarlyExitModel, lengths: Sequence[int]) -> Tensor:
    return run(model, measured(piece_of(model, NOBODY_LEAVES, inputs_of(lengths))), model.num_blocks).tensors[-1]


@each_family
@torch.inference_mode()
def test_it_equals_the_sums_of_transformers(family: str) -> None:
    theirs = hf_model(family, classifies=False, attn_implementation="eager")
    ours = find_family(family).from_transformers(theirs).backbone
    inputs = inputs_of((9, 4, 20, 9))
    padded = hf_inputs(inputs)
    mask_BT = padded["attention_mask"]
    weights_LBHTT = torch.stack(theirs(**padded, output_attentions=True).attentions)
    expected_BT = (weights_LBHTT.sum((0, 2)) * mask_BT[:, :, None]).sum(1)
    values, layout = pack(inputs, torch.device("cpu"))
    begun = (*ours.embed(values, layout), torch.zeros(layout.num_tokens))
    _, found_N = ours.run_blocks(0, 3, begun, layout)
    torch.testing.assert_close(found_N, expected_BT[mask_BT.bool()], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("attention", SCHEMES)
@each_family
def test_every_layout_gives_each_input_what_it_has_alone(family: str, attention: Attention) -> None:
    model = small(family=family)
    alone = [importance(model, (length,)) for length in (4, 4)]
    torch.testing.assert_close(alone[0], alone[1])
    model.attention = attention
    piece = measured(piece_of(model, NOBODY_LEAVES, inputs_of(MIXED)))
    singles = torch.cat([run(model, single, 4).tensors[-1] for single in piece.singles()])
    torch.testing.assert_close(run(model, piece, 4).tensors[-1], singles, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hop_dtype", ["same", "float16"])
def test_it_survives_every_hop_and_other_batch_mates(hop_dtype: str) -> None:
    model = small(family="mpnet")
    expected = torch.split(importance(model, MIXED), list(MIXED))
    pieces = measured(piece_of(model, NOBODY_LEAVES, inputs_of(MIXED))).singles()
    for end, order in ((1, [3, 0, 2, 1, 7, 6, 5, 4]), (3, [0, 1, 2, 4, 3, 7, 6, 5]), (4, list(range(8)))):
        batches = [fuse([pieces[k] for k in half]) for half in (order[:3], order[3:])]
        arrived = [from_wire(model, run(model, each, end).to_wire(hop_dtype), NOBODY_LEAVES) for each in batches]  # type: ignore[arg-type] # two of the two
        pieces = sorted((one for each in arrived for one in each.singles()), key=lambda one: one.sample_ids)
    within = 1e-4 if hop_dtype == "same" else 0.02
    for piece, alone in zip(pieces, expected, strict=True):
        torch.testing.assert_close(piece.tensors[-1], alone, rtol=within, atol=within)


def test_sums_in_a_smaller_type_do_not_stop_growing() -> None:
    model = small()
    expected = importance(model, MIXED)
    model.bfloat16()
    found = importance(model, MIXED)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=0.1, atol=0.5)


def test_long_rows_attend_head_by_head(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = importance(small(family="mpnet"), MIXED)
    monkeypatch.setattr("earlyexit.families.encoder.SCORES_AT_ONCE", 1)
    for attention in SCHEMES:
        model = small(family="mpnet")
        model.attention = attention
        torch.testing.assert_close(importance(model, MIXED), expected, rtol=1e-4, atol=1e-4)


def test_of_batch_mates_that_came_without_it_is_not_known() -> None:
    # As after a plan change: the first began under a plan that prunes no words.
    model = small()
    whole, pruned = piece_of(model, NOBODY_LEAVES, inputs_of((4, 6))).singles()
    together = fuse([run(model, whole, 2), run(model, measured(pruned), 2)])
    hidden_ND, found_N = run(model, together, 4).tensors
    assert found_N.isnan().tolist() == [True] * 4 + [False] * 6
    torch.testing.assert_close(found_N[4:], run(model, measured(pruned), 4).tensors[-1])
    torch.testing.assert_close(hidden_ND[:4], run(model, whole, 4).tensors[0], rtol=1e-5, atol=1e-5)
    assert len(fuse([whole, pruned]).tensors) == 1, "where none carries it, none does"


def test_pieces_that_carry_it_are_run_by_torch_where_others_are_by_onnx_runtime(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = small()
    segments = OnnxSegments(model, cache=tmp_path)
    piece = measured(piece_of(model, NOBODY_LEAVES, inputs_of((4, 6))))
    with torch.inference_mode():
        tensors, _ = segments.run(Segment(first=0, end=4, ramp=None), piece)
    torch.testing.assert_close(tensors[-1], importance(model, (4, 6)))
    assert not list(tmp_path.iterdir())


def test_it_alone_crosses_to_the_next_network_of_a_chain() -> None:
    network = chained(2, 3)
    member = network.members[0]
    piece = piece_of(member, NOBODY_LEAVES, inputs_of((4, 6)))
    after = Segment(first=0, end=2, ramp=1)
    with torch.inference_mode():
        (crossing_N,), outputs_BC = network.run(after, measured(piece))
        nothing, expected_BC = network.run(after, piece)
    assert (nothing, crossing_N.dtype) == ((), torch.float16)
    torch.testing.assert_close(crossing_N.float(), run(member, measured(piece), 2).tensors[-1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(outputs_BC, expected_BC, rtol=1e-4, atol=1e-4)
    survivors = replace(measured(piece), next_block=2, tensors=(crossing_N,)).select([1])
    assert survivors.to_wire().tensors[0].tolist() == crossing_N[4:].tolist()


def test_of_many_inputs_each_has_its_own() -> None:
    model = small()
    inputs = inputs_of((4, 9, 6))
    found = importance_of(model, inputs, batch=2)
    for one, alone in zip(found, inputs, strict=True):
        (expected,) = importance_of(model, [alone])
        assert one.shape == (alone.length,)
        assert one.sum() == pytest.approx(4 * 4 * alone.length)  # of every query, in four blocks with four heads
        np.testing.assert_allclose(one, expected, rtol=1e-4)
