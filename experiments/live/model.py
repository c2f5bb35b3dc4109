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
from experiments.recorded_exits import BERT12_SST2, bert12_sst2, drawn_exits
from offramp.commands.thresholds import outcome_figures
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE, CalibrationCard
from optimizer.problem_file import read_problem
from profiles.records import ExitRecords

FOLDER = RUNS / "emulated" / "model"
NUM_BLOCKS = 12
NUM_DRAWN = 2000
TEXT = "so it goes"
"""What every request says: recorded decisions go by the id that comes with it."""


def ensure_model(folder: Path = FOLDER, *, max_length: int = 128) -> ExitRecords:
    """The records of the folder, which is made first where it is missing."""
    if (folder / RECORDS_FILE).is_file() and (folder / CALIBRATION_FILE).is_file():
        return ExitRecords.load(folder / RECORDS_FILE)
    return make_model(folder, max_length=max_length)


def make_model(folder: Path, *, max_length: int = 128) -> ExitRecords:
    """Write model, tokenizer, records and card; gives the records."""
    from experiments.models import tiny_model  # torch, which a process that only loads a service need not import

    tiny_model(folder, name="emulated", num_blocks=NUM_BLOCKS, hidden_size=8, max_length=max_length)
    records = recorded() or drawn_exits(survival_of_problem(), num_inputs=NUM_DRAWN, rng=np.random.default_rng(0))
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


if __name__ == "__main__":
    make_model(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
