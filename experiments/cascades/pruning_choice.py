"""Whether a service of a cascade prunes words of questions of eight words (Tabi, section 4.2): what plans are worth.

    OFFRAMP_DATA=... python -m experiments.cascades.pruning_choice [--share 0.14] [--every 4]

MiniLM-L6 before all-mpnet-base-v2 on CLINC150 (`experiments.cascades.models`), calibrated once more in a folder of its
own with `--prune`, on the rows that calibrate it, or on every fourth, for instance. Latencies are those that
`experiments.live.cascade` has measured. Both plans are the planner's; *chosen* is what a service file that says nothing
of pruning gets. Writes runs/pruning_choice.json. Minutes of processor time: about 3 on all rows, 1 on every fourth.
"""

from __future__ import annotations

import json
import shutil
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from earlyexit.store import CARD_FILE
from experiments.cascades.models import make_chain
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.trained.mpnet import GUARANTEE, parts_of
from offramp.jobs.calibration import CalibrateJob, calibrate
from offramp.service.file import read_service
from optimizer.calibration_file import CALIBRATION_FILE, PRUNED, read_calibration_file

MEASURED = RUNS / "live" / "cascade" / "clinc150" / "chain.yaml"
"""A service file with the seconds of the chain's blocks; its SLO and cluster are taken too."""
FACTS = ("words_cut", "tokens_kept", "measuring")
BY_ASKED: dict[str, bool | None] = {"whole": False, "pruned": True, "chosen": None}


def make_pruned(share: float, every: int) -> Path:
    """The chain with a calibration of pruned texts beside that of whole ones; its folder."""
    chain = make_chain("clinc150")
    folder = chain.with_name(f"{chain.name}-pruned")  # beside it: a chain's folder names its models relative to itself
    if not (folder / PRUNED / CALIBRATION_FILE).is_file():
        folder.mkdir(exist_ok=True)
        shutil.copy(chain / CARD_FILE, folder)
        job = CalibrateJob(guarantee=GUARANTEE, dtype="bfloat16", prune=share, source="clinc150")
        rows = parts_of("clinc150")["validate"]
        calibrate(folder, rows.select(range(0, len(rows), every)), job)
    return folder


def planned(folder: Path, prune: bool | None) -> dict[str, Any]:
    """What a service's first plan promises, and whether it prunes."""
    document = json.loads(MEASURED.read_text(encoding="utf-8"))
    document["model"]["folder"] = str(folder.resolve())
    document["accuracy"] = {} if prune is None else {"prune": prune}
    path = folder / "service.yaml"
    path.write_text(json.dumps(document), encoding="utf-8")
    plan = read_service(path).settings.plan
    return {"prunes": bool(plan.prune), "networks": list(plan.used), **plan.predicted}


def main() -> None:
    """Calibrate where that was not done, plan, and print."""
    parser = ArgumentParser(prog="python -m experiments.cascades.pruning_choice", description=__doc__)
    parser.add_argument("--share", type=float, default=0.14)
    parser.add_argument("--every", type=int, default=1)
    options = parser.parse_args()
    folder = make_pruned(options.share, options.every)
    facts = read_calibration_file(folder / PRUNED / CALIBRATION_FILE).provenance
    print(", ".join(f"{name} {facts[name]}" for name in FACTS))
    found = {name: planned(folder, prune) for name, prune in BY_ASKED.items()}
    columns = ("", "prunes", "networks", "rate /s", "worst case (ms)")
    rows = [
        (name, each["prunes"], str(each["networks"]), each["rate_per_s"], 1e3 * each["latency_s"])
        for name, each in found.items()
    ]
    show("CLINC150", columns, rows)
    print(keep({"plans": found, **{name: facts[name] for name in FACTS}}, RUNS / "pruning_choice.json"))


if __name__ == "__main__":
    main()
