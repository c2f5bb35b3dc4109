"""The workloads of the comparison: a model folder, texts, exits, and an SLO.

- `clinc150`: CLINC150's test questions on MiniLM-L6, with ramps and thresholds of `experiments.trained` (budget 1 %).
  Exits are computed, not recorded. A text has about 11 tokens.
- `mpnet`: the same questions on all-mpnet-base-v2, 12 blocks of 768 (the extra `mpnet`). Exits are computed.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from experiments import trained
from experiments.data import RUNS
from experiments.peers.client import write_inputs
from offramp.commands.folders import read_calibration
from optimizer.calibration.calibration_file import CALIBRATION_FILE, RECORDS_FILE
from optimizer.calibration.thresholds import Guarantee
from optimizer.plans.plan import PolicySpec
from profiles.records import ExitRecords

Name = Literal["clinc150", "mpnet"]
FOLDER = RUNS / "peers"
GUARANTEE = Guarantee(budget=0.01, confidence=0.90)
Processors = namedtuple("Processors", ("workers", "threads", "batch_limit"))
"""The batches that the processors compute at once, and the threads and the largest size of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its exits, and texts to send."""

    name: str
    folder: Path
    texts: tuple[str, ...]
    labels: tuple[str, ...]
    """True labels."""
    policy: PolicySpec
    records: ExitRecords
    """Records of similar inputs, on which the planner relies."""

    @property
    def thresholds(self) -> dict[int, float]:
        """Thresholds by ramp."""
        assert isinstance(self.policy.thresholds, dict)
        return self.policy.thresholds

    def draw(self, num_inputs: int, seed: int) -> list[int]:
        """Returns the rows of the texts that are sent, in order."""
        drawn: list[int] = np.random.default_rng(seed).integers(0, len(self.texts), num_inputs).tolist()
        return drawn

    def write(self, drawn: Sequence[int], path: Path) -> Path:
        """Writes these texts in the client's format."""
        return write_inputs(path, [self.texts[row] for row in drawn])


def _of(name: Name) -> Workload:
    folder = trained.TRAINED[name].folder
    if not (folder / CALIBRATION_FILE).is_file():
        trained.run(name)
    test = trained.TRAINED[name].parts()[2]
    return Workload(
        name=name,
        folder=folder,
        texts=test.texts,
        labels=test.labels,
        policy=read_calibration(folder).policy_spec(),
        records=ExitRecords.load(folder / RECORDS_FILE),
    )


WORKLOADS: Mapping[Name, Callable[[], Workload]] = {
    "clinc150": partial(_of, "clinc150"),
    "mpnet": partial(_of, "mpnet"),
}
"""Functions that return a workload. They train a missing model (minutes), and exit the process without data."""
