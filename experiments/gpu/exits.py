"""Where inputs leave: recorded exits of BERT-base, or drawn ones of the same survival, and policies by them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt
from torch import Tensor

from earlyexit.errors import DataError
from earlyexit.policies.base import ExitPolicy, Opinion, Verdict
from earlyexit.policies.recorded import RecordedAnswers, RecordedPolicy
from earlyexit.policies.threshold import EntropyPolicy
from experiments.data import data_folder

IntArray = npt.NDArray[np.int64]
Source = Literal["auto", "recorded", "synthetic"]
Decisions = Literal["waited", "known"]
"""Waited: the host waits for the logits of every active ramp and judges them, as any policy that decides by them must;
then the records answer. Known: the records answer without waiting, so that the device never idles for a decision. No
served policy can do that; the two bound what a faster decision could gain."""
NEVER = -1.0
"""An entropy that no prediction has."""
THRESHOLD = 0.4
"""Entropy in nats; E3 section 5's default."""
NUM_BLOCKS = 12
"""Blocks of the model that was recorded."""
SURVIVAL = (1.0, 0.75, 0.60, 0.45, 0.38, 0.375, 0.33, 0.31, 0.29, 0.27, 0.25, 0.24)
"""Share of inputs that reach each block, for drawn exits: about what the recorded ones give at the threshold
(`experiments.recorded_exits.bert12_sst2`: Div290/Buffer_based_threshold, BERT-base on SST-2 dev)."""
NUM_DRAWN = 1000
SURE, UNSURE = 0.1, 0.6
"""Entropies of drawn inputs at the ramps from their exit on, and before it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exits:
    """What every ramp says of N inputs, and from which entropy on an input leaves."""

    answers: RecordedAnswers
    num_blocks: int
    source: str
    """For people: whether these were recorded or drawn."""

    def __post_init__(self) -> None:
        if any(not 0 <= ramp < self.num_blocks - 1 for ramp in self.answers.ramps):
            raise DataError(f"ramps must sit below block {self.num_blocks - 1}, not {list(self.answers.ramps)}")

    @property
    def ramps(self) -> tuple[int, ...]:
        return self.answers.ramps

    @property
    def sample_ids(self) -> tuple[str, ...]:
        return tuple(self.answers.row_of)

    def exits_N(self, active: Sequence[int]) -> IntArray:
        """The block that every input leaves after, with these ramps active."""
        columns = [self.ramps.index(ramp) for ramp in active]
        sure_NA = self.answers.scores_NR[:, columns] <= np.float32(THRESHOLD)
        last_N1 = np.ones((len(sure_NA), 1), dtype=bool)
        exits = np.array([*active, self.num_blocks - 1], dtype=np.int64)
        return np.asarray(exits[np.hstack([sure_NA, last_N1]).argmax(1)])

    def expected(self, active: Sequence[int]) -> dict[str, tuple[int, int]]:
        """Every input's exit and label, with these ramps active."""
        exits = self.exits_N(active).tolist()
        column_of = {ramp: column for column, ramp in enumerate(self.ramps)}
        return {
            sample_id: (exits[row], self._label(row, column_of.get(exits[row])))
            for sample_id, row in self.answers.row_of.items()
        }

    @property
    def survival(self) -> tuple[float, ...]:
        """Per block, the share of inputs that reach it with every ramp active: a plan problem's `survival`."""
        exits_N = self.exits_N(self.ramps)
        return tuple(float((exits_N >= block).mean()) for block in range(self.num_blocks))

    def on_blocks(self, num_blocks: int) -> Exits:
        """The same exits in a deeper model: ramp r moves to the same share of its depth.

        Of 24 blocks, a ramp sits after every second one. Raises DataError for a model that is no multiple as deep.
        """
        times, rest = divmod(num_blocks, self.num_blocks)
        if rest or not times:
            raise DataError(f"exits of {self.num_blocks} blocks cannot be laid on {num_blocks}")
        ramps = tuple(times * (ramp + 1) - 1 for ramp in self.ramps)
        return replace(self, num_blocks=num_blocks, answers=replace(self.answers, ramps=ramps))

    def _label(self, row: int, column: int | None) -> int:
        return int(self.answers.answers_NE[row, -1 if column is None else column])


def find_exits(source: Source, rng: np.random.Generator) -> Exits:
    """Recorded exits where OFFRAMP_DATA has them, or drawn ones; of 12 blocks."""
    if source == "synthetic" or (source == "auto" and data_folder() is None):
        return drawn_exits(rng)
    from experiments.recorded_exits import BERT12_SST2  # needs yaml, which a bare machine may not have

    folder = data_folder()
    if source == "recorded" or (folder is not None and (folder / BERT12_SST2).is_file()):
        return recorded_exits()
    return drawn_exits(rng)


def recorded_exits() -> Exits:
    """BERT-base on SST-2; ends the experiment with a sentence where the file is absent."""
    from experiments.recorded_exits import BERT12_SST2, bert12_sst2

    records = bert12_sst2("entropy")
    answers = RecordedAnswers(
        row_of={sample_id: row for row, sample_id in enumerate(records.sample_ids)},
        ramps=records.ramps,
        scores_NR=records.scores_NR,
        answers_NE=records.answers(),
    )
    return Exits(answers=answers, num_blocks=records.num_blocks, source=f"recorded: {BERT12_SST2}")


def drawn_exits(rng: np.random.Generator) -> Exits:
    """Exits of the share that SURVIVAL says, in random order, with random labels."""
    ramps = tuple(range(NUM_BLOCKS - 1))
    # Row n of N stays inside while n / N is below the survival: the shares are met, not only expected.
    place_N = rng.permutation(NUM_DRAWN) / NUM_DRAWN
    exits_N = (place_N[:, None] < np.array(SURVIVAL)).sum(1) - 1
    sure_NR = np.array(ramps) >= exits_N[:, None]
    answers = RecordedAnswers(
        row_of={f"drawn-{row}": row for row in range(NUM_DRAWN)},
        ramps=ramps,
        scores_NR=np.where(sure_NR, SURE, UNSURE).astype(np.float32),
        answers_NE=rng.integers(0, 2, (NUM_DRAWN, len(ramps) + 1)),
    )
    shares = ", ".join(f"{share:g}" for share in SURVIVAL)
    return Exits(answers=answers, num_blocks=NUM_BLOCKS, source=f"synthetic: drawn to survive {shares}")


class WaitedPolicy(RecordedPolicy):
    """Records that answer only after the logits were read and judged by entropy."""

    name = "recorded"
    foreknows: ClassVar[bool] = False

    def __init__(self, answers: RecordedAnswers, judge: EntropyPolicy) -> None:
        super().__init__(answers, judge)
        self._reader = judge

    def decide(self, ramp: int, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> Verdict:
        self._reader.decide(ramp, opinion, state_BS, sample_ids)
        return super().decide(ramp, opinion, state_BS, sample_ids)

    def conclude(self, opinion: Opinion, state_BS: Tensor, sample_ids: Sequence[str]) -> tuple[Tensor, Tensor]:
        self._reader.conclude(opinion, state_BS, sample_ids)
        return super().conclude(opinion, state_BS, sample_ids)


def policy_of(answers: RecordedAnswers, threshold: float, decisions: Decisions) -> ExitPolicy:
    """Decides by the records at this entropy; nobody leaves early at NEVER."""
    judge = EntropyPolicy(threshold)
    return WaitedPolicy(answers, judge) if decisions == "waited" else RecordedPolicy(answers, judge)
