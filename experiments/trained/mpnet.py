"""all-mpnet-base-v2 (12 blocks of 768) with ramps on the frozen backbone, for CLINC150's questions.

    OFFRAMP_DATA=... python -m experiments.trained.mpnet [--ramp-style mlp] [--dtype float32]

Learns, calibrates (budget 1 %, confidence 90 %) and reports on unseen rows; the model stays in runs/mpnet. The rows are
few, for the backbone has 110 million parameters: 40 of each intent, all of val, 2,000 of test. What heads look at is
kept beside the model, so that another style takes seconds. Minutes of processor time: about 3 in bfloat16 (AMX), 8 in
float32. Seed 0. Extra `mpnet`.
"""

from __future__ import annotations

import hashlib
from argparse import ArgumentParser
from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor

from earlyexit.codecs import find_codec
from earlyexit.data.rows import LabelledRows, read_labelled
from earlyexit.network.boundary import FloatName
from earlyexit.network.checkpoint import RampOptions, add_ramps, copy_tokenizer, load_pretrained
from earlyexit.network.layers import reorder_linears
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.store import load_model, save_model
from earlyexit.ramps import RampStyle
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import TrainOptions, exit_features, train_ramps
from experiments.data import RUNS, require_data
from experiments.kit import show
from offramp.commands.calibrate import CalibrateJob, calibrate
from offramp.commands.progress import progress_bars, provenance
from offramp.commands.recording import Outputs, join_records
from offramp.commands.train import resolve_backbone
from optimizer.calibration_file import CalibrationCard
from optimizer.risk import Guarantee
from profiles.records import ExitRecords

# What exit heads look at, of a frozen backbone, kept in files: heads are then trained and judged in seconds.

if TYPE_CHECKING:
    from earlyexit.codecs.base import Codec
    from earlyexit.network.model import EarlyExitModel

BATCH = 64


def features_of(
    model: EarlyExitModel, rows: LabelledRows, codec: Codec[Any], path: Path, dtype: FloatName
) -> dict[int, Tensor]:
    """`exit_features` of rows, float32 though kept in half precision; read from the file if it is of these texts.

    The file does not know of which backbone it is: it lies beside one model.
    """
    texts = hashlib.sha256("\0".join(rows.texts).encode()).hexdigest()
    if path.is_file():
        kept = torch.load(path, weights_only=True)
        if (kept["texts"], kept["dtype"]) == (texts, dtype):
            return {block: feature.float() for block, feature in kept["features"].items()}
    computing = deepcopy(model).to(getattr(torch, dtype))
    reorder_linears(computing.backbone)
    with progress_bars() as progress:
        found = exit_features(computing, rows.encode(codec), batch=BATCH, progress=progress)
    features = {block: feature.half() for block, feature in found.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"texts": texts, "dtype": dtype, "features": features}, path)
    return {block: feature.float() for block, feature in features.items()}


@torch.inference_mode()
def outputs_of(model: EarlyExitModel, features: Mapping[int, Tensor]) -> Outputs:
    """All rows, and every exit's outputs of them with its temperature."""
    rows = range(len(next(iter(features.values()))))
    temperatures = model.temperatures_E
    return rows, {
        block: model.exit_head(block).classify(each).float() / temperatures[block] for block, each in features.items()
    }


FOLDER = RUNS / "mpnet" / "clinc150"
"""Where the model stays."""
Parts = dict[str, LabelledRows]
"""`learn`, `validate` and `unseen`: no row is in two of them."""
CLINC150 = "clinc150/data_full.json"
PER_INTENT, UNSEEN_QUESTIONS = 40, 2000
GUARANTEE = Guarantee(budget=0.01, confidence=0.90)


def parts() -> Parts:
    """The rows that are used."""
    learn, validate, unseen = (read_labelled(require_data(CLINC150), part=part) for part in ("train", "val", "test"))
    return {
        "learn": _first_of_each(learn, PER_INTENT),
        "validate": validate,
        "unseen": unseen.select(Random(0).sample(range(len(unseen)), UNSEEN_QUESTIONS)),
    }


def _first_of_each(rows: LabelledRows, number: int) -> LabelledRows:
    """So many rows of every label, those that come first."""
    seen, kept = Counter[str](), list[int]()
    for row, label in enumerate(rows.labels):
        seen[label] += 1
        if seen[label] <= number:
            kept.append(row)
    return rows.select(kept)


def prepare(
    *, style: RampStyle = "light", dtype: FloatName = "bfloat16", seed: int = 0
) -> tuple[CalibrationCard, ExitRecords]:
    """Train, calibrate, and tell what every exit answers to unseen rows; the model stays in its folder."""
    rows_of, folder = parts(), FOLDER
    model = _untrained(rows_of["learn"], folder, style, dtype, seed)
    codec = find_codec(model.info.codec, folder)
    targets = {part: rows.targets(model.task, codec) for part, rows in rows_of.items()}
    features = {
        part: features_of(model, rows, codec, folder / f"features-{part}.pt", dtype) for part, rows in rows_of.items()
    }
    train_ramps(model, (), targets["learn"], TrainOptions(seed=seed), features=features["learn"])
    save_model(model, folder)
    job = CalibrateJob(guarantee=GUARANTEE, dtype=dtype, seed=seed, source=CLINC150)
    card, _ = calibrate(folder, rows_of["validate"], job, outputs=[outputs_of(model, features["validate"])])
    unseen = outputs_of(load_model(folder), features["unseen"])  # with the temperatures that were found
    return card, join_records([unseen], card.policy, model.task, targets["unseen"])


def _untrained(rows: LabelledRows, folder: Path, style: RampStyle, dtype: FloatName, seed: int) -> EarlyExitModel:
    place = resolve_backbone("mpnet")
    pretrained, family = load_pretrained(place)
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(place, folder)
    return add_ramps(
        pretrained,
        name="mpnet-clinc150",
        family=family,
        codec={"name": "text", "max_length": pretrained.backbone.max_length},
        task=LabelTask(rows.label_names),
        ramps=RampOptions(style=style),
        provenance=provenance(backbone=place, data="clinc150", rows=len(rows), dtype=dtype, seed=seed),
    )


def main() -> None:
    """Prepare and print."""
    parser = ArgumentParser(prog="python -m experiments.trained.mpnet", description=__doc__)
    parser.add_argument("--ramp-style", choices=("light", "mlp", "pooler"), default="light")
    parser.add_argument("--dtype", choices=get_args(FloatName), default="bfloat16")
    options = parser.parse_args()
    card, records = prepare(style=options.ramp_style, dtype=options.dtype)
    outcome = records.outcome(card.thresholds)
    assert records.true_losses_NE is not None
    right_E = 1 - records.true_losses_NE.mean(0)
    exits = (*records.ramps, records.num_blocks - 1)
    rows = [
        (str(block), f"{right:.4f}", _told(card.thresholds.get(block)), f"{outcome.survival[block]:.3f}")
        for block, right in zip(exits, right_E, strict=True)
    ]
    title = f"{len(records)} unseen rows, {options.ramp_style} ramps"
    show(title, ("block", "accuracy", f"leave at {card.policy}", "reach it"), rows)
    print(
        f"agreement {outcome.agreement:.4f}, accuracy {outcome.accuracy:.4f} (full model {outcome.full_accuracy:.4f}), "
        f"{outcome.mean_blocks:.2f} of {outcome.num_blocks} blocks"
    )


def _told(threshold: float | None) -> str:
    return "-" if threshold is None else f"{threshold:.4f}"


if __name__ == "__main__":
    main()
