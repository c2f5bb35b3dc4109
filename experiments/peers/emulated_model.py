"""What peers compute with: the stock model; or an emulated accelerator, which is given time and knows no answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from earlyexit.network.store import read_card
from experiments.peers.bodies import Prediction
from experiments.peers.options import ServerOptions


class Predicts(Protocol):
    """A model that answers a batch of texts."""

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction per text, all computed as one batch."""
        ...


class EmulatedModel:
    """Every batch takes the time that a profile says; every answer is the first label, by the last block."""

    def __init__(
        self,
        options: ServerOptions,
        *,
        now_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Raise ModelFolderError where the options' folder holds no model."""
        card = read_card(options.model)
        self._answer = Prediction(label=card.label_names[0], score=1.0, exit=card.num_blocks - 1)
        self._batch_s = options.batch_s
        self._now_s = now_s
        self._sleep = sleep
        self._free_s = -math.inf

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """A batch larger than the profile's largest takes as many times as long as it is larger."""
        known = min(len(texts), len(self._batch_s))
        started_s = max(self._free_s, self._now_s())
        self._free_s = started_s + self._batch_s[known - 1] * len(texts) / known
        self._sleep(self._free_s - self._now_s())
        return [self._answer] * len(texts)


def load_model(options: ServerOptions) -> Predicts:
    """What these options say, ready; torch is loaded only where it computes. Raises ModelFolderError."""
    if options.batch_s:
        return EmulatedModel(options)
    from experiments.peers.stock import StockModel

    return StockModel.load(options)
