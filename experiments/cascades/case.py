"""A cascade of MiniLM-L6 before all-mpnet-base-v2, and what its exits say of rows that it has not seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from earlyexit.chain import Chain, joined
from earlyexit.codecs import find_codec
from earlyexit.dataset import LabelledRows, read_labelled
from earlyexit.store import load_model, read_card
from experiments.cascades.models import make_large, make_small
from experiments.data import RUNS, require_data
from experiments.trained import ag_news, sst2
from experiments.trained.features import features_of, outputs_of
from experiments.trained.mpnet import CLINC150, DataName, labelled
from offramp.jobs.block_costs import block_sizes
from offramp.jobs.recording import join_records
from profiles.networks import of_networks
from profiles.records import ExitRecords
from profiles.scores import FloatArray

if TYPE_CHECKING:
    from torch import Tensor

KEPT = RUNS / "ensemble"
"""Where heads' inputs are kept: `experiments.cascades.ensemble_gain` looks at the same rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A chain of two networks, and what its exits say of rows that it has not seen."""

    name: str
    chain: Chain
    records: ExitRecords
    """Of entropies, as `offramp calibrate` has them for labels."""
    confidence_N: FloatArray
    """Calibrated, at the small network's end."""
    costs: tuple[float, ...]
    """Of every block, in those of the large network together."""

    @property
    def end(self) -> int:
        """The ramp after which inputs cross."""
        return self.chain.end_ramps[0]

    def subset(self, rows: np.ndarray[tuple[int], np.dtype[np.int64]]) -> Case:
        """Some rows."""
        return replace(self, records=self.records.subset(rows), confidence_N=self.confidence_N[rows])


def mean_cost(case: Case, thresholds: dict[int, float], used: Sequence[int]) -> float:
    """Of the blocks that inputs run, those of networks that are not used left out."""
    counted = [cost if case.chain.network_of(block) in used else 0.0 for block, cost in enumerate(case.costs, start=0)]
    records = of_networks(case.records, used, case.chain)
    return float(np.dot(records.outcome(thresholds).survival, counted))


def unseen_rows(data: DataName) -> LabelledRows:
    """Rows that no model of the cascade was trained or calibrated by."""
    if data == "clinc150":
        return read_labelled(require_data(CLINC150), part="test")
    return labelled(ag_news.unseen_pairs()[:2500] if data == "ag_news" else sst2.sentences())


def case_of(data: DataName) -> Case:
    """What the exits of both models say of the rows, at the temperatures of their own calibrations."""
    rows, folders = unseen_rows(data), (make_small(data), make_large(data))
    cards = [read_card(folder) for folder in folders]
    chain = joined(
        tuple(card.name for card in cards),
        tuple(card.num_blocks for card in cards),
        tuple(card.ramps for card in cards),
    )
    outputs: dict[int, Tensor] = {}
    costs: list[float] = []
    for network, (folder, size) in enumerate(zip(folders, ("small", "large"), strict=True)):
        model = load_model(folder)
        codec = find_codec(model.info.codec, folder)
        path = KEPT / data / f"{size}-unseen-{data}.pt"
        _, of_block = outputs_of(model, features_of(model, rows, codec, path, "bfloat16"))
        outputs |= {chain.starts[network] + block: each for block, each in of_block.items()}
        costs += block_sizes(folder).values()
        labels, task = rows.targets(model.task, codec), model.task
    end = chain.end_ramps[0]
    records = join_records([(range(len(rows)), outputs)], "entropy", task, labels)
    large = sum(costs[end + 1 :])
    return Case(
        name=data,
        chain=chain,
        records=records,
        confidence_N=task.score(outputs[end]).numpy().astype(np.float64),
        costs=tuple(cost / large for cost in costs),
    )
