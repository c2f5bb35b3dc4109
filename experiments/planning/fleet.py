"""Plans five models on 20 accelerators of three types and on 10,000 of six, with several chains per model and with one.

Each model gets the same share of its rate. Blocks take published times (`profiles.catalogue`) and repeat if a model has
more of them. Ramps, survival and rates are invented, per seed. The cost model checks all plans.

    python -m experiments.planning.fleet [--json]
"""

from __future__ import annotations

import json
import math
import time
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from typing import Any, NamedTuple

import numpy as np
from numpy.random import default_rng

from experiments.kit import print_table
from optimizer.plans.plan import chains_of
from optimizer.plans.plan_file import stages_document
from optimizer.problems.fleet import Fleet, FleetModel
from optimizer.problems.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.search.fleet.solve import solve_fleet
from profiles.catalogue import published_profile
from profiles.table import LatencyTable


class Cluster(NamedTuple):
    """The accelerators and the models of a fleet."""

    devices: dict[str, int]
    link: Link
    num_blocks: tuple[int, ...]
    """Of each model."""


CLUSTERS = (
    Cluster(
        {"A100": 4, "T4": 10, "V100": 6},
        Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4),  # as in E3
        (6, 8, 12, 12, 16),
    ),
    Cluster(
        {"A100": 1000, "A30": 1500, "L4": 1500, "L40S": 1000, "T4": 3500, "V100": 1500},
        Link(bandwidth_bytes_per_s=12.5e9, delay_s=5e-5),
        (12, 24, 24, 48, 64),
    ),
)
PROFILES = (("bert-base", 128), ("bert-base", 384), ("bert-large", 128), ("bert-large", 384), ("bert-base", 128))
"""Published profile and tokens per input of each model."""
WIDTH = {"bert-base": 768, "bert-large": 1024}
PATIENCE = 10.0
"""A model's SLO, in multiples of the time that a V100 takes for one input without exits."""
MOST_CHAINS, SEEDS = 3, 3
SECONDS = 5.0  # of a processor, after which the search for a division ends


def main() -> None:
    """Plans all fleets and prints the share of each model."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the plans as JSON")
    given = parser.parse_args()
    for cluster in CLUSTERS:  # compiles the kernels
        answered(cluster, 0, 1)
    every = [(cluster, seed, most) for cluster in CLUSTERS for seed in range(SEEDS) for most in (MOST_CHAINS, 1)]
    answers = [answered(cluster, seed, most_chains) for cluster, seed, most_chains in every]
    if given.json:
        print(json.dumps(answers))
        return
    columns = ("accelerators", "seed", "most chains", "share", "bound", "gap", "s", "s of a processor", "chains")
    rows = [
        (
            str(each["accelerators"]), str(each["seed"]), each["most_chains"], f"{each['share']:.4f}",
            f"{each['bound']:.4f}", f"{each['gap']:.2%}", f"{each['seconds']:.2f}", f"{each['processor_s']:.2f}",
            " ".join(str(len(model["chains"])) for model in each["models"]),
        )
        for each in answers
    ]  # fmt: skip
    print_table("Five models on one cluster", columns, rows)


def answered(cluster: Cluster, seed: int, most_chains: int) -> dict[str, Any]:
    """Returns a fleet's plans, and a bound on its share."""
    fleet = fleet_of(cluster, seed, most_chains)
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    division = solve_fleet(fleet, time_limit_s=SECONDS, now_s=time.process_time)  # others may use the machine
    seconds, processor_s, share = (
        time.perf_counter() - begin_s,
        time.process_time() - begin_cpu_s,
        division.merit(fleet),
    )
    models = [
        {
            "rate_per_s": rate_per_s,
            "chains": [stages_document(chain) for chain in chains_of(stages)],
        }
        for (_, rate_per_s), stages in zip(fleet.models.values(), division.stages, strict=True)
    ]
    return {
        "accelerators": sum(cluster.devices.values()),
        "seed": seed,
        "most_chains": most_chains,
        "share": share,
        "bound": division.bound,
        "gap": division.bound / share - 1
        if share
        else math.inf,  # kernels that are compiled first may take all the time
        "seconds": seconds,
        "processor_s": processor_s,
        "models": models,
    }


def fleet_of(cluster: Cluster, seed: int, most_chains: int) -> Fleet:
    """Returns a fleet with rates of 1, 1/2, 1/3 and so on, shuffled, relative to that of one V100 without exits.

    A fifth to three fifths of a model's inputs reach its last block; the others leave mostly at early ramps.
    """
    rng, problems, alone = default_rng(seed), [], []
    devices = {name: Supply(count=count) for name, count in cluster.devices.items()}
    for (profile, length), num_blocks in zip(PROFILES, cluster.num_blocks, strict=True):
        every, left, bend = -(-num_blocks // 6), rng.uniform(0.2, 0.6), rng.uniform(0.4, 1.0)
        ramps = tuple(range(every - 1, num_blocks - 1, every))
        latency = {}
        for name in devices:
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
            devices=devices,
            link=cluster.link,
            bytes_per_sample_N=(length * WIDTH[profile] * 2.0,) * num_blocks,  # float16
            slo=Slo(latency_s=float(PATIENCE * whole_s_B[0])),
            objective=MaximizeRate(),
        )
        problems.append(problem)
    rates = np.array(alone) / (1 + rng.permutation(len(problems)))
    models = {str(place): FleetModel(*each) for place, each in enumerate(zip(problems, rates.tolist(), strict=True))}
    return Fleet(models=models, most_chains=most_chains)


if __name__ == "__main__":
    main()
