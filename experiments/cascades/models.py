"""Cascades of MiniLM-L6 before all-mpnet-base-v2: CLINC150, AG News and SST-2.

    OFFRAMP_DATA=... python -m experiments.cascades.models [clinc150 ag_news sst2]

Both models learn ramps and heads on their frozen backbones, MiniLM on more rows (CLINC150: all of train; AG News: 6,000
texts; SST-2: 20,000 phrases) than the large one (`experiments.trained.mpnet`). The chain is calibrated by the rows that
calibrate the large one, budget 1 % at 90 %. Small models stay in runs/cascade/small* and chains in
runs/cascade/clinc150, ag_news and sst2; what is there already is not made again.
Minutes of processor time: about 3 for each small model, and what the large ones take. Needs the extra `mpnet`.
"""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import get_args

from earlyexit.boundary import FloatName
from earlyexit.dataset import LabelledRows
from experiments.data import RUNS, require_data
from experiments.models import finished
from experiments.trained import ag_news, clinc150, mpnet, sst2
from experiments.trained.mpnet import GUARANTEE, DataName, labelled, parts_of
from offramp.jobs.calibration import CalibrateJob, calibrate
from offramp.jobs.chaining import chain_models
from offramp.jobs.packaged import resolve_backbone
from offramp.jobs.train_job import TrainJob
from optimizer.calibration_file import CALIBRATION_FILE, REFERENCE

FOLDER = RUNS / "cascade"
NEWS, PHRASES = slice(0, 6000), slice(0, 20_000)
"""Of which the small models learn: what the large ones learn of, and more; none of the rows that calibrate."""


def small_folder(data: DataName) -> Path:
    """Where MiniLM stays; CLINC150's is the one that has no suffix."""
    return FOLDER / ("small" if data == "clinc150" else f"small-{data}")


def chain_folder(data: DataName) -> Path:
    """Where the chain of both stays."""
    return FOLDER / data


def make_small(data: DataName) -> Path:
    """MiniLM with trained, calibrated ramps; its folder."""
    folder = small_folder(data)
    if (folder / CALIBRATION_FILE).is_file():
        return folder
    if data == "clinc150":
        clinc150.run(folder, require_data(clinc150.DATA))
        return folder
    parts = parts_of(data)
    job = TrainJob(backbone=resolve_backbone("minilm"), name=f"minilm-{data.replace('_', '-')}", source=data)
    calibration = CalibrateJob(guarantee=GUARANTEE, source=data)
    finished(folder, job, calibration, (_known(data), parts["validate"], parts["unseen"]))
    return folder


def _known(data: DataName) -> LabelledRows:
    return labelled(ag_news.learn_pairs()[NEWS] if data == "ag_news" else sst2.phrases()[PHRASES])


def make_large(data: DataName) -> Path:
    """The reference; its folder."""
    folder = mpnet.folder_of(data)
    if not (folder / CALIBRATION_FILE).is_file():
        mpnet.prepare(data)
    return folder


def make_chain(data: DataName, *, dtype: FloatName = "bfloat16") -> Path:
    """MiniLM before the reference, calibrated; its folder."""
    members, folder = [make_small(data), make_large(data)], chain_folder(data)
    if (folder / REFERENCE / CALIBRATION_FILE).is_file():
        return folder
    chain_models(members, folder, name=f"cascade-{data.replace('_', '-')}")
    calibrate(folder, parts_of(data)["validate"], CalibrateJob(guarantee=GUARANTEE, dtype=dtype, source=data))
    return folder


def main() -> None:
    """Make what is missing and say where it is."""
    parser = ArgumentParser(prog="python -m experiments.cascades.models", description=__doc__)
    parser.add_argument("data", nargs="*", choices=get_args(DataName), default=get_args(DataName))
    for data in parser.parse_args().data:
        print(f"{data}: {make_chain(data)}", flush=True)


if __name__ == "__main__":
    main()
