"""A model's folder, which keeps the model that it holds until another one is whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from earlyexit.store import CARD_FILE
from offramp.jobs.calibration import forget_calibration
from offramp.jobs.training import make_folder


@contextmanager
def in_place_of(out: Path) -> Iterator[Path]:
    """A folder to make a model in; its files come in the place of those in `out` where nothing was raised.

    The calibration of the model before goes then, too. Raises InputError where `out` cannot be a folder.
    """
    make_folder(out)
    with TemporaryDirectory(dir=out, prefix=".made-") as made:
        yield Path(made)
        forget_calibration(out)
        files = sorted(Path(made).iterdir(), key=lambda path: path.name == CARD_FILE)  # the card says what the rest is
        for path in files:
            path.replace(out / path.name)
