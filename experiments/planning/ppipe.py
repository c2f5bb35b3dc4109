"""Solves PPipe's 48 problems (USENIX ATC '25): several models, each in several pipelines, on two types of GPUs.

Pipelines are columns of a master problem (`experiments.planning.pipelines`). The output
compares with PPipe's own planner (v4, Gurobi), its baseline without splits (bl), and DART-r. Then the same problems
are solved with exits: a ramp after every block, with the survival of a ResNet's records at the same depths. Each plan
without exits is checked against the measured tables.

    python -m experiments.planning.ppipe [--data FOLDER] [--json]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from experiments.data import require_data
from experiments.kit import print_table
from experiments.planning.pipelines import Pipeline, Segments, best_mixture, best_pipelines
from experiments.problems import PROBLEMS
from optimizer.problems.problem_file import read_problem
from profiles.table import FloatArray

Tables = Mapping[str, Sequence[Sequence[float]]]
"""By model, GPU and processes per GPU: microseconds of each block at batches 1, 2 and so on."""
US_PER_S = 1e6
RAMP_SHARE = 0.053
"""Seconds of a ramp relative to a mean block, as in profiles/catalogue.yaml."""
RESNET = "resnet50_16_v100"
"""The problem file with the survival of a ResNet-32's records on CIFAR-10."""
SECONDS = 2.0  # time limit of the master problem; its relaxation has a quarter of it
CLOSE, NOISE = 1e-6, 0.01  # tolerances of shares, and of the published (rounded) counts and microseconds


def main() -> None:
    """Solves all problems and prints the comparison."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="a folder with problems.json and tables.json")
    parser.add_argument("--json", action="store_true", help="print every problem's plan as JSON")
    given = parser.parse_args()
    folder = given.data or require_data("ppipe")
    tables = json.loads((folder / "tables.json").read_text())["tables_us"]
    problems = json.loads((folder / "problems.json").read_text())
    survival_N = np.array(read_problem(PROBLEMS / f"{RESNET}.yaml").problem.survival_N)
    results = [solve(problem, tables) for problem in problems]
    for problem, result in zip(problems, results, strict=True):
        check(problem, tables, result)
        result["with_exits"] = solve(problem, tables, survival_N)["objective"]
    if given.json:
        print(json.dumps(results))
    else:
        print_comparison(problems, results)


def solve(problem: Mapping[str, Any], tables: Tables, survival_N: FloatArray | None = None) -> dict[str, Any]:
    """Returns the best pipelines of all models; objective and bound are requests per second over weight.

    `survival_N` is the share of inputs that reaches each block of some network. Without it no input leaves early.
    """
    begin = time.perf_counter()
    names, models = tuple(problem["gpus"]), problem["models"]
    columns = [
        replace(pipeline, model=place, whole_devices=model["whole_gpus"])
        for place, model in enumerate(models)
        for survival in ([None] if survival_N is None else [None, survival_N])
        for count in range(1, model["max_parts"] + 1)
        for pipeline in best_pipelines(segments_of(model, names, tables, survival), count)
    ]
    if len({column.model for column in columns}) < len(models):  # a model has no pipeline within its SLO
        return {"id": problem["id"], "objective": 0.0, "gap": 0.0, "seconds": 0.0, "pipelines": [[] for _ in models]}
    weight_M = np.array([float(model["weight"]) for model in models])
    count_C = np.array([float(problem["gpus"][name]) for name in names])
    objective, bound, replicas_of = best_mixture(columns, weight_M, count_C, SECONDS)
    plans_M: list[list[list[dict[str, Any]]]] = [[] for _ in models]
    for q, replicas in replicas_of.items():
        place = columns[q].model
        plans_M[place].append(described(columns[q], replicas, models[place], names, tables))
    return {
        "id": problem["id"],
        "objective": objective,
        "gap": max(0.0, bound / objective - 1),
        "seconds": time.perf_counter() - begin,
        "pipelines": plans_M,
    }


def segments_of(
    model: Mapping[str, Any], names: Sequence[str], tables: Tables, survival_N: FloatArray | None
) -> Segments:
    """Returns the costs of each run of a model's blocks on shares of GPUs.

    With exits, all ramps run, and batches shrink at them. The next partition refills its batches, which takes
    `batch_build_factor` of the time in which this number of inputs arrives.
    """
    hosts = {
        (device, shares): np.array(tables[key], dtype=float)
        for device, name in enumerate(names)
        for shares in range(1, model["shares"][name] + 1)
        if (key := f"{model['name']}-{name}-{shares}") in tables
    }
    num_blocks, most = len(next(iter(hosts.values()))), max(table.shape[1] for table in hosts.values())
    share_K = np.ones(num_blocks + 1)
    if survival_N is not None:
        share_K = np.interp(np.linspace(0, 1, num_blocks + 1), np.linspace(0, 1, len(survival_N) + 1)[:-1], survival_N)
    transfer_us_K = np.array([0.0, *model["transfer_us_per_input"], 0.0])
    inputs_us = model["batch_build_factor"] / model["assumed_rate_per_s"] * US_PER_S
    shape = (len(hosts), most, num_blocks + 1, num_blocks + 1)
    seconds_HBKK, work_HBKK = np.full(shape, np.inf), np.full(shape, np.inf)
    for h, ((device, shares), table_NB) in enumerate(hosts.items()):
        if survival_N is not None:
            table_NB[:-1] += RAMP_SHARE * table_NB.mean(axis=0)
        batch_B = np.arange(1.0, table_NB.shape[1] + 1)
        moved_us_K = shares * model["gpus_per_server"][device] * transfer_us_K * share_K
        for first in range(num_blocks):
            left_K = share_K[first:] / share_K[first]
            blocks = zip(left_K, table_NB[first:], strict=False)
            infer_us_KB = np.cumsum([np.interp(batch_B * left, batch_B, row) for left, row in blocks], axis=0)
            refill_us_K = inputs_us * (1 / share_K[first + 1 :] - 1 / share_K[first])
            refill_us_K[-1] = 0.0
            after_us_KB = np.outer(left_K[1:] * transfer_us_K[first + 1 :] + refill_us_K, batch_B)
            moved_us_K1 = np.maximum(moved_us_K[first], moved_us_K[first + 1 :, None])
            at = h, slice(len(batch_B)), first, slice(first + 1, None)
            seconds_HBKK[at] = (infer_us_KB + after_us_KB).T / US_PER_S
            work_HBKK[at] = np.maximum(infer_us_KB / batch_B * share_K[first], moved_us_K1).T / US_PER_S
    limit_B = (model["sla_us"] - model["margin_us"] - inputs_us * np.arange(most)) / US_PER_S
    return Segments(hosts=tuple(hosts), seconds_HBKK=seconds_HBKK, work_HBKK=work_HBKK, limit_B=limit_B)


def described(
    pipeline: Pipeline, replicas: Sequence[int], model: Mapping[str, Any], names: Sequence[str], tables: Tables
) -> list[dict[str, Any]]:
    """Returns a pipeline in the form of the reference plans."""
    transfer_us, batch = [*model["transfer_us_per_input"], 0.0], pipeline.batch + 1
    parts = zip(pairwise(pipeline.bounds), pipeline.hosts, pipeline.work, replicas, strict=True)
    return [
        {
            "dnn": model["name"],
            "layers": [first, end],
            "gpu": names[device],
            "mps": shares - 1,
            "bs": batch,
            "num_gpu_per_server": model["gpus_per_server"][device],
            "num_gpu": count / shares,
            "lat_infer": sum(row[batch - 1] for row in tables[f"{model['name']}-{names[device]}-{shares}"][first:end]),
            "lat_trans": batch * transfer_us[end - 1],
            "xput": count / work,
        }
        for (first, end), (device, shares), work, count in parts
    ]


def check(problem: Mapping[str, Any], tables: Tables, answer: Mapping[str, Any]) -> None:
    """Recomputes an answer without exits from the tables; raises ValueError if it breaks a rule or differs."""
    gpus: dict[str, float] = defaultdict(float)
    objective = math.inf
    for model, pipelines in zip(problem["models"], answer["pipelines"], strict=True):
        shares_of: dict[tuple[int, str], float] = defaultdict(float)
        rate = 0.0
        for partitions in pipelines:
            rate += _checked_rate(model, tables, partitions)
            for number, part in enumerate(partitions):
                shares_of[number, part["gpu"]] += part["num_gpu"]
        for (_, name), count in shares_of.items():
            gpus[name] += math.ceil(count - NOISE) if model["whole_gpus"] else count
        objective = min(objective, rate / model["weight"])
    _require(math.isclose(objective, answer["objective"], rel_tol=CLOSE), f"{answer['id']}: objective is {objective}")
    for name, count in gpus.items():
        _require(count <= problem["gpus"][name] + CLOSE, f"{answer['id']}: {count} {name}")


def _checked_rate(model: Mapping[str, Any], tables: Tables, partitions: Sequence[Mapping[str, Any]]) -> float:
    """Returns the rate of a pipeline after a check of its latency and figures."""
    sizes = {part["bs"] for part in partitions}
    transfer_us = model["transfer_us_per_input"]
    rates, latency_us, before = [], float(model["margin_us"]), 0
    for part in partitions:
        first, end = part["layers"]
        shares, batch = part["mps"] + 1, part["bs"]
        _require(first == before < end and shares <= model["shares"][part["gpu"]], f"{model['name']}: {part}")
        before = end
        rows = tables[f"{model['name']}-{part['gpu']}-{shares}"]
        infer_us = sum(row[batch - 1] for row in rows[first:end])
        received_us, sent_us = (0.0 if at in (0, len(rows)) else transfer_us[at - 1] for at in (first, end))
        servers = model["gpus_per_server"][list(model["shares"]).index(part["gpu"])]
        slowest_us = max(infer_us / batch, received_us * shares * servers, sent_us * shares * servers)
        count = part["num_gpu"] * shares
        _require(abs(count - round(count)) < NOISE, f"{model['name']}: {count} shares are not whole")
        rates.append(count / slowest_us * US_PER_S)
        for name, value in {"xput": rates[-1], "lat_infer": infer_us, "lat_trans": batch * sent_us}.items():
            is_same = math.isclose(part[name], value, rel_tol=1e-4, abs_tol=NOISE)
            _require(is_same, f"{model['name']}: {name} is {value}: {part}")
        latency_us += infer_us + batch * sent_us
    _require(before == len(rows) and len(partitions) <= model["max_parts"], f"{model['name']}: {partitions}")
    _require(len(sizes) == 1 or not model["same_batch"], f"{model['name']}: batches {sizes}")
    latency_us += model["batch_build_factor"] * (max(sizes) - 1) / model["assumed_rate_per_s"] * US_PER_S
    _require(latency_us <= model["sla_us"] * (1 + CLOSE), f"{model['name']}: latency {latency_us} us: {partitions}")
    return float(min(rates))


def _require(is_true: bool, otherwise: str) -> None:
    if not is_true:
        raise ValueError(otherwise)


def print_comparison(problems: Sequence[Mapping[str, Any]], results: Sequence[Mapping[str, Any]]) -> None:
    """Prints a row for each problem, and summaries."""
    rows, ratios = [], defaultdict(list)
    for problem, result in zip(problems, results, strict=True):
        objective, of = result["objective"], problem["reference"]["objective"]
        exits, name = result["with_exits"] / (objective or math.inf), problem["id"].replace("_sla-multiplier-5", "")
        figures = objective, of["v4"], f"{objective / of['v4']:.4f}", f"{result['gap']:.2%}", f"{result['seconds']:.2f}"
        rows.append((name[:20] + ".." + name[-50:], *figures, f"{exits:.2f}"))
        ratios["ours with exits / without"].append(exits)
        for other in sorted({"bl", "dart-r"} & set(of)):
            ratios[f"ours / {other}"].append(objective / of[other])
            ratios[f"v4 / {other}"].append(of["v4"] / of[other])
    print_table("PPipe's problems", ("problem", "ours", "v4", "ours / v4", "gap", "s", "with exits / without"), rows)
    means = [(name, f"{statistics.mean(values):.3f}", len(values)) for name, values in ratios.items()]
    print_table("", ("mean of", "ratio", "problems"), means)
    seconds = [result["seconds"] for result in results]
    print(f"seconds: median {statistics.median(seconds):.2f}, most {max(seconds):.2f}")


if __name__ == "__main__":
    main()
