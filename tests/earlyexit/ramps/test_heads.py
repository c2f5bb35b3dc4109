"""Heads of ramps: behind bridges, which are PAME's exits, of maps, and over a decoder's shared vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn.functional import interpolate

from earlyexit.errors import PlanError
from earlyexit.families.decoder import Llama
from earlyexit.families.resnet import ResNetBackbone, cifar_layout
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained, random_model
from earlyexit.network.model import Cut, EarlyExitModel
from earlyexit.network.piece import Layout, Piece, fuse
from earlyexit.network.store import WEIGHTS_FILE, load_model, save_model
from earlyexit.policies.base import ExitPolicy
from earlyexit.policies.threshold import ConfidencePolicy, ForeseenPolicy, SimilarPolicy
from earlyexit.ramps import RampStyle, build_ramp
from earlyexit.ramps.heads import BridgeRamp, DeconvRamp, MapsRamp, Ramp, VocabularyHead
from earlyexit.ramps.pooling import Pooling, pooled_size
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import FitOptions, exit_outputs, train_ramps
from tests.earlyexit.families.checkpoints import resnet_state
from tests.earlyexit.families.convolutions import pictures
from tests.earlyexit.families.decoders import (
    NUM_BLOCKS,
    PROMPTS,
    VOCABULARY,
    Handfuls,
    backbone_of,
    decoder,
    hf_decoder,
    model_of,
    sequence,
)
from tests.earlyexit.network.tokens import layout_of
from tests.earlyexit.training.test_ramps import changed, copy_of

SIDE = 12
SIZES = {"depth": 14, "side": SIDE}
BRIDGES = RampOptions(style="bridge")
QUICK = FitOptions(epochs=10, batch=16, learning_rate=1e-2)


def small(ramps: RampOptions = BRIDGES) -> EarlyExitModel:
    """Six blocks, two in each region."""
    return random_model(SIZES, family="resnet", codec={"name": "image", "height": SIDE, "width": SIDE}, ramps=ramps)


def bridge_ramp(model: EarlyExitModel, block: int) -> BridgeRamp:
    ramp = model.exit_head(block)
    assert isinstance(ramp, BridgeRamp)
    return ramp


def pool(hidden: torch.Tensor, layout: Layout, pooling: Pooling) -> torch.Tensor:
    return Ramp(pooling).gather(hidden, layout)


@torch.inference_mode()
def test_a_bridge_has_the_shape_of_the_last_block_from_every_block() -> None:
    backbone = ResNetBackbone(cifar_layout(20, side=15)).eval()
    for block in range(backbone.num_blocks):
        hidden = torch.zeros(2, *backbone.boundary(block)[0].shape)
        assert backbone.bridge(block)(hidden).shape[1:] == backbone.boundary(8)[0].shape


def test_a_bridge_has_its_own_first_block_of_every_later_region() -> None:
    backbone = ResNetBackbone(cifar_layout(20))
    firsts = {0: [3, 6], 2: [3, 6], 3: [6], 5: [6], 6: [], 8: []}
    originals = {id(parameter) for parameter in backbone.parameters()}
    for block, expected in firsts.items():
        bridge = backbone.bridge(block)
        assert len(list(bridge.children())) == len(expected)
        for copy, original in zip(bridge.children(), expected, strict=True):
            assert changed(copy, copy_of(backbone.blocks[original])) == set()
        assert not originals & {id(parameter) for parameter in bridge.parameters()}


def test_bridges_of_a_checkpoint_begin_with_its_blocks_and_its_head(tmp_path: Path) -> None:
    torch.save(resnet_state(blocks_per_stage=2), tmp_path / "resnet14.th")
    pretrained, family = load_pretrained(str(tmp_path / "resnet14.th"))
    assert pretrained.codec is not None
    task = LabelTask([f"class-{k}" for k in range(10)])
    model = add_ramps(pretrained, name="m", family=family, codec=pretrained.codec, task=task, ramps=BRIDGES)
    assert (model.info.ramp_style, model.info.head_style) == ("bridge", "light")
    for block in model.ramp_indices:
        assert changed(bridge_ramp(model, block).head, copy_of(model.head)) == set()
        assert changed(bridge_ramp(model, block).bridge, copy_of(model.backbone.bridge(block) or model)) == set()


def test_bridges_learn_on_a_frozen_backbone() -> None:
    model = small()
    before = copy_of(model.backbone)
    inputs, labels = pictures(64, side=SIDE)
    train_ramps(model, inputs, labels, QUICK)
    assert changed(model.backbone, before) == set()
    assert changed(bridge_ramp(model, 0).bridge, copy_of(model.backbone.bridge(0) or model))  # it is no longer a copy
    unseen, expected = pictures(64, seed=1, side=SIDE)
    for found in exit_outputs(model, unseen).values():
        assert (found.argmax(1).numpy() == expected).mean() > 0.95


STYLES = ("maps", "deconv")
SIDES = [
    pytest.param((12, 16), (45, 60), id="180 x 240 at 16 to every fourth pixel"),
    pytest.param((6, 8), (45, 60), id="180 x 240 at 32 to every fourth pixel"),
    pytest.param((6, 8), (180, 240), id="180 x 240 at 32 to every pixel"),
    pytest.param((45, 60), (45, 60), id="as large as it is"),
    pytest.param((3, 3), (24, 24), id="a heatmap"),
    pytest.param((7, 5), (31, 17), id="sides of which one is no half of the other"),
    pytest.param((9, 9), (4, 5), id="smaller"),
]


@pytest.mark.parametrize(("before", "after"), SIDES)
@pytest.mark.parametrize("style", STYLES)
@torch.inference_mode()
def test_maps_have_the_size_of_the_outputs(style: str, before: tuple[int, int], after: tuple[int, int]) -> None:
    head = build_ramp(style, (8, *before), (3, *after), "mean").eval()
    assert head.classify(torch.randn(2, 8, *before)).shape == (2, 3, *after)


@torch.inference_mode()
def test_upsampling_before_and_after_the_last_convolution_are_equal() -> None:
    head = MapsRamp((8, 6, 8), (3, 45, 60), "mean").eval()
    maps = torch.randn(2, 8, 6, 8)
    inner = torch.relu(head.norm(head.convolution(maps)))
    expected = head.classifier(interpolate(inner, size=(45, 60), mode="bilinear", align_corners=False))
    torch.testing.assert_close(head.classify(maps), expected, rtol=0, atol=1e-5)


@torch.inference_mode()
def test_a_deconvolution_keeps_pixels_aligned() -> None:
    """Halves of 45 x 60 rounded up are 23 x 30 and 12 x 15; only the last row is left out, of what is doubled."""
    head = DeconvRamp((2, 12, 15), (1, 45, 60), "mean").eval()
    maps = torch.zeros(1, 2, 12, 15)
    without = head.classify(maps)
    for row, column in ((0, 0), (5, 7), (11, 14)):
        maps.zero_()
        maps[0, :, row, column] = 1
        rows, columns = (head.classify(maps) != without)[0, 0].nonzero(as_tuple=True)
        for found, place in ((rows, row), (columns, column)):
            assert (found >= 4 * place - 3).all(), "two doublings reach three pixels beyond the four that one becomes"
            assert (found <= 4 * place + 6).all()
            assert 4 * place in found


def test_maps_are_pooled_to_means_or_grids_of_means_per_channel() -> None:
    maps_BCHW = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]]]])
    assert pool(maps_BCHW, layout_of(1), "mean").tolist() == [[3.0, 1.0]]
    maps_BCHW = torch.arange(64.0).view(1, 1, 8, 8)
    # The first cell has rows 0 and 1, columns 0 and 1: 0, 1, 8, 9. A cell to the right is 2 more, one below 16.
    expected = [4.5 + 2 * column + 16 * row for row in range(4) for column in range(4)]
    assert pool(maps_BCHW, layout_of(1), "grid").tolist() == [expected]
    # A map with fewer places than cells is its own grid.
    maps_BCL = torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])
    assert pool(maps_BCL, layout_of(1, 1), "grid").tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]
    # Tokens that are maps are pooled before their maps.
    layout = layout_of(2, 1)
    rows_NCL = torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]], [[2.0, 4.0]]])
    assert pool(rows_NCL, layout, "mean").tolist() == [[4.0], [3.0]]
    assert pool(rows_NCL, layout, "grid").tolist() == [[3.0, 5.0], [2.0, 4.0]]
    # A row of two axes may be tokens, as in vision transformers.
    assert pool(rows_NCL.mT, layout_of(1, 1, 1), "last").tolist() == [[3.0], [7.0], [4.0]]


@pytest.mark.parametrize(
    ("row", "pooling"),
    [((6,), "mean"), ((6,), "grid"), ((6, 9), "first"), ((6, 9, 3), "grid"), ((2, 4, 5, 6), "grid")],
    ids=str,
)
def test_the_size_is_that_of_what_is_pooled(row: tuple[int, ...], pooling: Pooling) -> None:
    assert pool(torch.zeros(2, *row), layout_of(1, 1), pooling).shape == (2, pooled_size(row, pooling))


def test_maps_of_the_network_itself_are_not_changed() -> None:
    maps_BCHW = torch.randn(2, 3, 8, 8)
    assert build_ramp("given", (3, 8, 8), (3, 8, 8), "mean")(maps_BCHW, layout_of(1, 1)).equal(maps_BCHW)


RAMPS = (1, 2)


def sharing(style: RampStyle) -> EarlyExitModel:
    """The small decoder with the embedding's weights in its head, and ramps at random."""
    return model_of(Llama().from_transformers(hf_decoder(tie_word_embeddings=True)), ramps=RAMPS, style=style, seed=5)


def exits_of(model: EarlyExitModel, policy: ExitPolicy, bounds: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Returns the sequence of each token, the token, and the block that it left after."""
    sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
    said = Handfuls(model=model, policy=policy, bounds=bounds, ramps=RAMPS).run(sequences)
    return [(number, each.token, each.exit) for number, steps in said.items() for each in steps]


@pytest.mark.parametrize("style", ["normed", "adapted"])
def test_a_shared_vocabulary_is_kept_once(tmp_path: Path, style: RampStyle) -> None:
    model = sharing(style)
    save_model(model, tmp_path)
    with safe_open(tmp_path / WEIGHTS_FILE, "pt") as file:
        vocabularies = [name for name in file.keys() if VOCABULARY in file.get_slice(name).get_shape()]  # noqa: SIM118
    assert vocabularies == ["backbone.word.weight"]
    loaded = load_model(tmp_path)
    assert isinstance(loaded.head, VocabularyHead)
    assert loaded.head.classifier.weight is backbone_of(loaded).word.weight
    backbone_of(loaded).open_store(64, page_tokens=4)
    policy = ConfidencePolicy(0.02)
    assert exits_of(loaded, policy, (0, NUM_BLOCKS)) == exits_of(model, policy, (0, NUM_BLOCKS))


@pytest.mark.parametrize(
    "policy", [ForeseenPolicy({1: 0.52, 2: 0.5}), SimilarPolicy({1: 0.72, 2: 0.85})], ids=["foreseen", "similar"]
)
@pytest.mark.parametrize("bounds", [(0, 1, 5), (0, 2, 5), (0, 2, 3, 5)], ids=str)
def test_decisions_before_the_vocabulary_are_the_same_in_all_cuts(policy: ExitPolicy, bounds: tuple[int, ...]) -> None:
    model = sharing("adapted")
    found = exits_of(model, policy, bounds)
    assert found == exits_of(model, policy, (0, NUM_BLOCKS))
    assert {exit_block for *_, exit_block in found} == {*RAMPS, NUM_BLOCKS - 1}


@pytest.mark.parametrize("end", [3, NUM_BLOCKS], ids=["in the middle", "to the end"])
def test_the_vocabulary_is_computed_once_per_batch(monkeypatch: pytest.MonkeyPatch, end: int) -> None:
    model, rows = sharing("normed"), list[int]()

    def counted(head: VocabularyHead, gathered: Tensor, compute: object = VocabularyHead.classify) -> Tensor:
        rows.append(len(gathered))
        return compute(head, gathered)  # type: ignore[operator,no-any-return]

    monkeypatch.setattr(VocabularyHead, "classify", counted)
    cut = Cut(model, 0, end, RAMPS, ForeseenPolicy({1: 0.52, 2: 0.5}))
    *before, last = cut.run(fuse(first_steps(model)))
    assert not [answer for step in before for answer in step.answers]
    staying = 0 if last.survivors is None else len(last.survivors)
    assert rows == [len(last.answers)] == [len(PROMPTS) - staying]
    assert len({answer.exit for answer in last.answers}) > 1


def first_steps(model: EarlyExitModel) -> list[Piece]:
    """Returns the first step of every prompt."""
    sequences = {number: sequence(prompt) for number, prompt in enumerate(PROMPTS, 1)}
    for number, each in sequences.items():
        each.begin(number)
    return [Handfuls(model=model)._piece(number, each) for number, each in sequences.items()]


def test_every_ramp_observes_probes_with_the_score_of_the_policy() -> None:
    model, policy = sharing("normed"), ForeseenPolicy(2.0)
    cut = Cut(model, 0, NUM_BLOCKS, (), policy).observing(model.ramp_indices)
    seen = [each for step in cut.run(first_steps(model)[1]) for each in step.seen]
    assert [each.exit for each in seen] == [*RAMPS, NUM_BLOCKS - 1]
    assert all(0 < each.score < 1 for each in seen[:-1])


def test_policies_that_decide_before_outputs_refuse_ramps_without_their_score() -> None:
    plain = decoder(hf_decoder())
    with pytest.raises(PlanError, match=r"needs ramps with a small classifier of their own; ramps \[1, 2\] have none"):
        Cut(plain, 0, NUM_BLOCKS, RAMPS, ForeseenPolicy(0.5))
