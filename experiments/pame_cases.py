"""The tasks of PAME's studies: their recorded exits, their times, and the search on them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from earlyexit.errors import DataError
from experiments.data import RUNS, data_folder
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from experiments.studies.study import StudyResult, Table
from optimizer.calibration.thresholds import Guarantee, design_rows, learn_then_test, split_rows
from optimizer.cost.batching import Batching, BatchTimes
from optimizer.live.tuning.pame import TEN_CONFIDENCES, relative_precision
from optimizer.search.pame import Candidate, SearchStep, exits_of, find_exits, fixed
from profiles.catalogue import published_profile
from profiles.records import ExitRecords, RecordedBatches
from profiles.scores import BoolArray, FloatArray
from profiles.table import LatencyTable

# The models of PAME's experiments, and the command that makes each.

MODELS = RUNS / "pame"
"""Calibrated folders of jointly trained models, by the names of `MAKERS`."""
MAKERS: Mapping[str, str] = {name: f"python -m experiments.trained {name}" for name in ("cifar10", "lsp", "camvid")}
"""The command that trains and calibrates each model; all need OFFRAMP_DATA."""


def records_file(name: str) -> Path:
    """Returns the path of a model's exit records, which may not exist."""
    return MODELS / name / "exit_records.npz"


def with_missing_models(result: StudyResult, names: Sequence[str]) -> StudyResult:
    """Returns a study's result with a table of the missing models and the commands that make them."""
    rows = tuple((name, MAKERS[name]) for name in names if name in MAKERS and not records_file(name).is_file())
    if not rows:
        return result
    return replace(result, tables=(*result.tables, Table("Not here", ("", "made by"), rows)))


# The data of PAME's search: recorded exits, and the published times of an accelerator.

ORDERS = 20
"""Number of random orders in which the recorded inputs arrive. One order would give too few batches of 64."""
SEED = 0
DESIGN_SHARE = 0.25
"""Share of the search half that designs the path of thresholds with a guarantee; the rest tests them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A task of the paper and its substitute."""

    task: str
    batches: tuple[int, ...]
    """Small, medium and large batches (section 7.1)."""
    published: tuple[str, int]
    """Model and input length in the catalogue."""
    exit_share: float
    """Time of one exit as a share of the whole model's."""


KINDS: Mapping[str, Kind] = {
    "sst2": Kind(task="GLUE", batches=(16, 32, 64), published=("bert-base", 128), exit_share=(20.03 / 16.75 - 1) / 11),
    "cifar10": Kind(task="classification", batches=(16, 32, 64), published=("resnet50", 224), exit_share=0.089),
    "lsp": Kind(task="pose", batches=(16, 32, 64), published=("resnet50", 224), exit_share=0.279),
    "camvid": Kind(task="segmentation", batches=(2, 4, 8), published=("resnet50", 224), exit_share=0.346),
}
"""Sources: eleven exits take BERT from 16.75 to 20.03 ms (section 3.2). An exit takes 8.9 % in classification, 27.9
% in pose estimation (figure 17). OCRNet has 34.6 % of the backbone's operations (section 3.2)."""


KEPT = 0.99
"""eta: the share of the full model's precision that must be exceeded."""


class ThresholdSearch:
    """Selects the threshold of each exit in the search: most inputs leave while Q > eta Q_ori (section 6.2).

    The precision Q of equation 1 is one minus the mean loss of all inputs, as if the exit were the last one.
    """

    def __init__(self, records: ExitRecords, grid: Sequence[float], losses_NE: FloatArray, kept: float = KEPT) -> None:
        """`grid` holds the thresholds from the one at which most inputs leave. The last losses are the full model's."""
        self.thresholds: dict[int, float] = {}
        """The latest selection by ramp. A ramp at which no threshold is precise has none, and no input leaves there."""
        self.alone: dict[int, float] = {}
        """The selections for the first exit."""
        self._ramps, self._grid, self._losses_NE = records.ramps, grid, losses_NE
        self._leave_TNR = np.array([records.sure_NR(dict.fromkeys(records.ramps, threshold)) for threshold in grid])
        self._lost: dict[int, FloatArray] = {-1: losses_NE[:, -1]}
        """By ramp, the losses of all answers if it is the last exit; -1: without exits."""
        self._least_precision = kept * (1 - float(losses_NE[:, -1].mean()))

    def __call__(self, behind: Candidate, ramp: int) -> BoolArray:
        """Returns which inputs leave at a ramp behind an exit."""
        column, before_N = self._ramps.index(ramp), self._lost[behind.ramp]
        leaves_TN = behind.inside_N & self._leave_TNR[:, :, column]
        lost_TN = np.where(leaves_TN, self._losses_NE[:, column], before_N)
        leaving_T, precision_T = leaves_TN.sum(1), 1 - lost_TN.mean(1)
        precise = [t for t, precision in enumerate(precision_T) if precision > self._least_precision]
        if not precise:
            self._lost[ramp] = before_N
            self.thresholds.pop(ramp, None)
            return np.zeros_like(behind.inside_N)
        best = max(precise, key=lambda t: (leaving_T[t], precision_T[t]))
        self._lost[ramp], self.thresholds[ramp] = lost_TN[best], self._grid[best]
        if behind.ramp < 0:
            self.alone[ramp] = self._grid[best]
        return np.asarray(leaves_TN[best])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """One task's recorded exits on one accelerator."""

    name: str
    kind: Kind
    search: ExitRecords
    """The search half of the records in many orders, from which exits are found (section 7.1)."""
    known: ExitRecords
    """The search half, with every input once."""
    test: ExitRecords
    """The other half, on which exits are evaluated."""
    table: LatencyTable

    def batching(self, size: int) -> Batching:
        return Batching(table=self.table, ramps=self.search.ramps, size=size)

    def found(self, batch: int, kept: float = KEPT) -> tuple[list[SearchStep], ThresholdSearch]:
        """Returns the exits of ten thresholds each, with their precision against the truth, and their thresholds.

        For labels the thresholds are the paper's. Confidences of maps have another range, so theirs are its deciles.
        """
        records, losses_NE = self.search, self.search.true_losses_NE
        assert losses_NE is not None, "records without true losses are left out"
        tenths = tuple(np.quantile(records.scores_NR, np.linspace(0.0, 0.9, 10)).tolist())
        grid = TEN_CONFIDENCES if records.zero_one else tenths
        search = ThresholdSearch(records, grid, losses_NE, kept)
        return find_exits(self.batching(batch), records.ramps, len(records), search), search


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Evaluation:
    """The effect of found exits on inputs that the search did not see."""

    exits: tuple[int, ...]
    """All exits that were found, of which some are evaluated."""
    times: BatchTimes
    precision: float
    """Relative to the full model's precision."""
    moving: tuple[float, ...]
    """For each exit, the share of all inputs that is still running after it."""

    @property
    def mean_saved(self) -> float:
        """Saved share of the mean time without exits."""
        return _saved(self.times.mean_s, self.times.whole_s)

    @property
    def tail_saved(self) -> float:
        """Saved share of the mean time of a batch's last answer (the average tail latency of figure 9)."""
        return _saved(float(self.times.last_s_K.mean()), self.times.whole_s)


def _saved(seconds: float, whole_s: float) -> float:
    """Returns the saved share, rounded so that it is exactly 0 without exits."""
    return round(1 - seconds / whole_s, 9) + 0.0


def cases(names: Sequence[str] = tuple(KINDS), *, seed: int = SEED) -> list[Case]:
    """Returns the cases whose records exist; `seed` divides the records in halves."""
    found = [(name, records_of(name)) for name in names]
    return [_case(name, records, seed) for name, records in found if records is not None]


def evaluate(case: Case, batch: int, kept: float = KEPT, *, most_exits: int | None = None) -> Evaluation:
    """Finds exits on one half of the records, and evaluates the first `most_exits` of them on the other."""
    found, search = case.found(batch, kept)
    return evaluate_thresholds(case, found, {ramp: search.thresholds[ramp] for ramp in exits_of(found)[:most_exits]})


def evaluate_guaranteed(case: Case, batch: int, guarantee: Guarantee) -> Evaluation | None:
    """Evaluates thresholds of Learn-then-Test instead of searched ones; returns None if no guarantee is possible."""
    design, tested = split_rows(len(case.known), design_rows(len(case.known), guarantee, DESIGN_SHARE), SEED)
    try:
        thresholds = learn_then_test(case.known.subset(design), case.known.subset(tested), guarantee).thresholds
    except DataError:
        return None
    if not thresholds:
        return None
    batches = RecordedBatches.of_records(case.search, thresholds, batch, case.search.ramps)
    found = find_exits(case.batching(batch), batches.ramps, len(batches), fixed(batches))
    return evaluate_thresholds(case, found, {ramp: thresholds[ramp] for ramp in exits_of(found)})


def evaluate_thresholds(case: Case, found: Sequence[SearchStep], thresholds: Mapping[int, float]) -> Evaluation:
    """Evaluates exits with the given thresholds."""
    outcome, ramps = case.test.outcome(thresholds), sorted(thresholds)
    return Evaluation(
        exits=exits_of(found),
        times=found[0].batching.times(outcome.exits_N, ramps),
        precision=relative_precision(outcome),
        moving=tuple(float((outcome.exits_N > ramp).mean()) for ramp in ramps),
    )


def in_orders(records: ExitRecords, orders: int = ORDERS, seed: int = SEED) -> ExitRecords:
    """Returns the same inputs several times, each time in another random order."""
    rng = np.random.default_rng(seed)
    return records.subset(np.concatenate([rng.permutation(len(records)) for _ in range(orders)]))


def v100(kind: Kind, num_blocks: int, num_ramps: int) -> LatencyTable:
    """Returns the published whole model, divided evenly among the blocks; exits take the share in `Kind`."""
    model, length = kind.published
    table = published_profile(model, "V100").at(length)
    whole_s_B = table.block_s_NB.sum(0)
    return LatencyTable(
        batches=table.batches,
        block_s_NB=np.tile(whole_s_B / num_blocks, (num_blocks, 1)),
        ramp_s_EB=np.tile(whole_s_B * kind.exit_share, (num_ramps, 1)),
    )


def _case(name: str, records: ExitRecords, seed: int) -> Case:
    kind = KINDS[name]
    order = np.random.default_rng(seed).permutation(len(records))
    half = len(records) // 2
    return Case(
        name=name,
        kind=kind,
        search=in_orders(records.subset(order[:half]), seed=seed),
        known=records.subset(order[:half]),
        test=in_orders(records.subset(order[half:]), seed=seed + 1),
        table=v100(kind, records.num_blocks, len(records.ramps)),
    )


def records_of(name: str) -> ExitRecords | None:
    """Returns the records of one of `KINDS`, or None if they are missing or lack true labels."""
    if name == "sst2":
        folder = data_folder()
        if folder is None or not (folder / BERT12_SST2).exists():
            return None
        records = bert12_sst2("confidence")
        # The records' full model is their deepest exit, so ramp 10 would agree by construction.
        return records.of_ramps(records.ramps[:-1])
    path = records_file(name)
    if not path.is_file():
        return None
    records = ExitRecords.load(path)
    return None if records.true_losses_NE is None else records
