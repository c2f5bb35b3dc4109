"""PPipe's 48 problems (USENIX ATC '25): several models, each in several pipelines, on two types of GPUs.

Every pipeline that keeps a model's SLO, and that no other of the same sequence of types beats, is a column; the master
problem (`optimizer.master`) gives it GPUs. PPipe's own planner (v4, Gurobi) is beside it, its baseline without splits
(bl), and DART-r.

    python -m experiments.planning.ppipe [--data FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data import require_data
from optimizer.master import Cluster, Column, Demand, StageWork, highest_rate, solve_master

MICRO = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """Consecutive blocks on shares of one type of GPU."""

    first: int
    end: int
    device: int
    shares: int
    """Processes per GPU."""
    infer_us: float
    """Of one batch."""
    work_s: float
    """Of one share, per input: the slowest of computing, receiving and sending."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    """Partitions at one batch size."""

    batch: int
    partitions: tuple[Partition, ...]


def main() -> None:
    """Solve all problems and print how they compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with problems.json and tables.json")
    parser.add_argument("--json", action="store_true", help="print every problem's plan as JSON")
    given = parser.parse_args()
    folder = given.data or require_data("ppipe")
    tables = json.loads((folder / "tables.json").read_text())["tables_us"]
    problems = json.loads((folder / "problems.json").read_text())
    results = [solve(problem, tables) for problem in problems]
    print(json.dumps(results) if given.json else summary(problems, results))


def solve(problem: Mapping[str, Any], tables: Mapping[str, Any]) -> dict[str, Any]:
    """The best pipelines of all models; objective and its bound in requests per second over weight."""
    begin = time.perf_counter()
    names = tuple(problem["gpus"])
    models = problem["models"]
    pipelines: list[Pipeline] = []
    columns: list[Column] = []
    for place, model in enumerate(models):
        for pipeline in pipelines_of(model, names, tables):
            pipelines.append(pipeline)
            columns.append(column_of(pipeline, place, model["whole_gpus"]))
    cluster = Cluster(count_C=np.array([float(problem["gpus"][name]) for name in names]), usd_C=np.zeros(len(names)))
    demands = [Demand(weight=model["weight"], most_chains=None) for model in models]
    mixture = solve_master(columns, demands, cluster, seconds=3.0)
    # Among pipelines of one sequence of types the best ones by work are all that shares in parts need.
    relaxed = solve_master(columns, demands, cluster, seconds=1.5, whole_replicas=False)
    assert mixture is not None, f"{problem['id']}: no plan was found"
    assert relaxed is not None, f"{problem['id']}: no bound was found"
    rates_M = np.zeros(len(models))
    plans_M: list[list[list[dict[str, Any]]]] = [[] for _ in models]
    for q, replicas in mixture.replicas.items():
        rates_M[columns[q].model] += highest_rate(columns[q], replicas)
        plans_M[columns[q].model].append(described(pipelines[q], replicas, models[columns[q].model], names))
    objective = min(rate / model["weight"] for rate, model in zip(rates_M, models, strict=True))
    return {
        "id": problem["id"],
        "objective": objective,
        "gap": max(0.0, relaxed.bound / objective - 1),
        "seconds": time.perf_counter() - begin,
        "columns": len(columns),
        "pipelines": plans_M,
    }


def pipelines_of(model: Mapping[str, Any], names: Sequence[str], tables: Mapping[str, Any]) -> list[Pipeline]:
    """All that keep the SLO and that no other with the same types beats in work."""
    best: dict[tuple[int, ...], list[tuple[np.ndarray, Pipeline]]] = {}
    for pipeline in all_pipelines(model, names, tables):
        work_P = np.array([each.work_s / each.shares for each in pipeline.partitions])
        kept = best.setdefault(tuple(each.device for each in pipeline.partitions), [])
        if any((other_P <= work_P).all() for other_P, _ in kept):
            continue
        kept[:] = [other for other in kept if not (work_P <= other[0]).all()]
        kept.append((work_P, pipeline))
    return [pipeline for kept in best.values() for _, pipeline in kept]


def all_pipelines(model: Mapping[str, Any], names: Sequence[str], tables: Mapping[str, Any]) -> Iterator[Pipeline]:
    """All that keep the SLO, batch by batch."""
    sums = {
        (device, shares): np.cumsum(np.vstack([np.zeros(len(table[0])), np.array(table, dtype=float)]), axis=0)
        for device, name in enumerate(names)
        for shares in range(1, model["shares"][name] + 1)
        if (table := tables.get(f"{model['name']}-{name}-{shares}")) is not None
    }
    num_blocks = next(iter(sums.values())).shape[0] - 1
    transfer_us = model["transfer_us_per_input"]
    for batch in range(1, max(table.shape[1] for table in sums.values()) + 1):
        building_us = model["batch_build_factor"] * (batch - 1) / model["assumed_rate_per_s"] / MICRO
        room_us = model["sla_us"] - model["margin_us"] - building_us
        hosts = [host for host, table in sums.items() if table.shape[1] >= batch]
        for parts in range(1, model["max_parts"] + 1):
            for cuts in combinations(range(1, num_blocks), parts - 1):
                bounds = (0, *cuts, num_blocks)
                left_us = room_us - batch * sum(transfer_us[cut - 1] for cut in cuts)
                if left_us > 0:
                    yield from _hosted(model, bounds, batch, hosts, sums, left_us)


def _hosted(
    model: Mapping[str, Any],
    bounds: Sequence[int],
    batch: int,
    hosts: Sequence[tuple[int, int]],
    sums: Mapping[tuple[int, int], np.ndarray],
    room_us: float,
) -> Iterator[Pipeline]:
    """Pipelines of given cuts and batch, on all types and shares."""
    transfer_us = (0.0, *model["transfer_us_per_input"], 0.0)
    choices: list[list[Partition]] = []
    for first, end in pairwise(bounds):
        moved_us = max(transfer_us[first], transfer_us[end] if end < bounds[-1] else 0.0)
        choices.append([])
        for device, shares in hosts:
            infer_us = float(sums[device, shares][end, batch - 1] - sums[device, shares][first, batch - 1])
            sent_us = moved_us * shares * model["gpus_per_server"][device]
            work_s = max(infer_us / batch, sent_us) * MICRO
            choices[-1].append(
                Partition(first=first, end=end, device=device, shares=shares, infer_us=infer_us, work_s=work_s)
            )
    for partitions in product(*choices):
        if sum(each.infer_us for each in partitions) <= room_us:
            yield Pipeline(batch=batch, partitions=partitions)


def column_of(pipeline: Pipeline, place: int, whole_gpus: bool) -> Column:
    """A pipeline in the master problem: shares round up to whole GPUs per model, partition number and type."""
    stages = tuple(
        StageWork(
            device=each.device,
            seconds=each.work_s,
            per_device=each.shares,
            pool=(place, number) if whole_gpus else None,
        )
        for number, each in enumerate(pipeline.partitions)
    )
    return Column(stages=stages, model=place)


def described(
    pipeline: Pipeline, replicas: Sequence[int], model: Mapping[str, Any], names: Sequence[str]
) -> list[dict[str, Any]]:
    """A pipeline in the form of the reference plans."""
    transfer_us = model["transfer_us_per_input"]
    last = pipeline.partitions[-1].end
    return [
        {
            "dnn": model["name"],
            "layers": [each.first, each.end],
            "gpu": names[each.device],
            "mps": each.shares - 1,
            "bs": pipeline.batch,
            "num_gpu_per_server": model["gpus_per_server"][each.device],
            "num_gpu": count / each.shares,
            "lat_infer": each.infer_us,
            "lat_trans": pipeline.batch * transfer_us[each.end - 1] if each.end < last else 0.0,
            "xput": count / each.work_s,
        }
        for each, count in zip(pipeline.partitions, replicas, strict=True)
    ]


def summary(problems: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> str:
    """One line per problem, and what they say together."""
    lines = [f"{'problem':<60} {'ours':>9} {'v4':>9} {'ratio':>6} {'gap':>7} {'s':>5} {'columns':>7}"]
    for problem, result in zip(problems, results, strict=True):
        theirs = problem["reference"]["objective"]["v4"]
        ratio = result["objective"] / theirs
        name = problem["id"].replace("_bw-gbps", "").replace("_sla-multiplier-5", "")
        lines.append(
            f"{name[:28] + '..' + name[-30:] if len(name) > 60 else name:<60} {result['objective']:9.1f} {theirs:9.1f} "
            f"{ratio:6.4f} {result['gap']:7.2%} {result['seconds']:5.2f} {result['columns']:7d}"
        )
    seconds = [result["seconds"] for result in results]
    lines.append(f"seconds: median {statistics.median(seconds):.2f}, most {max(seconds):.2f}")
    for named in ("bl", "dart-r", "v4"):
        pairs = [
            (problem["reference"]["objective"][named], problem["reference"]["objective"]["v4"], result["objective"])
            for problem, result in zip(problems, results, strict=True)
            if named in problem["reference"]["objective"]
        ]
        ours, theirs = (statistics.mean(pair[k] / pair[0] for pair in pairs) for k in (2, 1))
        lines.append(f"over {named} ({len(pairs)} problems): ours {ours:.3f} x, v4 {theirs:.3f} x")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
