from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
import torch

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.network.boundary import Encoded
from earlyexit.network.checkpoint import RampOptions, random_model
from earlyexit.network.model import EarlyExitModel, SegmentRunner
from earlyexit.policies.threshold import ConfidencePolicy, EntropyPolicy
from earlyexit.tasks.label import LabelTask
from tests.earlyexit.network.chains import chained, inputs_for
from tests.earlyexit.network.cut_runs import CutRun, compare

NUM_BLOCKS = 4
RAMPS = (0, 1, 2)
SIZES = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_blocks": NUM_BLOCKS,
    "num_heads": 4,
    "intermediate_size": 64,
    "max_length": 32,
}


@pytest.fixture(scope="module")
def model() -> EarlyExitModel:
    torch.set_num_threads(1)
    return random_model(SIZES, task=LabelTask(("a", "b", "c", "d")))


@pytest.fixture(scope="module")
def encoded() -> list[Encoded]:
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, size=rng.integers(1, 20)).astype(np.int32) for _ in range(90)]
    return [Encoded(len(token_ids), (token_ids,)) for token_ids in rows]


def cut_run(model: EarlyExitModel) -> CutRun:
    return CutRun(model, EntropyPolicy(1.35), RAMPS, model)


@pytest.mark.parametrize("cuts", [*((k,) for k in range(1, 4)), *combinations(range(1, 4), 2), (1, 2, 3)], ids=str)
def test_a_chain_of_cuts_fused_at_random_answers_as_the_uncut_model(
    model: EarlyExitModel, encoded: list[Encoded], cuts: tuple[int, ...]
) -> None:
    reference = cut_run(model).run(encoded, (), seed=0)
    assert len({answer.exit for answer in reference[0].values()}) > 1, "some leave early, some do not"
    labels, both, apart = compare(reference, cut_run(model).run(encoded, cuts, seed=1))
    assert (labels, both) == (1.0, 1.0)
    assert apart < 1e-4


def test_the_comparison_sees_a_wrong_answer(model: EarlyExitModel, encoded: list[Encoded]) -> None:
    reference = cut_run(model).run(encoded, (), seed=0)
    never = CutRun(model, EntropyPolicy(-1.0), RAMPS, model).run(encoded, (2,), seed=1)
    _, both, _ = compare(reference, never)
    assert both < 1.0


@pytest.fixture(scope="module")
def resnet() -> EarlyExitModel:
    """Three blocks, each of another shape."""
    torch.set_num_threads(1)
    return random_model(
        {"depth": 8, "side": 12},
        family="resnet",
        codec={"name": "image", "height": 12, "width": 12},
        task=LabelTask(("a", "b", "c")),
        ramps=RampOptions(style="mlp", pooling="grid"),
    )


@pytest.fixture(scope="module")
def images() -> list[Encoded]:
    pixels = np.random.default_rng(0).integers(0, 256, (70, 1, 12, 12, 3), dtype=np.uint8)
    return [Encoded(1, (each,)) for each in pixels]


@pytest.mark.parametrize(
    ("backend", "ramps", "all_cuts"),
    [("torch", (0, 1), [(), (1,), (2,), (1, 2)]), ("onnx", (1,), [(), (2,)])],  # every other segment is an export more
    ids=["torch", "onnx"],
)
def test_images_are_answered_alike_wherever_a_resnet_is_cut(
    resnet: EarlyExitModel,
    images: list[Encoded],
    backend: str,
    ramps: tuple[int, ...],
    all_cuts: list[tuple[int, ...]],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    runner: SegmentRunner = resnet
    if backend == "onnx":
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
        runner = OnnxSegments(resnet, cache=tmp_path_factory.mktemp("onnx"), num_threads=1)
    policy = ConfidencePolicy(0.38)
    reference = CutRun(resnet, policy, ramps, resnet).run(images, (), seed=0)
    assert {answer.exit for answer in reference[0].values()} == {*ramps, 2}
    for seed, cuts in enumerate(all_cuts):
        labels, both, apart = compare(reference, CutRun(resnet, policy, ramps, runner).run(images, cuts, seed))
        assert (labels, both) == (1.0, 1.0), cuts
        assert apart < 1e-4, cuts


def test_a_chain_of_networks_answers_alike_wherever_it_is_cut() -> None:
    network = chained(2, 2)
    inputs, policy = inputs_for(network, count=40), ConfidencePolicy(0.6)
    encoded, *others = inputs.of_network
    run = CutRun(network, policy, network.ramp_indices, network)
    reference = run.run(encoded, (), seed=0, others=others)
    assert {answer.exit for answer in reference[0].values()} >= {0, 1, 3}
    for seed, cuts in enumerate([(1,), (2,), (3,), (1, 3)]):
        labels, both, apart = compare(reference, run.run(encoded, cuts, seed, others=others))
        assert (labels, both) == (1.0, 1.0), cuts
        assert apart < 1e-4, cuts
