"""A model folder that emulated services serve: its decisions are recorded, so its weights are random and tiny.

Twelve blocks with a ramp after all but the last, exit records and a calibration card. The records are those of
`experiments.recorded_exits`; where that data is absent, made-up ones with the survival of
`examples/problems/bert_base_16_v100.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from experiments.data import RUNS, data_folder
from experiments.problems import ENTROPY, PROBLEMS
from experiments.recorded_exits import BERT12_SST2, bert12_sst2
from offramp.commands.calibrate import outcome_figures
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE, CalibrationCard
from optimizer.problem_file import read_problem
from profiles.records import ExitRecords

FOLDER = RUNS / "emulated" / "model"
NUM_BLOCKS = 12
NUM_MADE_UP = 2000
TEXT = "so it goes"
"""What every request says: recorded decisions go by the id that comes with it."""
UNSURE = 0.65
"""Entropy in nats of a ramp that does not know; two classes reach 0.693."""


def ensure_model(folder: Path = FOLDER, *, max_length: int = 128) -> ExitRecords:
    """The records of the folder, which is made first where it is missing."""
    if (folder / RECORDS_FILE).is_file() and (folder / CALIBRATION_FILE).is_file():
        return ExitRecords.load(folder / RECORDS_FILE)
    return make_model(folder, max_length=max_length)


def make_model(folder: Path, *, max_length: int = 128) -> ExitRecords:
    """Write model, tokenizer, records and card; gives the records."""
    from experiments.models import tiny_model  # torch, which a process that only loads a service need not import

    tiny_model(folder, name="emulated", num_blocks=NUM_BLOCKS, hidden_size=8, max_length=max_length)
    records = recorded() or made_up(survival_of_problem(), num_inputs=NUM_MADE_UP, rng=np.random.default_rng(0))
    records.save(folder / RECORDS_FILE)
    (folder / CALIBRATION_FILE).write_text(card(records).model_dump_json(indent=2) + "\n", encoding="utf-8")
    return records


def thresholds(records: ExitRecords, entropy: float = ENTROPY) -> dict[int, float]:
    """The same entropy at every ramp, as E3 has it."""
    return dict.fromkeys(records.ramps, entropy)


def card(records: ExitRecords) -> CalibrationCard:
    """A card with E3's thresholds. Nothing was tested for a guarantee: its confidence is 0."""
    outcome = records.outcome(thresholds(records))
    return CalibrationCard(
        policy=records.score,
        thresholds=thresholds(records),
        budget=1 - outcome.agreement,
        confidence=0.0,
        tested=outcome_figures(outcome),
        provenance={"thresholds": f"entropy {ENTROPY:g} at every ramp (E3 section 5), no guarantee was tested"},
    )


def recorded() -> ExitRecords | None:
    """What others recorded; None, with a word to the reader, where the data is absent."""
    folder = data_folder()
    if folder is not None and (folder / BERT12_SST2).is_file():
        return bert12_sst2("entropy")
    print(f"{BERT12_SST2} is not in OFFRAMP_DATA: exit records are made up")
    return None


def survival_of_problem() -> tuple[float, ...]:
    """Recorded survival, as the problem file quotes it."""
    return read_problem(PROBLEMS / "bert_base_16_v100.yaml").problem.survival_N


def made_up(survival: tuple[float, ...], *, num_inputs: int, rng: np.random.Generator) -> ExitRecords:
    """Records with that survival at an entropy of 0.4: who is sure at a ramp stays sure, and everyone agrees."""
    ramps = tuple(range(len(survival) - 1))
    position_N = (rng.permutation(num_inputs) + 0.5) / num_inputs
    # Input n is sure from the first ramp on whose survivors it is not among.
    first_N = (position_N[:, None] <= np.array(survival)[1:]).sum(1)
    sure_NR = np.array(ramps) >= first_N[:, None]
    own_N = rng.uniform(0.05, ENTROPY, num_inputs)
    labels_N = rng.integers(2, size=num_inputs)
    return ExitRecords.of_answers(
        np.repeat(labels_N[:, None], len(ramps) + 1, axis=1),
        score="entropy",
        num_blocks=len(survival),
        ramps=ramps,
        sample_ids=tuple(map(str, range(num_inputs))),
        scores_NR=np.where(sure_NR, own_N[:, None], UNSURE).astype(np.float32),
        truth_N=labels_N,
        provenance={"data": "made up from a survival"},
    )


if __name__ == "__main__":
    make_model(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
