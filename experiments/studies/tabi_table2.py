"""Tabi, table 2: mean latencies of its cascades, from the latencies of single models, shares and pruning it prints.

Computed by the cost model of plans: one input at a time on an idle device, as the paper measures (section 7.1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from earlyexit.split import Split
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare
from optimizer.evaluate import evaluate
from optimizer.plan import Stage
from optimizer.problem import Link, MinimizeLatency, PlanProblem, Slo, Supply
from profiles.table import LatencyTable

LATENCY_S: Mapping[str, float] = {
    "DistilBERT": 0.007,
    "DeBERTa-base": 0.020,
    "RoBERTa-large": 0.026,
    "DeBERTa-large": 0.029,
}
"""Table 1, of MNLI; "for other tasks the relative performance is similar"."""
NO_WAIT_PER_S = 1e12
"""So many come that no batch is waited for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cascade:
    """One of the paper's."""

    models: tuple[str, ...]
    """Section 7.3.1."""
    answered: tuple[float, ...]
    """Per model, of all inputs (section 7.3.2; of three levels table 5)."""
    pruned_s: float
    """Of a later model's latency, what pruning saves (table 3)."""
    paper_s: float


CASCADES: Mapping[str, Cascade] = {
    "SST-2": Cascade(models=("DistilBERT", "RoBERTa-large"), answered=(0.698, 0.302), pruned_s=0.17, paper_s=0.0132),
    "MNLI": Cascade(models=("DistilBERT", "DeBERTa-large"), answered=(0.494, 0.506), pruned_s=0.154, paper_s=0.0203),
    "MNLI, three levels (table 5; nothing pruned)": Cascade(
        models=("DistilBERT", "DeBERTa-base", "DeBERTa-large"),
        answered=(0.456, 0.368, 0.176),
        pruned_s=0.0,
        paper_s=0.0220,
    ),
}
SST2_ALONE_S = 0.022
"""Table 2: INFaaS, which selects RoBERTa-large, on SST-2. Table 1 has 26 ms of the same model on MNLI."""


def mean_latency_s(latencies_s: Sequence[float], answered: Sequence[float]) -> float:
    """Of a chain of networks, one block each, an input at a time."""
    survival = [1.0 - before for before in accumulate((0.0, *answered[:-1]))]
    ends = tuple(range(1, len(latencies_s) + 1))
    problem = PlanProblem(
        num_blocks=len(latencies_s),
        ramps=ends[:-1] and tuple(end - 1 for end in ends[:-1]),
        survival_N=tuple(survival),
        latency={
            "V100": LatencyTable(
                batches=(1,),
                block_s_NB=np.array(latencies_s)[:, None],
                ramp_s_EB=np.zeros((len(latencies_s) - 1, 1)),
            )
        },
        devices={"V100": Supply(count=1)},
        link=Link(bandwidth_bytes_per_s=1e12),
        bytes_per_sample_N=(0.0,) * len(latencies_s),
        slo=Slo(latency_s=1.0),
        objective=MinimizeLatency(rate_per_s=NO_WAIT_PER_S),
        networks=ends if len(ends) > 1 else (),
    )
    splits = tuple(
        Split(first=block, end=block + 1, batch=1, ramps=(block,) if block in problem.ramps else ())
        for block in range(problem.num_blocks)
    )
    return evaluate(problem, [Stage(device="V100", replicas=1, splits=splits)]).mean_latency_s


def ours_s(cascade: Cascade, latency_s: Mapping[str, float] = LATENCY_S) -> float:
    """The first model's latency, and of each later one what pruning leaves."""
    small, *later = (latency_s[model] for model in cascade.models)
    return mean_latency_s([small, *(each * (1 - cascade.pruned_s) for each in later)], cascade.answered)


def run(effort: Effort) -> StudyResult:
    """All of it."""
    del effort  # it takes no time
    found = {name: ours_s(each) for name, each in CASCADES.items()}
    slower = SST2_ALONE_S / LATENCY_S["RoBERTa-large"]
    own_s = ours_s(CASCADES["SST-2"], {model: seconds * slower for model, seconds in LATENCY_S.items()})
    mixed_s = ours_s(CASCADES["SST-2"], {**LATENCY_S, "RoBERTa-large": SST2_ALONE_S})
    rows = (
        ("SST-2, table 1 as it stands", found["SST-2"] * 1000, found["SST-2"] / 0.0132 - 1),
        ("SST-2, RoBERTa-large 22.0 ms as in table 2", mixed_s * 1000, mixed_s / 0.0132 - 1),
        ("SST-2, both models at 22/26 of table 1", own_s * 1000, own_s / 0.0132 - 1),
        ("MNLI, table 1", found["MNLI"] * 1000, found["MNLI"] / 0.0203 - 1),
    )
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{name}: mean latency (ms)", found[name] * 1000, each.paper_s * 1000)
            for name, each in CASCADES.items()
        ),
        figures={"mean_latency_s": found},
        tables=(Table("By what is taken for the latencies", ("", "ms", "beside table 2"), rows),),
    )


STUDY = declare(__name__, run)
