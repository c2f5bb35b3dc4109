"""Makes the model folder that emulated services serve. Its weights are random and tiny, because exits are recorded.

    python -m experiments.live.model runs/emulated/model

The model has twelve blocks, a ramp after all but the last, exit records, and a calibration card with E3's thresholds.
The records come from `experiments.recorded_exits`. Without that data, they are drawn to the survival of
`examples/problems/bert_base_16_v100.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from earlyexit.network.checkpoint import copy_tokenizer, random_model
from earlyexit.network.store import save_model
from earlyexit.tasks.label import LabelTask
from experiments.data import RUNS, data_folder
from experiments.problems import ENTROPY, PROBLEMS
from experiments.recorded_exits import BERT12_EXITS, BERT12_SST2, bert12_sst2, drawn_exits
from offramp.commands.folders import resolve_backbone
from offramp.commands.thresholds import outcome_figures
from optimizer.calibration.calibration_file import CALIBRATION_FILE, RECORDS_FILE, CalibrationCard
from optimizer.problems.problem_file import read_problem
from profiles.records import ExitRecords

FOLDER = RUNS / "emulated" / "model"
NUM_DRAWN = 2000
VOCABULARY = 30522
"""Vocabulary size of the packaged tokenizer."""
LABELS = ("negative", "positive")


def make_model(folder: Path = FOLDER) -> ExitRecords:
    """Writes model, tokenizer, records and card; returns the records."""
    tiny_model(folder, name="emulated", num_blocks=BERT12_EXITS, hidden_size=8)
    data = data_folder()
    if data is not None and (data / BERT12_SST2).is_file():
        records = bert12_sst2("entropy")
    else:
        print(f"{BERT12_SST2} is not in OFFRAMP_DATA: exit records are drawn at random")
        survival_N = read_problem(PROBLEMS / "bert_base_16_v100.yaml").problem.survival_N
        records = drawn_exits(survival_N, num_inputs=NUM_DRAWN, rng=np.random.default_rng(0))
    records.save(folder / RECORDS_FILE)
    thresholds = dict.fromkeys(records.ramps, ENTROPY)
    outcome = records.outcome(thresholds)
    card = CalibrationCard(
        policy=records.score,
        thresholds=thresholds,
        budget=1 - outcome.agreement,
        confidence=0.0,  # no guarantee was tested
        tested=outcome_figures(outcome),
        provenance={"thresholds": f"entropy {ENTROPY:g} at every ramp (E3 section 5), no guarantee was tested"},
    )
    (folder / CALIBRATION_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return records


def tiny_model(folder: Path, *, name: str, num_blocks: int, hidden_size: int, max_length: int = 128) -> Path:
    """Returns a model with one attention head, a ramp after every block but the last, and two labels."""
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden_size,
        "num_blocks": num_blocks,
        "num_heads": 1,
        "intermediate_size": hidden_size,
        "max_length": max_length,
    }
    save_model(random_model(sizes, name=name, task=LabelTask(LABELS)), folder)
    copy_tokenizer(resolve_backbone("minilm"), folder)
    return folder


if __name__ == "__main__":
    make_model(*map(Path, sys.argv[1:2]))
