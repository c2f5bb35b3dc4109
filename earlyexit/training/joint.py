"""Joint training of the backbone and all exits on the average of their losses (PAME section 5.2).

Tensor legend: B inputs, C outputs.
"""

from __future__ import annotations

import copy
import hashlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from earlyexit.engine.cpu import has_bfloat16
from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import Encoded
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.training.augmentation import Augmentation
from earlyexit.training.ramps import Descent, TrainOptions, draw, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOptions(TrainOptions):
    """Options of joint training. `imitate`: all exits learn from the original network's outputs, not from labels."""

    augmentation: Augmentation | None = None
    """Random changes of images each time they are used; None for no changes."""
    optimizer: str = "adamw"
    """A name of `OPTIMIZERS`."""
    backbone_pace: float = 1.0
    """Factor on the learning rate of the backbone, and of the full model's head if it came from a checkpoint. Ramps and
    a new head use the full learning rate."""
    mixed: bool | None = None
    """Whether products are computed in bfloat16; None: if the device is faster with it."""
    patience: int | None = None
    """Epochs in a row without a better loss on held-out rows after which training stops; the best weights are kept.
    None: all epochs are trained, on all rows."""
    kept_apart: float = 0.1
    """Share of the rows that is held out to decide when to stop; only with `patience`."""
    saved: Path | None = None
    """A checkpoint file, written after each epoch, from which an interrupted run continues."""


# The whole model learns slower, in smaller steps, than heads on a frozen backbone (PAME section 5.2 fine-tunes).
JOINT_OPTIONS = JointOptions(epochs=3, batch=32, learning_rate=3e-5, weight_decay=0.01)
JOINT_IMAGES = JointOptions(epochs=15, batch=128, learning_rate=2e-2, weight_decay=5e-4, optimizer="sgd")
"""For labels of images."""
JOINT_FINE = JointOptions(
    epochs=16, batch=128, learning_rate=3e-2, weight_decay=5e-4, optimizer="sgd", backbone_pace=0.05
)
"""For labels of images, with a trained network. ResNet-32 on CIFAR-10, with 10,000 of its 50,000 training images: the
accuracy of the last exit falls from 92.3 % to 91.7 %, and to 90.5 % with one learning rate for all."""
JOINT_MAPS = JointOptions(epochs=40, batch=16, learning_rate=2e-3, weight_decay=1e-2)
"""For heatmaps and maps of classes, whose losses differ too much in size for SGD with one learning rate."""


log = logging.getLogger(__name__)
NOT_OF_THE_RUN = ("progress", "saved")
"""Options that do not influence the weights."""


def fingerprint(
    weights: Mapping[str, Tensor], task: Task, encoded: Iterable[Encoded], targets: ValueArray, options: JointOptions
) -> str:
    """Returns a digest of all that determines a run: initial weights, task, rows, right answers, and options."""
    digest = hashlib.sha256()
    chosen = {each.name: getattr(options, each.name) for each in fields(options) if each.name not in NOT_OF_THE_RUN}
    digest.update(repr(sorted(chosen.items())).encode())
    digest.update(repr(task.spec()).encode())
    for name, tensor in weights.items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    for each in encoded:
        for values in each.tensors:
            digest.update(np.ascontiguousarray(values).data)
    digest.update(np.ascontiguousarray(targets).data)
    return digest.hexdigest()


def saved_state(path: Path, run: str, device: torch.device) -> dict[str, Any] | None:
    """Returns the state that the run with this fingerprint saved; None if there is none."""
    if not path.is_file():
        return None
    try:
        state = torch.load(path, map_location=device, weights_only=True)
    except Exception as error:  # torch's reader and pickle's fail in ways of their own
        log.warning("%s cannot be read, training begins anew: %s", path, error)
        return None
    if not isinstance(state, dict) or state.get("run") != run:
        log.warning("%s is of another training run, this one begins anew", path)
        return None
    return state


def train_jointly(
    model: EarlyExitModel, encoded: Sequence[Encoded], targets: ValueArray, options: JointOptions = JOINT_OPTIONS
) -> None:
    """Train backbone, ramps and head together on the average of all exits' losses, with equal weights.

    Raises ModelFolderError for a backbone without trainable weights, for augmentation of inputs that are no images, for
    imitation of a network that came without a head, and for patches without imitation.
    """
    if next(model.backbone.parameters(), None) is None:
        raise ModelFolderError(f"a backbone of the family {model.info.family} stays as it is: train its ramps alone")
    if options.augmentation is not None:
        options.augmentation.check(model.boundary(-1))
        if options.augmentation.patch and not options.imitate:
            raise ModelFolderError("right answers of patched images are not known: patch only where exits imitate")
    if options.imitate and "head" not in model.info.provenance:
        raise ModelFolderError(
            "exits imitate the network as it came, and this one came without a head: leave --imitate out"
        )
    run = _Run(model, encoded, targets, options)
    run.begin()
    devices = [model.device] if model.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        while run.epochs_done < options.epochs and not run.stopped:
            run.epoch()
    run.finish()


class _Run:
    """One training run and its state after each epoch."""

    def __init__(
        self, model: EarlyExitModel, encoded: Sequence[Encoded], targets: ValueArray, options: JointOptions
    ) -> None:
        self.model = model
        self.encoded = encoded
        self.targets_N = torch.from_numpy(targets)
        self.options = options
        self.name = fingerprint(model.state_dict(), model.task, encoded, targets, options) if options.saved else ""
        order, num_apart = torch.arange(len(encoded)), 0
        if options.patience is not None:
            order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(options.seed))
            num_apart = min(len(encoded) - 1, max(1, round(len(encoded) * options.kept_apart)))
        self.learned_K, self.apart_K = order[num_apart:].sort().values, order[:num_apart].sort().values
        self.teacher = copy.deepcopy(model).eval() if options.imitate else None
        self.mixed = _is_faster_mixed(model.device) if options.mixed is None else options.mixed
        came, new = list(model.backbone.parameters()), list(model.ramps.parameters())
        (came if "head" in model.info.provenance else new).extend(model.head.parameters())
        self.descent = Descent(
            new,
            len(self.learned_K),
            options,
            optimizer=options.optimizer,
            least_batch=options.batch // 4,  # a norm's statistics of one or two inputs are none
            slower=came,
            pace=options.backbone_pace,
        )
        self.epochs_done = 0
        self.least: float | None = None
        self.worse = 0
        """Epochs since the best one."""
        self.best: dict[str, Tensor] | None = None

    @property
    def stopped(self) -> bool:
        """Whether `patience` is exhausted."""
        return self.options.patience is not None and self.worse >= self.options.patience

    def begin(self) -> None:
        """Continue an interrupted run, if there is one."""
        if self.teacher is not None:
            self.teacher.requires_grad_(False)
        if self.options.saved is None:
            return
        state = saved_state(self.options.saved, self.name, self.model.device)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.descent.take_up(state["descent"])
            self.epochs_done, self.least, self.worse = state["epochs_done"], state["least"], state["worse"]
            self.best = state["best"]

    def epoch(self) -> None:
        """Train one pass over the rows. Its random numbers depend on the seed and the number of the epoch only."""
        torch.manual_seed(draw(self.options.seed, self.epochs_done))
        self.model.train()
        self.descent.epoch(lambda at: self._loss(self.learned_K[at], learning=True))
        self.epochs_done += 1
        if len(self.apart_K):
            self._watch()
        if self.options.saved is not None:
            half = self.options.saved.with_suffix(".part")
            state = {
                "run": self.name,
                "model": self.model.state_dict(),
                "descent": self.descent.state(),
                "epochs_done": self.epochs_done,
                "least": self.least,
                "worse": self.worse,
                "best": self.best,
            }
            torch.save(state, half)
            half.replace(self.options.saved)  # at once, so that an interruption leaves the previous state
        self.options.progress("epochs", self.epochs_done, self.options.epochs)

    def finish(self) -> None:
        """Put the model into inference mode, with the best weights."""
        if self.best is not None:
            self.model.load_state_dict(self.best)
        self.descent.done()
        self.model.eval()

    @torch.no_grad()
    def _watch(self) -> None:
        """Compare the loss on the held-out rows with the best loss so far."""
        self.model.eval()
        parts = torch.split(self.apart_K, self.options.batch)
        loss = sum(float(self._loss(rows, learning=False)) * len(rows) for rows in parts) / len(self.apart_K)
        if self.least is None or loss < self.least:
            self.least, self.worse = loss, 0
            self.best = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        else:
            self.worse += 1

    def _loss(self, rows: Tensor, *, learning: bool) -> Tensor:
        model, task = self.model, self.model.task
        values, layout = pack([self.encoded[row] for row in rows.tolist()], model.device)
        targets_B = self.targets_N[rows]
        if learning and self.options.augmentation is not None:
            _, height, width, _ = values[0].shape
            moves = self.options.augmentation.draw(len(values[0]), height, width)
            values = (self.options.augmentation.patched(moves.of_images(values[0])),)
            targets_B = task.moved(targets_B, moves)
        targets_B = targets_B.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.mixed):
            full: Tensor | None = None
            if self.teacher is not None:
                with torch.no_grad():
                    full = self.teacher.head(self.teacher.run_blocks(0, model.num_blocks, values, layout)[0], layout)
            outputs = []  # of every exit, first to last, without temperatures
            for block in range(model.num_blocks):
                values = model.run_blocks(block, block + 1, values, layout)
                if block in model.ramp_indices or block == model.num_blocks - 1:
                    outputs.append(model.exit_head(block)(values[0], layout))
        if full is not None:
            return torch.stack([task.imitation_loss(each, full, keep_scale=True) for each in outputs]).mean()
        return torch.stack([task.training_loss(each, targets_B) for each in outputs]).mean()


def _is_faster_mixed(device: torch.device) -> bool:
    """Whether a device is faster in mixed precision.

    On a CPU with AMX a training step of ResNet-32 takes 3.0 ms per image in float32 and 1.9 ms mixed (batch 128).
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and has_bfloat16()
