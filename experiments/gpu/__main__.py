"""The batch engine alone on a GPU: full batches against shrinking ones and against no exits.

    python -m experiments.gpu [--models bert-base] [--batches 1 8 64] [--decisions known] [--no-graphs]
    python -m experiments.gpu --dry-run    # tiny models on the CPU, where torch replays: the same code, no figures

BERT-base and BERT-large with random weights, bfloat16, 128 random tokens per input; who leaves where comes from exit
records of BERT-base on SST-2 at entropy 0.4 (or from exits drawn to the same survival; the output says which), in
BERT-large with a ramp after every second block. Needs torch, numpy, pydantic and safetensors, and no ray; with numba
the planner adds its own cuts. Minutes: not yet measured on a GPU.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from earlyexit.clock import MonotonicClock
from earlyexit.errors import InputError
from experiments.data import RUNS
from experiments.gpu.bench import HEADER, LEGEND, Row, line, run_model, write_result
from experiments.gpu.side import can_plan
from experiments.gpu.workbench import DRY_MODELS, MODELS, BenchOptions, build_workbench, find_exits

BATCHES = (1, 2, 4, 8, 16, 32, 64)
DRY_BATCHES = (1, 2, 4)


def parse(arguments: Sequence[str] | None = None) -> BenchOptions:
    """The command line as options."""
    parser = ArgumentParser(
        prog="python -m experiments.gpu", description=__doc__, formatter_class=RawDescriptionHelpFormatter
    )
    names = [model.name for model in MODELS]
    parser.add_argument("--models", nargs="+", choices=names, default=names)
    dry = "--dry-run" in (sys.argv[1:] if arguments is None else arguments)  # it has defaults of its own
    parser.add_argument("--batches", nargs="+", type=int, default=DRY_BATCHES if dry else BATCHES, help="batch limits")
    parser.add_argument("--rounds", type=int, default=2 if dry else 5)
    parser.add_argument("--seconds", type=float, default=0.05 if dry else 1.0, help="of a side's run in each round")
    parser.add_argument("--records", choices=("auto", "recorded", "synthetic"), default="auto")
    parser.add_argument("--decisions", choices=("waited", "known"), default="waited")
    parser.add_argument("--no-graphs", action="store_true", help="launch every kernel by itself")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RUNS / "gpu")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes on the CPU")
    given = parser.parse_args(arguments)
    return BenchOptions(
        models=tuple((DRY_MODELS if dry else MODELS)[names.index(name)] for name in given.models),
        batches=tuple(sorted(given.batches)),
        rounds=given.rounds,
        seconds=given.seconds,
        records=given.records,
        decisions=given.decisions,
        device="cpu" if dry else given.device,
        graphs=not given.no_graphs,
        seed=given.seed,
        out=given.out,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, and write one file per model."""
    try:
        options = parse(arguments)
    except InputError as error:
        raise SystemExit(str(error)) from error
    if options.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("skipped: no CUDA device here; --dry-run tries everything on the CPU")
    torch.set_num_threads(1)  # the host's own share is small tensors; on the CPU, threads would hide it
    exits = find_exits(options.records, np.random.default_rng(options.seed))
    print(f"device: {options.device}; graphs {'on' if options.graphs else 'off'}; decisions {options.decisions}")
    print(f"exits: {exits.source}")
    if not can_plan():
        print("without the best ramps and the best cuts: the planner needs numba, which is missing")
    print(f"{LEGEND}\n\n{HEADER}", flush=True)
    for size in options.models:
        rng = np.random.default_rng(options.seed)
        bench = build_workbench(size, options, exits, MonotonicClock(), rng)
        path = options.out / f"{size.name}.json"
        write_result(run_model(bench, _print), options, exits.source, path)
        print(f"wrote {path}", flush=True)


def _print(row: Row) -> None:
    print(line(row), flush=True)


if __name__ == "__main__":
    main()
