"""Joint training of the backbone and all exits on the average of their losses (PAME section 5.2).

Tensor legend: B inputs, C outputs.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from earlyexit.engine.cpu import has_bfloat16
from earlyexit.errors import ModelFolderError
from earlyexit.network.boundary import Encoded, takes_images
from earlyexit.network.model import EarlyExitModel
from earlyexit.tasks.base import ValueArray
from earlyexit.training.augmentation import Augmentation
from earlyexit.training.ramps import Descent, FitOptions, after_exits, derived_seed, pack


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOptions(FitOptions):
    """Options of joint training."""

    imitate: bool = False
    """Whether all exits learn from the initial network's outputs rather than from labels."""
    augmentation: Augmentation | None = None
    """Random changes of images in each epoch; None for no changes."""
    backbone_pace: float = 1.0
    """Factor on the learning rate of the backbone, and of the full model's head if it came from a checkpoint. Ramps and
    a new head use the full learning rate."""
    mixed: bool | None = None
    """Whether to train in mixed precision (bfloat16). None: only if the device is faster with it."""
    patience: int | None = None
    """Training stops after this many epochs in a row without a lower loss on held-out rows, and keeps the best weights.
    None: training runs all epochs, on all rows."""
    kept_apart: float = 0.1
    """Share of the rows that are held out to decide when to stop. Used only with `patience`."""


SOFTNESS = 4.0
"""The softness of `Task.imitation_loss`. 4 and 6 gave the fewest mean blocks (ResNet-20 on CIFAR-10, budget 1 %)."""
# The whole model is fine-tuned (PAME section 5.2), which needs smaller steps than heads on a frozen backbone.
JOINT_OPTIONS = JointOptions(epochs=3, batch=32, learning_rate=3e-5, weight_decay=0.01)
JOINT_IMAGES = JointOptions(epochs=15, batch=128, learning_rate=2e-2, weight_decay=5e-4, optimizer="sgd")
"""For image classification."""
JOINT_FINE = JointOptions(
    epochs=16, batch=128, learning_rate=3e-2, weight_decay=5e-4, optimizer="sgd", backbone_pace=0.05
)
"""For image classification with a trained network, whose backbone keeps more accuracy with a lower learning rate."""
JOINT_MAPS = JointOptions(epochs=40, batch=16, learning_rate=2e-3, weight_decay=1e-2)
"""For pose estimation and segmentation, whose losses differ too much in size for SGD with one learning rate."""


def train_jointly(
    model: EarlyExitModel, encoded: Sequence[Encoded], targets: ValueArray, options: JointOptions = JOINT_OPTIONS
) -> None:
    """Train backbone, ramps and head together on the average of all exits' losses, with equal weights.

    Raises ModelFolderError for a backbone without trainable weights, augmentation of inputs that are not images,
    imitation of a network that was loaded without a head, and patches without imitation.
    """
    _check(model, options)
    order, num_held_out = torch.arange(len(encoded)), 0
    if options.patience is not None:
        order = torch.randperm(len(encoded), generator=torch.Generator().manual_seed(options.seed))
        num_held_out = min(len(encoded) - 1, max(1, round(len(encoded) * options.kept_apart)))
    train_K, held_out_K = order[num_held_out:].sort().values, order[:num_held_out].sort().values
    loss = _Loss(model, encoded, targets, options)
    pretrained, new = list(model.backbone.parameters()), list(model.ramps.parameters())
    (pretrained if "head" in model.info.provenance else new).extend(model.head.parameters())
    groups, least_batch = [(new, 1.0), (pretrained, options.backbone_pace)], options.batch // 4
    descent = Descent(groups, len(train_K), options, least_batch=least_batch)  # batch norm needs several inputs
    lowest_loss, epochs_since_best, best = math.inf, 0, model.state_dict()
    with torch.random.fork_rng([model.device] if model.device.type == "cuda" else []):
        for epoch in range(options.epochs):
            torch.manual_seed(derived_seed(options.seed, epoch))
            model.train()
            descent.epoch(lambda positions: loss(train_K[positions], training=True))
            epochs_since_best += 1
            if len(held_out_K) and (held_out_loss := loss.mean(held_out_K)) < lowest_loss:
                lowest_loss, epochs_since_best = held_out_loss, 0
                best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            options.progress("epochs", epoch + 1, options.epochs)
            if epochs_since_best == options.patience:
                break
    model.load_state_dict(best)
    descent.done()
    model.eval()


def _check(model: EarlyExitModel, options: JointOptions) -> None:
    if next(model.backbone.parameters(), None) is None:
        raise ModelFolderError(f"a backbone of the family {model.info.family} cannot be trained: train its ramps only")
    if options.augmentation is not None:
        if not takes_images(model.takes(0)):
            raise ModelFolderError("augmentation needs a model whose inputs are images")
        if options.augmentation.patch and not options.imitate:
            raise ModelFolderError("patched images have no right answers: patches need imitation")
    if options.imitate and "head" not in model.info.provenance:
        raise ModelFolderError("there is nothing to imitate, because the checkpoint has no head: omit --imitate")


class _Loss:
    """The mean loss of all exits on some rows."""

    def __init__(
        self, model: EarlyExitModel, encoded: Sequence[Encoded], targets: ValueArray, options: JointOptions
    ) -> None:
        self.model = model
        self.encoded = encoded
        self.targets_N = torch.from_numpy(targets)
        self.options = options
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False) if options.imitate else None
        self.mixed = _is_faster_mixed(model.device) if options.mixed is None else options.mixed

    @torch.no_grad()
    def mean(self, rows: Tensor) -> float:
        """Returns the mean loss on rows that are not trained."""
        self.model.eval()
        batches = torch.split(rows, self.options.batch)
        return sum(float(self(batch, training=False)) * len(batch) for batch in batches) / len(rows)

    def __call__(self, rows: Tensor, *, training: bool) -> Tensor:
        model, task = self.model, self.model.task
        values, layout = pack([self.encoded[row] for row in rows.tolist()], model.device)
        targets_B = self.targets_N[rows]
        if training and self.options.augmentation is not None:
            _, height, width, _ = values[0].shape
            moves = self.options.augmentation.draw(len(values[0]), height, width)
            values = (self.options.augmentation.patched(moves.of_images(values[0])),)
            targets_B = task.moved(targets_B, moves)
        targets_B = targets_B.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=self.mixed):
            teacher_BC: Tensor | None = None
            if self.teacher is not None:
                with torch.no_grad():
                    hidden = self.teacher.run_blocks(0, model.num_blocks, values, layout)[0]
                    teacher_BC = self.teacher.head(hidden, layout)
            exits = after_exits(model, values, layout)
            outputs = [model.exit_head(block)(after[0], layout) for block, after in exits]  # without temperatures
        if teacher_BC is not None:
            return torch.stack([task.imitation_loss(each, teacher_BC, SOFTNESS) for each in outputs]).mean()
        return torch.stack([task.training_loss(each, targets_B) for each in outputs]).mean()


def _is_faster_mixed(device: torch.device) -> bool:
    """Returns whether a device is faster in mixed precision, such as a CPU with AMX."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return device.type == "cpu" and has_bfloat16() is True
