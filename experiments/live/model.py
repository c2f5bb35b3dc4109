"""The model folder that emulated services serve: its decisions are recorded, so its weights are random and tiny.

    python -m experiments.live.model runs/emulated/model

Twelve blocks with a ramp after all but the last, exit records and a calibration card with E3's thresholds. The records
are those of `experiments.recorded_exits`; without that data, they are made up by the survival of
`examples/problems/bert_base_16_v100.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from experiments.data import RUNS, data_folder
from experiments.models import tiny_model
from experiments.problems import ENTROPY, PROBLEMS
from experiments.recorded_exits import BERT12_EXITS, BERT12_SST2, bert12_sst2, drawn_exits
from offramp.commands.thresholds import outcome_figures
from optimizer.calibration_file import CALIBRATION_FILE, RECORDS_FILE, CalibrationCard
from optimizer.problem_file import read_problem
from profiles.records import ExitRecords

FOLDER = RUNS / "emulated" / "model"
NUM_DRAWN = 2000


def make_model(folder: Path = FOLDER) -> ExitRecords:
    """Writes model, tokenizer, records and card; returns the records."""
    tiny_model(folder, name="emulated", num_blocks=BERT12_EXITS, hidden_size=8)
    data = data_folder()
    if data is not None and (data / BERT12_SST2).is_file():
        records = bert12_sst2("entropy")
    else:
        print(f"{BERT12_SST2} is not in OFFRAMP_DATA: exit records are made up")
        survival_N = read_problem(PROBLEMS / "bert_base_16_v100.yaml").problem.survival_N
        records = drawn_exits(survival_N, num_inputs=NUM_DRAWN, rng=np.random.default_rng(0))
    records.save(folder / RECORDS_FILE)
    thresholds = dict.fromkeys(records.ramps, ENTROPY)
    outcome = records.outcome(thresholds)
    card = CalibrationCard(
        policy=records.score,
        thresholds=thresholds,
        budget=1 - outcome.agreement,
        confidence=0.0,  # nothing was tested for a guarantee
        tested=outcome_figures(outcome),
        provenance={"thresholds": f"entropy {ENTROPY:g} at every ramp (E3 section 5), no guarantee was tested"},
    )
    (folder / CALIBRATION_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return records


if __name__ == "__main__":
    make_model(*map(Path, sys.argv[1:2]))
