"""What the live comparison of a cascade serves: one chain, and a plan for each way of answering by it.

- `large`: the reference alone, without ramps.
- `large-ramps`: the reference alone with the ramps and thresholds of its own calibration.
- `ends`: the small model before the large one, inputs leaving at the small one's end only, by a threshold that is
  tested alone (`offramp calibrate --ramps ends`): bolder than one whose promise holds for all sets of ramps.
- `cascade`: what a service of the chain serves by itself, the best plan by any of the chain's calibrations.

Every plan is the planner's for one stage on the same cores, from one profile of the chain.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from deployments.settings import ServeSettings
from earlyexit.boundary import FloatName
from earlyexit.codecs import find_codec
from earlyexit.errors import PlanError
from earlyexit.store import read_card
from experiments.live.service import NEVER_S, STATE, hand_control
from experiments.trained.mpnet import GUARANTEE
from offramp.jobs.calibration import CalibrateJob, calibrate_records, read_calibration
from offramp.jobs.planning import NoPlanAnswer, answer
from offramp.jobs.profiling import ProfileJob, profile_model
from offramp.service.calibrations import calibrated_parts, most_worth
from offramp.service.file import read_service
from offramp.service.parts import ServiceParts, read_parts
from offramp.service.plan import service_problem
from optimizer.calibration_file import CalibrationCard
from optimizer.evaluate import promised
from optimizer.networks import Part
from optimizer.plan import Plan, PolicySpec
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import ProblemFile
from profiles.table import LatencyTable

LARGE, LARGE_RAMPS, ENDS, CASCADE = "large", "large-ramps", "ends", "cascade"
SIDES = (LARGE, LARGE_RAMPS, ENDS, CASCADE)
SLO_FACTOR, SLACK = 12.5, 0.5
"""As `experiments.peers.plans` has them: the SLO in runs of the large model on a text, and what is left for queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What is served, and on what."""

    chain: Path
    texts: tuple[str, ...]
    dtype: FloatName
    workers: int
    batch_limit: int
    folder: Path
    """Where service files are written."""
    threads: int = 1
    """Of each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """One service, and the plans that it follows in turns."""

    settings: ServeSettings
    plans: Mapping[str, Plan]
    slo_s: float
    mean_length: int
    table: LatencyTable
    """Of the whole chain, with a row for every ramp."""


def make_sides(setup: Setup, *, repeats: int = 5) -> Sides:
    """Profile the chain, plan every side. Raises PlanError where a side has no plan within the SLO."""
    length = mean_length(setup)
    table = _profiled(setup, length, repeats)
    chain = read_card(setup.chain).chain
    first = chain.starts[-1]
    slo_s = SLO_FACTOR * float(table.block_s_NB[first:, 0].sum())
    parts = _parts(setup, setup.chain, "chain", _rows(table, chain.ramps, 0), slo_s)
    reference = read_card(setup.chain).members(setup.chain)[-1]
    ramps = tuple(ramp for ramp in chain.ramps if ramp >= first)
    alone = _parts(setup, reference, "reference", _rows(table, ramps, first), slo_s)
    ends, every = (_tested_alone(parts, ramps) for ramps in (chain.end_ramps, chain.ramps))
    whole = service_problem(every)
    in_chain = Part(whole=whole, used=(len(chain.lengths) - 1,)).in_chain
    large, large_ramps = _plan(_with_ramps(alone, ())), _plan(alone)
    plans = {
        LARGE: replace(large, stages=in_chain(large.stages), networks=chain.networks),
        LARGE_RAMPS: replace(
            large_ramps,
            stages=in_chain(large_ramps.stages),
            policy=_shifted(read_calibration(reference), first),
            networks=chain.networks,
        ),
        ENDS: _plan(ends),
        CASCADE: _chosen(parts),
    }
    control = hand_control(whole, every.exits.policy, state="cascade")
    settings = read_service(setup.folder / "chain.yaml").settings
    changes = {
        "plan": plans[CASCADE],
        "control": control,
        "slots": {"cpu": 1},
        "probe_share": 0.0,
        "threads_per_replica": setup.threads,
    }
    return Sides(
        settings=settings.model_copy(update=changes), plans=plans, slo_s=slo_s, mean_length=length, table=table
    )


def make_plan(setup: Setup) -> tuple[ServeSettings, Plan, float]:
    """Profile any model or chain, and plan it for one stage; gives the service, its plan and the SLO.

    Raises PlanError where there is no plan within the SLO.
    """
    table = _profiled(setup, mean_length(setup), repeats=3)
    chain = read_card(setup.chain).chain
    slo_s = SLO_FACTOR * float(table.block_s_NB[chain.starts[-1] :, 0].sum())
    parts = _parts(setup, setup.chain, "filling", _rows(table, chain.ramps, 0), slo_s)
    plan = replace(_plan(parts), networks=chain.networks)
    control = hand_control(service_problem(parts), parts.exits.policy, state="filling")
    changes = {
        "plan": plan,
        "control": control,
        "slots": {"cpu": 1},
        "probe_share": 0.0,
        "threads_per_replica": setup.threads,
    }
    return read_service(setup.folder / "filling.yaml").settings.model_copy(update=changes), plan, slo_s


def mean_length(setup: Setup) -> int:
    """Tokens of a text, as the first network reads it."""
    codec = find_codec(read_card(setup.chain).codec, setup.chain)
    encoded = codec.encode(codec.from_columns({"text": np.array(setup.texts, dtype=object)}), truncate=True)
    return round(float(np.mean([each.length for each in encoded])))


def _profiled(setup: Setup, length: int, repeats: int) -> LatencyTable:
    batches = tuple(2**k for k in range(setup.batch_limit.bit_length()))
    profile, _ = profile_model(
        setup.chain,
        ProfileJob(dtype=setup.dtype, batches=batches, lengths=(length,), threads=setup.threads, repeats=repeats),
    )
    return profile.at(length)


def _rows(table: LatencyTable, ramps: tuple[int, ...], first: int) -> dict[str, Any]:
    """The table from a block on, as a service file writes it out; `ramps` are those whose rows come last."""
    ramp_s = table.ramp_s_EB[len(table.ramp_s_EB) - len(ramps) :]
    return {
        "batch": list(table.batches),
        "block_s": table.block_s_NB[first:].tolist(),
        "ramp_s": ramp_s.tolist(),
        "length": table.length,
    }


def _parts(setup: Setup, model: Path, name: str, latency: dict[str, Any], slo_s: float) -> ServiceParts:
    """A service of the model on these cores, by way of its file."""
    document = {
        "schema_version": 1,
        "name": name,
        "model": {"folder": str(model.resolve()), "dtype": setup.dtype, "latency": {"cpu": latency}},
        "slo": {"latency_s": slo_s, "slack": SLACK},
        "cluster": {"devices": {"cpu": {"count": setup.workers}}},
        "planner": {
            "strategy": "serial",
            "max_stages": 1,
            "period_s": NEVER_S,
            "state": str((STATE / f"{name}.sqlite").resolve()),
        },
    }
    setup.folder.mkdir(parents=True, exist_ok=True)
    path = setup.folder / f"{name}.yaml"
    path.write_text(json.dumps(document, indent=1), encoding="utf-8")
    return read_parts(path)


def _with_ramps(parts: ServiceParts, ramps: tuple[int, ...]) -> ServiceParts:
    """The same service, of whose ramps only these may be on."""
    thresholds = {ramp: value for ramp, value in parts.exits.thresholds.items() if ramp in ramps}
    return replace(parts, exits=replace(parts.exits, thresholds=thresholds))


def _tested_alone(parts: ServiceParts, ramps: tuple[int, ...]) -> ServiceParts:
    """The same service, with thresholds for these ramps and no others, tested without the others."""
    card = calibrate_records(parts.exits.records, CalibrateJob(guarantee=GUARANTEE, ramps=ramps))
    spec = card.policy_spec()
    assert isinstance(spec.thresholds, Mapping)
    return replace(parts, exits=replace(parts.exits, policy=spec, thresholds=spec.thresholds))


def _chosen(parts: ServiceParts) -> Plan:
    """By the calibration of the chain by which a plan is worth most."""
    every = [(each, service_problem(each), _plan(each)) for each in calibrated_parts(parts)]
    return most_worth(every)[2]


def _plan(parts: ServiceParts) -> Plan:
    """Stages, policy and what they promise; without a promise admission would keep the limit of the side before."""
    problem: PlanProblem = service_problem(parts)
    file = ProblemFile(problem=problem, records=parts.exits.records, thresholds=parts.exits.thresholds)
    found = answer(file, "serial", solve, compared=())
    if isinstance(found, NoPlanAnswer):
        raise PlanError(found.message)
    stages, figures = found.planned.stages, found.planned.figures
    has_ramps = any(split.ramps for stage in stages for split in stage.splits)
    return Plan(
        stages=stages,
        policy=parts.exits.policy if has_ramps else None,
        predicted=promised(problem, figures),
        networks=problem.networks,
    )


def _shifted(calibration: CalibrationCard, first: int) -> PolicySpec:
    """A network's own policy, with its ramps as the chain numbers them."""
    spec = calibration.policy_spec()
    assert isinstance(spec.thresholds, Mapping)
    return replace(spec, thresholds={first + ramp: value for ramp, value in spec.thresholds.items()})
