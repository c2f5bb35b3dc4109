"""Networks that are not ours, made here as a user would make them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.engine.queue import Attention
from earlyexit.errors import GraphError, ModelFolderError, PlanError
from earlyexit.families import FILES
from earlyexit.families.base import Backbone, FinalHead, Pretrained
from earlyexit.families.own import PaddedBackbone, TensorBackbone, check_alone
from earlyexit.network.boundary import Encoded, Segment, Split, TensorSpec
from earlyexit.network.checkpoint import RampOptions, load_pretrained
from earlyexit.network.layers import ReorderedLinear, reorder_linears, torch_segments
from earlyexit.network.model import EarlyExitModel, TorchRunner
from earlyexit.network.store import load_model, save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.training.joint import train_jointly
from earlyexit.training.ramps import FitOptions, exit_outputs, train_ramps
from tests.earlyexit.families.convolutions import PIXELS, SHAPES, Convolution, Flat, Pixels, pictures
from tests.earlyexit.families.convolutions import build as build_convolutions
from tests.earlyexit.foreign.modules import Applied
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same, every_bounds, piece_of
from tests.earlyexit.network.models import ramped, small
from tests.earlyexit.network.tokens import layout_of, of_tokens, random_inputs

HERE = __name__
WIDTH = 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, token_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        vectors: Tensor = self.words(token_ids_BT) * self.scale
        return vectors


class Mean(nn.Module):
    """Adds the mean of an input's tokens to each of them."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.masked = masked

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        mask_BT1 = (mask_BT if self.masked else torch.ones_like(mask_BT))[:, :, None].to(hidden_BTD.dtype)
        mean_B1D = (hidden_BTD * mask_BT1).sum(1, keepdim=True) / mask_BT1.sum(1, keepdim=True)
        result: Tensor = self.linear(hidden_BTD) + mean_B1D
        return result


def build(depth: int = 2) -> PaddedBackbone:
    return padded(*(Mean() for _ in range(depth)))


def padded(*blocks: nn.Module) -> PaddedBackbone:
    return PaddedBackbone(embed=Embedding(), blocks=blocks, max_length=9, config={"depth": len(blocks)})


def test_an_own_model_is_saved_loaded_cut_and_reordered_only_where_it_may_be(tmp_path: Path) -> None:
    assert __name__ in sys.modules
    torch.manual_seed(0)
    pretrained, family = load_pretrained(f"{HERE}:build")
    model = ramped(pretrained, family, LabelTask(("a", "b")))
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.info.family == f"{HERE}:build"
    assert float(loaded.backbone.get_buffer("embedding.scale")) == 2.0, "what is not saved is made anew"
    reorder_linears(loaded)
    assert not any(isinstance(each, ReorderedLinear) for each in loaded.backbone.modules())
    assert any(isinstance(each, ReorderedLinear) for each in loaded.head.modules())
    policy, encoded = ConfidencePolicy(1.1), [of_tokens([1, 2]), of_tokens([3, 4, 5])]  # no input leaves
    assert_same(answers_in_cuts(loaded, policy, encoded, (0, 1, 2)), answers_alone(model, policy, encoded))


@torch.inference_mode()
def test_a_network_of_linear_layers_alone_keeps_its_dtype_when_all_of_them_are_reordered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorBackbone, "reorders_linears", True)
    inputs = (TensorSpec(name="x", shape=(WIDTH,)),)
    backbone = TensorBackbone(embed=nn.Identity(), blocks=map(nn.Linear, (4, 4), (4, 4)), inputs=inputs, config={})
    assert len(backbone.boundary(1)) == 1, "known before layers are replaced"
    model = ramped(Pretrained(backbone=backbone, head=None, label_names=None), HERE, LabelTask(("a", "b"))).bfloat16()
    torch_segments(model)
    assert model.dtype == torch.bfloat16


NAME = "tests.earlyexit.families.convolutions:build"
CODEC = {"name": "image", "height": 8, "width": 8}
LABELS, GRID = LabelTask(("left", "right")), RampOptions(pooling="grid")


def fresh_model() -> EarlyExitModel:
    pretrained, family = load_pretrained(NAME)
    return ramped(pretrained, family, LABELS, codec=CODEC, ramps=GRID)


def test_boundaries_are_found_by_a_run_that_does_not_change_statistics() -> None:
    model = fresh_model()
    assert model.takes(0) == (PIXELS,)
    assert tuple(tuple(each.shape for each in model.takes(block)) for block in range(1, 5)) == SHAPES
    assert {each.per_token for block in range(1, 5) for each in model.takes(block)} == {False}
    assert model.max_length == 1
    backbone = build_convolutions().train()
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    check_alone(backbone)
    assert backbone.boundary(3)[0].shape == (10,)
    assert backbone.training
    assert all(tensor.equal(before[name]) for name, tensor in backbone.state_dict().items())


# What a network over tensors must keep to, what may cross between its blocks, and in what precision


centred = Applied(lambda hidden: hidden - hidden.mean(0, keepdim=True))  # looks at its batch-mates
twice = Applied(lambda hidden: torch.cat([hidden, hidden]))
# Gives whole numbers beside the others.
counting = Applied(lambda hidden, *_: (hidden, (hidden > 0).sum(1, dtype=torch.int32)))
doubled = Applied(lambda hidden, *_: (hidden, hidden.double()))


def masking(value: float) -> Applied:
    """Returns a block that never gives the last class, as models with padded classes do."""
    return Applied(lambda hidden: torch.cat([hidden[:, :-1], torch.full_like(hidden[:, -1:], value)], dim=1))


def rows_of_three(*blocks: nn.Module, embed: nn.Module | None = None) -> TensorBackbone:
    """A network over rows of three numbers."""
    spec = TensorSpec(name="row", shape=(3,))
    return TensorBackbone(embed=embed or nn.Linear(3, 3), blocks=blocks, inputs=(spec,), config={})


def of_numbers(count: int) -> list[Encoded]:
    values = np.random.default_rng(0).standard_normal((count, 1, 3), dtype=np.float32)
    return [Encoded(1, (row,)) for row in values]


@pytest.mark.parametrize(
    ("backbone", "message"),
    [
        pytest.param(
            lambda: padded(Mean(), Mean(masked=False)),
            "block 1 gives one of 3 inputs other values than alone",
            id="lets padding through",
        ),
        pytest.param(
            lambda: rows_of_three(nn.Tanh(), centred),
            "block 1 gives one of 3 inputs other values than alone",
            id="leaks",
        ),
        *(
            pytest.param(
                lambda value=value: rows_of_three(nn.Sequential(centred, masking(value))),
                "block 0 gives one of 3 inputs other values than alone",
                id=f"leaks beside a class of {value:g}",
            )
            for value in (-1e4, -1e9, float(np.finfo(np.float32).min))
        ),
        pytest.param(
            lambda: rows_of_three(twice),
            "block 0 returns 6 rows for 3 inputs of 3 tokens; one row per input",
            id="too many",
        ),
        pytest.param(
            lambda: rows_of_three(nn.Tanh(), embed=twice), "the embedding returns 6 rows", id="of the embedding"
        ),
    ],
)
def test_a_network_with_other_numbers_of_rows_is_refused(backbone: Callable[[], Backbone], message: str) -> None:
    with pytest.raises(GraphError, match=message):
        check_alone(backbone())


def model_of(backbone: TensorBackbone) -> EarlyExitModel:
    pretrained = Pretrained(backbone=backbone, head=None, label_names=None)
    return ramped(pretrained, "none", LABELS, codec={"name": "tensor"}, ramps=GRID)


def test_integers_and_floats_of_the_networks_dtype_may_cross_boundaries() -> None:
    backbone = rows_of_three(counting, counting)
    check_alone(backbone)
    model = model_of(backbone)
    assert [(each.dtype, each.shape) for each in model.takes(1)] == [("float", (3,)), ("int32", ())]
    warm_up = TorchRunner(model, ConfidencePolicy(2.0)).warm_up_pieces(Split(first=1, end=2, batch=4), 4)
    assert [values.dtype for values in warm_up.tensors] == [torch.float32, torch.int32]
    with pytest.raises(ModelFolderError, match=r"block 0 returns torch\.float64; the weights' float"):
        model_of(rows_of_three(doubled, doubled))
    model = model_of(rows_of_three(nn.Linear(3, 3), nn.Tanh())).to(torch.bfloat16)
    answers = answers_alone(model, ConfidencePolicy(2.0), of_numbers(4))
    assert {answer.exit for answer in answers.values()} == {1}
    assert exit_outputs(model, of_numbers(4))[1].shape == (4, 2)


WITH_CLASSIFIER = "tests.earlyexit.families.test_own_family:with_classifier"
GIVEN = FinalHead(style="given", pooling="mean", num_outputs=2, weights={})


def with_classifier() -> Backbone:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        blocks = [Convolution(4, 6, stride=2), Convolution(6, 8, stride=2), nn.Sequential(Flat(), nn.Linear(10, 2))]
        return TensorBackbone(embed=Pixels(), blocks=blocks, inputs=(PIXELS,), config={})


def given_of(label_names: tuple[str, ...] | None, task: Task = LABELS) -> EarlyExitModel:
    pretrained = Pretrained(backbone=with_classifier(), head=GIVEN, label_names=label_names)
    return ramped(pretrained, WITH_CLASSIFIER, task, codec={"name": "image", "height": 8, "width": 8})


@pytest.fixture
def classified() -> EarlyExitModel:
    return given_of(("left", "right"))


def test_training_changes_ramps_and_leaves_the_networks_own_answers(classified: EarlyExitModel) -> None:
    encoded, labels = pictures(32)
    before = exit_outputs(classified, encoded)
    train_ramps(classified, encoded, labels, FitOptions(epochs=2, batch=16))
    after = exit_outputs(classified, encoded)
    assert after[2].equal(before[2])
    assert not after[0].equal(before[0])


def test_a_head_is_kept_only_for_a_task_with_as_many_labels() -> None:
    model = given_of(None)
    assert (model.info.head_style, model.info.provenance["head"]) == ("given", "checkpoint")
    for other in (LabelTask(("a", "b", "c")), RegressionTask(1.0)):
        model = given_of(None, other)
        assert (model.info.head_style, "head" in model.info.provenance) == ("light", False)


def test_given_outputs_that_are_not_the_tasks_are_refused(classified: EarlyExitModel, tmp_path: Path) -> None:
    classified.info = replace(classified.info, task=LabelTask(("a", "b", "c")))
    save_model(classified, tmp_path)
    with pytest.raises(ModelFolderError, match="gives 2 outputs, the task has 3"):
        load_model(tmp_path)


def test_a_backbone_without_weights_is_not_trained() -> None:
    model = small()
    model.backbone = model.backbone.requires_grad_(False)
    for module in model.backbone.modules():
        module._parameters.clear()
    with pytest.raises(ModelFolderError, match="bert cannot be trained: train its ramps only"):
        train_jointly(model, [], np.array([], dtype=np.int64))


def test_the_families_that_refuse_other_float_types_are_those_whose_backbones_do() -> None:
    from earlyexit.foreign.onnx_backbone import OnnxBackbone
    from earlyexit.foreign.torch_backbone import ExportedBackbone

    backbones: dict[str, type[Backbone]] = {"exported": ExportedBackbone, "onnx": OnnxBackbone}
    assert {name for name, backbone in backbones.items() if backbone.float32_only} == set(FILES)


MIXED = (5, 32, 1, 12, 5, 30, 7, 3)
POLICY = ConfidencePolicy(0.45)
"""Between the confidences of the random ramps, so that every ramp lets some inputs leave and some pass."""
SCHEMES: tuple[Attention, ...] = ("padded", "slotted", "apart")


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    return small()


def test_on_a_cpu_inputs_of_unequal_lengths_attend_separately_if_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_inputs_attend_only_to_themselves(model: EarlyExitModel, lengths: list[int], attention: Attention) -> None:
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
def test_every_cut_gives_the_answers_of_the_unsplit_model(family: str, attention: Attention) -> None:
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
        OnnxSegments(model, tmp_path)
