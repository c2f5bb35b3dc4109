"""Model folders of experiments: random weights behind the packaged tokenizer, and what is trained once and kept."""

from __future__ import annotations

from pathlib import Path

from earlyexit.data.rows import LabelledRows
from earlyexit.network.checkpoint import copy_tokenizer, random_model
from earlyexit.network.store import save_model
from earlyexit.tasks.label import LabelTask
from offramp.commands.calibrate import CalibrateJob, calibrate
from offramp.commands.progress import progress_bars
from offramp.commands.recording import record_exits
from offramp.commands.train import resolve_backbone, train
from offramp.commands.train_job import TrainJob
from optimizer.calibration_file import CalibrationCard
from profiles.outcome import ExitOutcome

VOCABULARY = 30522
"""Of the packaged tokenizer."""
LABELS = ("negative", "positive")


def tiny_model(folder: Path, *, name: str, num_blocks: int, hidden_size: int, max_length: int = 128) -> Path:
    """One head, a ramp after every block but the last, two labels."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "num_blocks": num_blocks,
        "num_heads": 1,
        "intermediate_size": hidden_size,
        "max_length": max_length,
    }
    save_model(random_model(sizes, name=name, task=LabelTask(LABELS)), folder)
    copy_tokenizer(resolve_backbone("minilm"), folder)
    return folder


def costless_model(folder: Path) -> Path:
    """One tiny block: what is left is the price of everything around a model."""
    return tiny_model(folder, name="costless", num_blocks=1, hidden_size=16)


def finished(
    folder: Path, job: TrainJob, calibration: CalibrateJob, parts: tuple[LabelledRows, LabelledRows, LabelledRows]
) -> tuple[CalibrationCard, ExitOutcome]:
    """Train unless the folder holds the model, calibrate, and see what unseen rows do.

    `parts`: rows to learn from, to calibrate with, and unseen ones.
    """
    learn, validate, unseen = parts
    if not (folder / "model.json").is_file():
        with progress_bars() as progress:
            train(job, learn, folder, progress=progress)
    card, _ = calibrate(folder, validate, calibration)
    return card, record_exits(folder, unseen, card.policy, dtype=calibration.dtype).outcome(card.thresholds)
