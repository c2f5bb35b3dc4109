"""Exit records of published exits, and exit records that are drawn to a given survival."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError
from experiments.data import require_data
from profiles.records import ExitRecords, IntArray

BERT12_SST2 = "exit_traces/bert12_sst2dev_exit_confidences.csv"
BERT12_EXITS = 12
SURE, UNSURE = 0.4, 0.65
"""Entropies in nats: the largest at which drawn inputs leave, and that of an unsure ramp. Two classes reach 0.693."""
COLUMNS = ("Sample_ID", "Exit", "Confidence", "Prediction", "Label")


def bert12_sst2(score: Literal["entropy", "confidence"]) -> ExitRecords:
    """Returns records of a BERT-base with an exit after every layer but the last, on the 872 sentences of SST-2 dev.

    They were recorded by Div290/Buffer_based_threshold (csv_files/df.csv). Exit 0 of the file reads the embeddings,
    always gives the same class, and is dropped. Exit k from 1 to 11 is ramp k - 1. **The file has no exit after block
    12**: the final labels are the answers of its deepest exit, 11, so ramp 10 agrees with the full model by
    construction. The task is binary, so the entropy in nats follows from the confidence. True labels are known.

    Exits the process with a message if the file is missing; raises DataError if it is another file.
    """
    path = require_data(BERT12_SST2)
    rows = np.loadtxt(path, delimiter=",", skiprows=1).reshape(-1, BERT12_EXITS, len(COLUMNS))
    if not (rows[:, :, 0] == rows[:, :1, 0]).all() or not (rows[:, :, 1] == np.arange(BERT12_EXITS)).all():
        raise DataError(f"{path} must list the exits of a sample together, from 0 to {BERT12_EXITS - 1}")
    confidence_NR = rows[:, 1:, 2]
    labels_NR = rows[:, 1:, 3].astype(np.int64)
    scores_NR = confidence_NR if score == "confidence" else binary_entropy(confidence_NR)
    return ExitRecords.of_answers(
        np.column_stack([labels_NR, labels_NR[:, -1]]),
        score=score,
        num_blocks=BERT12_EXITS,
        ramps=tuple(range(BERT12_EXITS - 1)),
        sample_ids=tuple(str(int(sample)) for sample in rows[:, 0, 0]),
        scores_NR=scores_NR.astype(np.float32),
        truth_N=rows[:, 0, 4].astype(np.int64),
        provenance={"data": BERT12_SST2, "final_labels": "exit 11: the file has none after block 12"},
    )


def drawn_exits(survival: Sequence[float], *, num_inputs: int, rng: np.random.Generator) -> ExitRecords:
    """Returns records with this survival at an entropy of 0.4; a sure input stays sure, and all answers agree."""
    ramps = tuple(range(len(survival) - 1))
    position_N = (rng.permutation(num_inputs) + 0.5) / num_inputs
    # Input n is sure from the first ramp whose survivors do not include it.
    first_N = (position_N[:, None] <= np.array(survival)[1:]).sum(1)
    sure_NR = np.array(ramps) >= first_N[:, None]
    own_N = rng.uniform(0.05, SURE, num_inputs)
    labels_N = rng.integers(2, size=num_inputs)
    return ExitRecords.of_answers(
        np.repeat(labels_N[:, None], len(ramps) + 1, axis=1),
        score="entropy",
        num_blocks=len(survival),
        ramps=ramps,
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=np.where(sure_NR, own_N[:, None], UNSURE).astype(np.float32),
        truth_N=labels_N,
        provenance={"data": "drawn to a survival"},
    )


# Mixes of easy and hard inputs, and the plans of a planner that knows the mix (E3 section 5.4).

MANY = 8000
"""Inputs that determine the survival of a mix to half a percent."""


def easy_and_hard(records: ExitRecords, thresholds: Mapping[int, float]) -> tuple[IntArray, IntArray]:
    """Returns rows of easy inputs, which leave in the first half of the model, and of the other inputs.

    E3 does not define easy inputs. Raises DataError if one of the kinds is missing.
    """
    easy_N = records.outcome(thresholds).exits_N < records.num_blocks // 2
    easy, hard = np.flatnonzero(easy_N), np.flatnonzero(~easy_N)
    if not len(easy) or not len(hard):
        raise DataError(f"a mix needs easy and hard inputs, and there are {len(easy)} and {len(hard)}")
    return easy, hard


def mixed_rows(
    records: ExitRecords,
    thresholds: Mapping[int, float],
    easy_share: float,
    rng: np.random.Generator,
    *,
    num_inputs: int = MANY,
) -> IntArray:
    """Returns rows drawn with replacement: each is easy with probability `easy_share`, independently of the others."""
    easy, hard = easy_and_hard(records, thresholds)
    is_easy_N = rng.random(num_inputs) < easy_share
    return np.where(is_easy_N, rng.choice(easy, num_inputs), rng.choice(hard, num_inputs))


def mixed_records(records: ExitRecords, thresholds: Mapping[int, float], easy_share: float) -> ExitRecords:
    """Returns records in which the mix has its exact shares, as a perfect forecast would know them."""
    easy, hard = easy_and_hard(records, thresholds)
    num_easy = round(MANY * easy_share)
    return records.subset(np.concatenate([np.resize(easy, num_easy), np.resize(hard, MANY - num_easy)]))


def binary_entropy(confidence: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns the entropy in nats of two classes, one of which has this probability."""
    other = np.clip(1 - confidence, np.finfo(np.float64).tiny, 1)
    sure = np.clip(confidence, np.finfo(np.float64).tiny, 1)
    return np.asarray(-(sure * np.log(sure) + other * np.log(other)))
