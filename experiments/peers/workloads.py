"""What the servers are compared on: a model folder, texts, exits, and the latency that is asked for.

- `clinc150`: CLINC150's test questions on MiniLM-L6, ramps and thresholds as `experiments.trained` makes them
  (budget 1 %): exits are really decided by what is really computed. About 11 tokens a text.
- `mpnet`: the same questions on all-mpnet-base-v2, 12 blocks of 768 (the extra `mpnet`):
  exits are really computed.
- `bert-base`: a network of BERT-base's size with random weights: the compute is real, the decisions are those recorded
  of a 12-exit BERT-base on SST-2 dev, at an entropy of 0.4 (E3 section 5). The texts are SST-2 dev's, about 25 tokens;
  which record goes with which text is arbitrary, because the records' order is not the file's.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from earlyexit.data.rows import LabelledRows
from earlyexit.network.store import CARD_FILE
from experiments import trained
from experiments.data import RUNS, require_data
from experiments.models import VOCABULARY
from experiments.peers.client import write_inputs
from experiments.recorded_exits import bert12_sst2
from offramp.client.protocol import predict_body
from offramp.commands.calibrated import read_calibration
from offramp.commands.packaged import resolve_backbone
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE
from optimizer.plan import PolicySpec
from optimizer.risk import Guarantee
from profiles.records import ExitRecords

Name = Literal["clinc150", "mpnet", "bert-base"]
FOLDER = RUNS / "peers"
SST2_DEV = "sst2/dev.tsv"
ENTROPY = 0.4
LONGEST = 512
"""Tokens."""
GUARANTEE = Guarantee(budget=0.01, confidence=0.90)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, its exits, and texts to send."""

    name: str
    folder: Path
    texts: tuple[str, ...]
    labels: tuple[str, ...] | None
    """True labels, where answers can be right or wrong."""
    keys: tuple[str, ...] | None
    """Names of the inputs, by which recorded exits are looked up."""
    policy: PolicySpec
    records: ExitRecords
    """Of inputs like these: what the planner expects."""
    truncate: bool = False
    """Whether texts may be cut to what the model takes."""

    @property
    def thresholds(self) -> dict[int, float]:
        """By ramp."""
        assert isinstance(self.policy.thresholds, dict)
        return self.policy.thresholds

    def draw(self, num_inputs: int, seed: int) -> list[int]:
        """Which texts are sent, in their order."""
        drawn: list[int] = np.random.default_rng(seed).integers(0, len(self.texts), num_inputs).tolist()
        return drawn

    def write(self, drawn: Sequence[int], path: Path) -> Path:
        """These texts, as a client reads them."""
        keys = None if self.keys is None else [self.keys[row] for row in drawn]
        return write_inputs(path, [self.texts[row] for row in drawn], keys)

    def bodies(self, drawn: Sequence[int], inputs_per_request: int) -> list[bytes]:
        """The requests for these texts, as JSON; one text is sent alone."""
        texts = [self.texts[row] for row in drawn]
        asked: Sequence[object] = (
            texts
            if inputs_per_request == 1
            else [texts[first : first + inputs_per_request] for first in range(0, len(texts), inputs_per_request)]
        )
        return [json.dumps(predict_body(each, truncate=self.truncate)).encode() for each in asked]


def _of(name: Name) -> Workload:
    folder = trained.TRAINED[name].folder
    if not (folder / CALIBRATION_FILE).is_file():
        trained.run(name)
    return calibrated(name, folder, trained.TRAINED[name].parts()[2])


def _bert_base() -> Workload:
    from earlyexit.network.checkpoint import copy_tokenizer, random_model
    from earlyexit.network.store import save_model
    from earlyexit.tasks.label import LabelTask

    folder, records = FOLDER / "bert-base", bert12_sst2("entropy")
    texts = _sentences()
    if not (folder / CARD_FILE).is_file():
        sizes = {"vocab_size": VOCABULARY, "max_length": LONGEST}
        save_model(random_model(sizes, name="bert-base", task=LabelTask(("negative", "positive"))), folder)
        copy_tokenizer(resolve_backbone("minilm"), folder)
    records.save(folder / RECORDS_FILE)
    thresholds = dict.fromkeys(records.ramps, ENTROPY)
    policy = PolicySpec(name="recorded", thresholds=thresholds, records=str((folder / RECORDS_FILE).resolve()))
    return Workload(
        name="bert-base",
        folder=folder,
        texts=texts,
        labels=None,
        keys=records.sample_ids,
        policy=policy,
        records=records,
    )


def _sentences() -> tuple[str, ...]:
    """The 872 sentences of SST-2 dev; GLUE's files hold bare quotes."""
    with require_data(SST2_DEV).open(newline="", encoding="utf-8") as file:
        return tuple(row["sentence"] for row in csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))


def calibrated(name: str, folder: Path, test: LabelledRows, *, truncate: bool = False) -> Workload:
    """A model folder with its own calibration and records, and texts to send."""
    return Workload(
        name=name,
        folder=folder,
        texts=test.texts,
        labels=test.labels,
        keys=None,
        policy=read_calibration(folder).policy_spec(),
        records=ExitRecords.load(folder / RECORDS_FILE),
        truncate=truncate,
    )


WORKLOADS: Mapping[Name, Callable[[], Workload]] = {
    "clinc150": partial(_of, "clinc150"),
    "mpnet": partial(_of, "mpnet"),
    "bert-base": _bert_base,
}
"""Made with their models where those are missing (minutes); each skips, saying so, without its data."""
