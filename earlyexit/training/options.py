"""How a whole model is trained."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from earlyexit.train import TrainOptions
from earlyexit.training.augmentation import Augmentation


@dataclass(frozen=True, slots=True, kw_only=True)
class JointOptions(TrainOptions):
    """`imitate`: all exits learn of the outputs of the network as it came, not of the labels."""

    augmentation: Augmentation | None = None
    """How images are changed each time they are seen; None: not at all."""
    optimizer: str = "adamw"
    """Of `OPTIMIZERS`."""
    backbone_pace: float = 1.0
    """Share of the learning rate at which the backbone learns, and the full model's head where a checkpoint brought it;
    ramps and a new head learn at all of it."""
    mixed: bool | None = None
    """Whether products are computed in bfloat16; None: where the device is faster at them."""
    patience: int | None = None
    """Epochs in a row that may bring no better loss on rows kept apart; the best one's weights are kept then. None:
    all epochs are trained, on all rows."""
    kept_apart: float = 0.1
    """Share of the rows that only says when to stop, where `patience` is given."""
    saved: Path | None = None
    """A file that holds how far training is, after each epoch, until it is done: an interrupted one goes on there."""


# The whole model learns slower, in smaller steps, than heads on a frozen backbone (PAME section 5.2 fine-tunes).
JOINT_OPTIONS = JointOptions(epochs=3, batch=32, learning_rate=3e-5, weight_decay=0.01)
JOINT_IMAGES = JointOptions(epochs=15, batch=128, learning_rate=2e-2, weight_decay=5e-4, optimizer="sgd")
"""For labels of images."""
JOINT_FINE = JointOptions(
    epochs=16, batch=128, learning_rate=3e-2, weight_decay=5e-4, optimizer="sgd", backbone_pace=0.05
)
"""The same for a network that came trained. ResNet-32, CIFAR-10, 10,000 of the 50,000 images that it had learned from:
its last exit, 92.3 % right, comes to 90.5 % where all learns at one pace, to 91.7 % so."""
JOINT_MAPS = JointOptions(epochs=40, batch=16, learning_rate=2e-3, weight_decay=1e-2)
"""For heatmaps and maps of classes, whose losses differ too much in size for equal steps of SGD."""
