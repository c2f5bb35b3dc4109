from __future__ import annotations

import copy
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
from earlyexit.families.base import FinalHead, Pretrained
from earlyexit.network.boundary import Encoded, Segment
from earlyexit.network.checkpoint import RampOptions, add_ramps, random_model
from earlyexit.network.model import EarlyExitModel, from_wire
from earlyexit.network.piece import Piece, fuse
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.ramps import RampStyle
from earlyexit.ramps.pooling import Pooling
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.pose import PoseTask
from earlyexit.training.augmentation import Augmentation
from earlyexit.training.joint import JointOptions, train_jointly
from earlyexit.training.ramps import FitOptions, batches_by_length, exit_outputs, importance_of, pack, train_ramps
from tests.earlyexit.families.checkpoints import FAMILIES, hf_inputs, hf_model
from tests.earlyexit.families.convolutions import pictures
from tests.earlyexit.network.chains import chained
from tests.earlyexit.network.cuts import piece_of
from tests.earlyexit.network.models import SMALL, small
from tests.earlyexit.network.tokens import of_tokens, random_inputs

SIZES = SMALL | {"vocab_size": 40, "num_blocks": 3, "max_length": 16}
NUM_INPUTS = 96
QUICK = FitOptions(epochs=30, batch=32, learning_rate=2e-2)


def toy(seed: int) -> tuple[list[Encoded], ValueArray]:
    """Inputs of 4 to 8 tokens; those of class 0 use tokens 1-19, those of class 1 tokens 20-38."""
    rng = np.random.default_rng(seed)
    labels = [k % 2 for k in range(NUM_INPUTS)]
    inputs = [rng.integers(1 + 19 * label, 20 + 19 * label, rng.integers(4, 9), dtype=np.int32) for label in labels]
    return [of_tokens(token_ids) for token_ids in inputs], np.array(labels)


def accuracies(model: EarlyExitModel, seed: int) -> dict[int, float]:
    inputs, labels = toy(seed)
    targets_N = torch.from_numpy(labels)
    return {
        block: float((logits_NC.argmax(1) == targets_N).float().mean())
        for block, logits_NC in exit_outputs(model, inputs).items()
    }


def copy_of(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


def changed(module: torch.nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, tensor in module.state_dict().items() if not tensor.equal(before[name])}


@pytest.mark.parametrize("style", ["light", "pooler"])
def test_every_exit_learns_a_separable_problem_on_an_unchanged_backbone(style: str) -> None:
    options = RampOptions(style="light" if style == "light" else "pooler")
    model = random_model(SIZES, ramps=options)
    before = copy_of(model.backbone)
    train_ramps(model, *toy(seed=0), QUICK)
    assert changed(model.backbone, before) == set()
    assert min(accuracies(model, seed=1).values()) > 0.92
    assert not model.training


def test_joint_training_changes_the_backbone_too() -> None:
    model = random_model(SIZES)
    before = copy_of(model)
    train_jointly(model, *toy(seed=0), JointOptions(epochs=10, batch=32, learning_rate=3e-3))
    unchanged = set(before) - changed(model, before)
    assert unchanged == {"temperatures_E"}
    assert min(accuracies(model, seed=1).values()) > 0.92
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_head_of_a_checkpoint_is_not_trained() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = {"dense.weight": (32, 32), "dense.bias": (32,), "classifier.weight": (2, 32), "classifier.bias": (2,)}
    head = FinalHead(
        style="pooler",
        pooling="first",
        num_outputs=2,
        weights={name: torch.randn(shape, generator=generator) for name, shape in shapes.items()},
    )
    pretrained = Pretrained(backbone=find_family("bert").build(SIZES), head=head, label_names=("no", "yes"))
    model = add_ramps(
        pretrained,
        name="m",
        family="bert",
        codec={"name": "text", "max_length": 16},
        task=LabelTask(("no", "yes")),
        ramps=RampOptions(),
    )
    ramps = copy_of(model.ramps)
    train_ramps(model, *toy(seed=0), FitOptions(epochs=2, batch=32))
    assert changed(model.head, dict(head.weights)) == set()
    assert changed(model.ramps, ramps) == set(ramps)


def test_ramps_learn_the_full_models_answers_not_the_labels() -> None:
    model = random_model(SIZES)
    inputs, labels = toy(seed=0)
    train_ramps(model, inputs, labels, QUICK)
    model.info = replace(model.info, provenance={"head": "checkpoint"})
    before = copy_of(model.head)
    train_ramps(model, inputs, 1 - labels, QUICK)
    assert changed(model.head, before) == set()
    assert min(accuracies(model, seed=1).values()) > 0.92


def resnet(
    pooling: Pooling, style: RampStyle = "light", at: tuple[int, ...] | None = None, task: Task | None = None
) -> EarlyExitModel:
    return random_model(
        {"depth": 8, "side": 8},
        family="resnet",
        codec={"name": "image", "height": 8, "width": 8},
        task=task,
        ramps=RampOptions(style=style, pooling=pooling, at=at),
    )


@pytest.mark.parametrize(
    ("style", "pooling"),
    [("light", "mean"), ("light", "grid"), ("mlp", "grid"), ("conv", "mean"), ("reduced", "grid")],
    ids=str,
)
def test_ramps_learn_on_maps_of_a_frozen_network(style: RampStyle, pooling: Pooling) -> None:
    model = resnet(pooling, style)
    before = copy_of(model.backbone)
    train_ramps(model, *pictures(32, seed=0), replace(QUICK, epochs=40))
    assert changed(model.backbone, before) == set(), "its norms keep their statistics"
    inputs, labels = pictures(32, seed=1)
    for outputs_NC in exit_outputs(model, inputs).values():
        assert (outputs_NC.argmax(1).numpy() == labels).mean() > 0.9


@pytest.mark.parametrize(("style", "pooling"), [("light", "mean"), ("mlp", "grid"), ("conv", "mean")], ids=str)
def test_a_ramp_trained_alone_becomes_the_same_among_others(style: RampStyle, pooling: Pooling) -> None:
    options = FitOptions(epochs=4, batch=8, learning_rate=2e-2)
    together, alone = resnet(pooling, style), resnet(pooling, style, at=(1,))
    for model in (together, alone):
        train_ramps(model, *pictures(32, seed=0), options)
    for name, tensor in alone.exit_head(1).state_dict().items():
        torch.testing.assert_close(tensor, together.exit_head(1).state_dict()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("style", ["maps", "deconv"])
def test_a_ramp_of_maps_trained_alone_becomes_the_same_among_others(style: RampStyle) -> None:
    task = PoseTask(["nose", "tail"], heatmap_side=8, image_side=8, tolerance=1.0)
    together, alone = (resnet("mean", style, at=at, task=task) for at in ((0, 1), (1,)))
    inputs, _ = pictures(32, seed=0)
    places = np.random.default_rng(0).uniform(0, 7, (len(inputs), 2, 2)).astype(np.float32)
    for before, model in enumerate((together, alone)):
        torch.manual_seed(before)
        for norm in (each for each in model.exit_head(1).modules() if isinstance(each, torch.nn.BatchNorm2d)):
            torch.nn.init.constant_(norm.weight, 1 + before)  # as if something had been learned
        train_ramps(model, inputs, places, FitOptions(epochs=2, batch=8))
    for name, tensor in alone.exit_head(1).state_dict().items():
        torch.testing.assert_close(tensor, together.exit_head(1).state_dict()[name], rtol=0, atol=1e-6)


def test_ramps_are_drawn_by_the_seed_alone() -> None:
    def trained(seed: int, before: int) -> Tensor:
        torch.manual_seed(before)
        model = random_model(SIZES)
        train_ramps(model, *toy(seed=0), FitOptions(epochs=1, batch=32, seed=seed))
        weight: Tensor = model.exit_head(0).state_dict()["classifier.weight"]
        return weight

    assert trained(seed=0, before=1).equal(trained(seed=0, before=2))
    assert not trained(seed=1, before=1).equal(trained(seed=0, before=1))


# Exits on known inputs


def test_an_exits_temperature_divides_its_logits(small_model: EarlyExitModel, encoded: list[Encoded]) -> None:
    before = exit_outputs(small_model, encoded)
    small_model.temperatures_E[1] = 2.0
    after = exit_outputs(small_model, encoded)
    torch.testing.assert_close(after[1] * 2, before[1])
    assert after[2].equal(before[2])


@pytest.mark.parametrize(("factor", "temperature"), [(0.25, 0.25), (1.0, 1.0), (4.0, 4.0), (0.01, 1.0)])
def test_the_temperature_of_scaled_logits_is_recovered_above_the_least(factor: float, temperature: float) -> None:
    # Labels drawn from softmax(logits): the honest temperature is 1, and that of `factor * logits` is the factor.
    rng = np.random.default_rng(0)
    logits_NC = rng.normal(size=(20_000, 3))
    probability_NC = np.exp(logits_NC) / np.exp(logits_NC).sum(1, keepdims=True)
    labels_N = (rng.random((20_000, 1)) > probability_NC.cumsum(1)).sum(1).clip(max=2)
    scaled_NC = torch.tensor(factor * logits_NC, dtype=torch.float32)
    assert LabelTask(("a", "b", "c")).fit_temperature(scaled_NC, labels_N) == pytest.approx(temperature, rel=0.05)


def test_no_temperature_is_fitted_if_the_labels_are_the_models_answers() -> None:
    logits_NC = torch.tensor(np.random.default_rng(0).normal(size=(200, 3)), dtype=torch.float32)
    assert LabelTask(("a", "b", "c")).fit_temperature(logits_NC, logits_NC.argmax(1).numpy()) == 1.0


def test_batches_are_of_similar_length_longest_first() -> None:
    encoded = [of_tokens([0] * length) for length in (2, 5, 3, 5, 1)]
    assert list(batches_by_length(encoded, 2)) == [[1, 3], [2, 0], [4]]


def test_progress_is_reported_for_epochs_and_features() -> None:
    told: list[tuple[str, int, int]] = []
    options = FitOptions(epochs=2, batch=64, progress=lambda what, done, total: told.append((what, done, total)))
    train_ramps(random_model(SIZES), *toy(seed=0), options)
    epochs = [(f"epochs, {what}", done, 2) for what in ("head", "ramps") for done in (1, 2)]
    assert told == [("features", 64, 96), ("features", 96, 96), *epochs]


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
def test_importance_equals_the_sums_of_transformers_attention(family: str) -> None:
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
def test_importance_does_not_depend_on_the_layout(family: str, attention: Attention) -> None:
    model = small(family=family)
    alone = [importance(model, (length,)) for length in (4, 4)]
    torch.testing.assert_close(alone[0], alone[1])
    model.attention = attention
    piece = measured(piece_of(model, NOBODY_LEAVES, inputs_of(MIXED)))
    singles = torch.cat([run(model, single, 4).tensors[-1] for single in piece.singles()])
    torch.testing.assert_close(run(model, piece, 4).tensors[-1], singles, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hop_dtype", ["same", "float16"])
def test_importance_is_kept_over_hops_and_in_other_batches(hop_dtype: str) -> None:
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


def test_importance_is_nan_for_inputs_that_arrived_without_it() -> None:
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
    segments = OnnxSegments(model, tmp_path)
    piece = measured(piece_of(model, NOBODY_LEAVES, inputs_of((4, 6))))
    with torch.inference_mode():
        tensors, _ = segments.run(Segment(first=0, end=4, ramp=None), piece)
    torch.testing.assert_close(tensors[-1], importance(model, (4, 6)))
    assert not list(tmp_path.iterdir())


def test_only_importance_crosses_to_the_next_network_of_a_chain() -> None:
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


def test_each_of_many_inputs_has_its_own_importance() -> None:
    model = small()
    inputs = inputs_of((4, 9, 6))
    found = importance_of(model, inputs, batch=2)
    for one, alone in zip(found, inputs, strict=True):
        (expected,) = importance_of(model, [alone])
        assert (one.shape, one.dtype.name) == ((alone.length,), "float16"), "as an ingress gets it"
        assert one.sum() == pytest.approx(4 * 4 * alone.length)  # of every query, in four blocks with four heads
        np.testing.assert_allclose(one, expected, rtol=1e-4)


ROWS = 40


def joint_resnet(side: int = 8) -> EarlyExitModel:
    return random_model(
        {"depth": 8, "side": side},
        family="resnet",
        codec={"name": "image", "height": side, "width": side},
        ramps=RampOptions(style="mlp", pooling="grid"),
    )


JOINT = JointOptions(epochs=4, batch=16, learning_rate=0.02, optimizer="sgd", augmentation=Augmentation(mirror=False))


def test_equal_seeds_train_equal_models_and_others_do_not() -> None:
    models = [joint_resnet() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(len(models))
        train_jointly(model, *pictures(ROWS), replace(JOINT, epochs=1, seed=seed))
        torch.rand(3)
    assert changed(models[0], copy_of(models[1])) == set()
    assert changed(models[0], copy_of(models[2]))


def test_training_stops_if_held_out_rows_do_not_improve() -> None:
    """Labels that mean nothing: what is learned of them makes other rows worse."""
    encoded, _ = pictures(ROWS)
    labels = np.random.default_rng(1).integers(0, 2, ROWS)
    model, after_epochs = joint_resnet(), list[dict[str, Tensor]]()
    options = JointOptions(
        epochs=30, batch=16, learning_rate=0.05, patience=2, progress=lambda *_: after_epochs.append(copy_of(model))
    )
    train_jointly(model, encoded, labels, options)
    assert len(after_epochs) < 30
    assert changed(model, after_epochs[-1 - 2]) == set(), (
        "two epochs after the best one it stops, with that one's weights"
    )
    assert changed(model, after_epochs[-1])


@pytest.mark.parametrize("came", [False, True], ids=["a new head", "a checkpoint's head"])
def test_only_weights_of_a_checkpoint_have_the_lower_learning_rate(came: bool) -> None:
    model = joint_resnet()
    model.info = replace(model.info, provenance={"head": "checkpoint"} if came else {})
    before = copy.deepcopy(model)
    train_jointly(model, *pictures(ROWS), replace(JOINT, epochs=1, backbone_pace=0.0))

    def moved(part: str) -> set[bool]:
        old = dict(before.named_parameters())
        return {not old[name].equal(each) for name, each in model.named_parameters() if name.startswith(f"{part}.")}

    assert moved("backbone") == {False}
    assert moved("head") == {not came}
    assert True in moved("ramps")


def test_exits_that_imitate_learn_the_initial_networks_answers() -> None:
    model = joint_resnet()
    encoded, labels = pictures(ROWS)
    train_jointly(model, encoded, labels, replace(JOINT, epochs=12))
    model.info = replace(model.info, provenance={"head": "checkpoint"})
    before = exit_outputs(model, encoded)[2].argmax(1)
    train_jointly(model, encoded, 1 - labels, replace(JOINT, imitate=True, learning_rate=5e-3))
    for outputs in exit_outputs(model, encoded).values():
        assert float((outputs.argmax(1) == before).float().mean()) > 0.9


def test_mixed_precision_keeps_weights_in_float32() -> None:
    models = {mixed: joint_resnet() for mixed in (False, True)}
    encoded, labels = pictures(ROWS)
    for mixed, model in models.items():
        train_jointly(model, encoded, labels, replace(JOINT, epochs=10, mixed=mixed))
        assert {tensor.dtype for tensor in model.parameters()} == {torch.float32}
        for outputs in exit_outputs(model, pictures(ROWS, seed=1)[0]).values():
            assert (outputs.argmax(1).numpy() == labels).mean() > 0.9
    assert changed(models[False], copy_of(models[True])), "products in bfloat16 are others"


def test_a_last_batch_of_one_input_does_not_harm_batch_norms() -> None:
    """A single 1 x 1 map has no variance, so torch refuses to normalize it."""
    model = joint_resnet(side=4)
    assert model.takes(model.num_blocks)[0].shape[1:] == (1, 1)
    encoded, labels = pictures(ROWS, side=4)
    train_jointly(model, encoded[:33], labels[:33], replace(JOINT, epochs=1))
    assert all(bool(tensor.isfinite().all()) for tensor in copy.deepcopy(model).state_dict().values())
