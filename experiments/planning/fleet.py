"""Plans five models on 20 accelerators of three types, with several chains per model and with one.

Each model gets the same share of its weight. Blocks take published times (`profiles.catalogue`) and repeat if a model
has more of them. Ramps, survival and weights are invented, per seed. The cost model checks all plans.

    python -m experiments.planning.fleet [--json]
"""

from __future__ import annotations

import json
import math
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any

import numpy as np
from numpy.random import default_rng

from experiments.kit import print_table
from experiments.planning.divisions import Fleet, divided, share_of
from optimizer.plans.plan_file import stages_document
from optimizer.problems.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.catalogue import published_profile
from profiles.table import LatencyTable

DEVICES = {"A100": Supply(count=4), "T4": Supply(count=10), "V100": Supply(count=6)}
MODELS = (
    ("bert-base", 128, 6),
    ("bert-base", 384, 8),
    ("bert-large", 128, 12),
    ("bert-large", 384, 12),
    ("bert-base", 128, 16),
)
"""Published profile, tokens per input, and number of blocks."""
WIDTH = {"bert-base": 768, "bert-large": 1024}
LINK = Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4)  # as in E3
PATIENCE = 10.0
"""A model's SLO, in multiples of the time that a V100 takes for one input without exits."""
MOST_CHAINS, SEEDS = 3, 3
SECONDS, GAP = 4.0, 0.005  # limits at which the search for a division ends


def main() -> None:
    """Plans all fleets and prints the share of each model."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the plans as JSON")
    given = parser.parse_args()
    answered(0, 1)  # compiles the kernels
    answers = [answered(seed, most_chains) for seed in range(SEEDS) for most_chains in (MOST_CHAINS, 1)]
    if given.json:
        print(json.dumps(answers))
        return
    columns = ("seed", "most chains", "share", "bound", "gap", "s", "s of a processor", "chains of each model")
    rows = [
        (
            str(each["seed"]), each["most_chains"], f"{each['share']:.4f}", f"{each['bound']:.4f}",
            f"{each['gap']:.2%}", f"{each['seconds']:.2f}", f"{each['processor_s']:.2f}",
            " ".join(str(len(model["chains"])) for model in each["models"]),
        )
        for each in answers
    ]  # fmt: skip
    print_table("Models on 20 accelerators", columns, rows)


def answered(seed: int, most_chains: int) -> dict[str, Any]:
    """Returns a fleet's plan, and a bound on its share."""
    fleet = fleet_of(seed)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    bound, chains_M = divided(fleet, most_chains, seconds=SECONDS, gap=GAP)
    seconds, processor_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    share = share_of(fleet, chains_M)
    gap = bound / share - 1 if share else math.inf  # kernels that are compiled first may take all of the time
    figures = {"share": share, "bound": bound, "gap": gap, "seconds": seconds, "processor_s": processor_s}
    models = [
        {"weight": float(weight), "chains": [stages_document(chain) for chain in chains]}
        for weight, chains in zip(fleet.weight_M, chains_M, strict=True)
    ]
    return {"seed": seed, "most_chains": most_chains, **figures, "models": models}


def fleet_of(seed: int) -> Fleet:
    """Returns a fleet with weights 1, 1/2, 1/3 and so on, shuffled, relative to the rate of one V100 without exits.

    A fifth to three fifths of a model's inputs reach its last block; the others leave mostly at early ramps.
    """
    rng, problems, alone = default_rng(seed), [], []
    for profile, length, num_blocks in MODELS:
        every, left, bend = -(-num_blocks // 6), rng.uniform(0.2, 0.6), rng.uniform(0.4, 1.0)
        ramps = tuple(range(every - 1, num_blocks - 1, every))
        latency = {}
        for name in DEVICES:
            table = published_profile(profile, name).tables[length]
            block_s_NB = np.tile(table.block_s_NB[0], (num_blocks, 1))
            ramp_s_EB = np.tile(table.ramp_s_EB[0], (len(ramps), 1))
            latency[name] = LatencyTable(batches=table.batches, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)
        whole_s_B = latency["V100"].block_s_NB.sum(axis=0)
        alone.append(latency["V100"].batches[-1] / whole_s_B[-1])
        problem = PlanProblem(
            num_blocks=num_blocks,
            ramps=ramps,
            survival_N=tuple(1 - (1 - left) * (block / (num_blocks - 1)) ** bend for block in range(num_blocks)),
            latency=latency,
            devices=DEVICES,
            link=LINK,
            bytes_per_sample_N=(length * WIDTH[profile] * 2.0,) * num_blocks,  # float16
            slo=Slo(latency_s=float(PATIENCE * whole_s_B[0])),
            objective=MaximizeRate(),
        )
        problems.append(problem)
    return Fleet(problems=problems, weight_M=np.array(alone) / (1 + rng.permutation(len(MODELS))))


if __name__ == "__main__":
    main()
