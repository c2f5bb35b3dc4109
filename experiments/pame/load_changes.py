"""CIFAR-10 becoming dark, noisy or clear again: what a ResNet-32's ramps and its end say, recorded once.

    OFFRAMP_DATA=... python -m experiments.pame.load_changes

The published network is frozen; ramps after all of its blocks but the last learn from its own answers on images of the
train part, on a grid of means and with a hidden layer. Of 5,000 test images everything is recorded three times: clear,
dark and noisy. Streams are put together of these. Kept in runs/pame/load_changes.npz. Minutes: 5 on one core.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from earlyexit.dataset import read_labelled
from experiments.apparate import images
from experiments.apparate.images import TEST, TRAIN, Images, darker, noisy
from experiments.data import RUNS, require_data
from offramp.jobs.progress import progress_bars
from offramp.jobs.provenance import provenance
from profiles.records import ExitRecords

NEEDS = (TEST, TRAIN, "resnet_cifar10/resnet32.th")
"""Files of OFFRAMP_DATA."""
FILE = RUNS / "pame" / "load_changes.npz"
DARKNESS = 0.6
NOISE = 0.15
"""Of the strongest that `experiments.apparate.images` makes."""
KINDS: Mapping[str, Callable[[Images, np.random.Generator], Images]] = {
    "clear": lambda image, _: image,
    "dark": lambda image, _: darker(image, DARKNESS),
    "noisy": lambda image, rng: noisy(image, NOISE, rng),
}
"""What is done to an image; records hold all images of the first kind, then all of the next."""
EPOCHS = 100
"""1,200 steps, as the ramps of Apparate's streams take (experiments/apparate/recording.py)."""
SEED = 0


def recorded(path: Path = FILE) -> ExitRecords:
    """All images of all kinds, with their true labels; made where they are not there."""
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        record().save(path)
    return ExitRecords.load(path)


def record() -> ExitRecords:
    """Train ramps, and see what all of them say; ends with a sentence where the data is absent."""
    from earlyexit.codecs.image import ImageCodec
    from earlyexit.train import TrainOptions, exit_outputs, train_ramps
    from experiments.apparate.recording import cifar_network, with_ramps
    from offramp.jobs.recording import records_from_outputs

    codec = ImageCodec(height=images.SIDE, width=images.SIDE)
    rng = np.random.default_rng(SEED)
    test = images.cifar_images(TEST)
    learn = codec.encode(list(images.known_images(rng)))
    model = with_ramps(cifar_network(), "mlp")
    labels = read_labelled(require_data(TEST)).labels
    truth_N = np.unique(np.array(labels), return_inverse=True)[1]  # classes in alphabetical order, as the network's
    with progress_bars() as progress:
        options = TrainOptions(epochs=EPOCHS, imitate=True, seed=SEED, progress=progress)
        train_ramps(model, learn, np.zeros(len(learn), dtype=np.int64), options)
        shown = [change(image, rng) for change in KINDS.values() for image in test]
        outputs = exit_outputs(model, codec.encode(shown), progress=progress)
    facts = provenance(kinds=list(KINDS), darkness=DARKNESS, noise=NOISE, seed=SEED)
    return records_from_outputs(outputs, "confidence", model.task, np.tile(truth_N, len(KINDS)), provenance=facts)


def of_kind(records: ExitRecords, kind: str) -> ExitRecords:
    """All images, as of that kind."""
    size, index = len(records) // len(KINDS), list(KINDS).index(kind)
    return records.subset(np.arange(index * size, (index + 1) * size))


if __name__ == "__main__":
    found = recorded()
    for kind in KINDS:
        part = of_kind(found, kind)
        print(f"{kind}: last ramp agrees {1 - part.losses_NR[:, -1].mean():.1%}")
