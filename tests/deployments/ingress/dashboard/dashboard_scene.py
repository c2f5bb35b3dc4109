"""Snapshots of a service with two stages, with literal counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from deployments.ops.dashboard import ServiceFacts, Snapshot
from deployments.settings import ServeSettings
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.engine.engine import TimesRun
from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan, Plan, PolicySpec, Stage
from tests.model_cards import a_card

FIRST = Split(first=0, end=2, batch=8, ramps=(0, 1))
REST = Split(first=2, end=4, batch=4)


def placed(epoch: int = 0, **fields: Any) -> PlacedPlan:
    stages = (
        Stage(device="cpu", replicas=2, splits=(FIRST,)),
        Stage(device="emulated:P100", replicas=1, splits=(REST,)),
    )
    policy = PolicySpec(name="entropy", thresholds=0.1)
    return PlacedPlan(plan=Plan(stages=stages, policy=policy, epoch=epoch, **fields))


PACED = {"batch": [1], "block_s": [[1.0]], "ramp_s": [], "time_scale": 2.0}
FIELDS = {"model": "none", "plan": placed().plan, "slo_s": 0.1, "emulated": {"emulated:P100": PACED}}
FACTS = ServiceFacts(card=a_card(num_blocks=4), settings=ServeSettings.model_validate(FIELDS))


def ingress(name: str = "a", *, answered: int = 0, epoch: int = 0, **fields: Any) -> IngressReport:
    counts: dict[str, Any] = {
        "arrived": answered,
        "in_slo": answered,
        "exits": {},
        "drops": {},
        "unanswered": 0,
        "waiting": 0,
        "oldest_epoch": epoch,
    }
    return IngressReport(name=name, answered=answered, epoch=epoch, **counts | fields)


def ran(split: Split, size: int, batches: int, seconds: float = 0.0, *, length: int = 1) -> TimesRun:
    return TimesRun(
        first=split.first,
        end=split.end,
        ramps=split.ramps,
        size=size,
        batches=batches,
        tokens=size * batches * length,
        seconds=seconds,
        after_answer=split.after_answer,
    )


def replica(name: str, slot: str, *times: TimesRun, **fields: Any) -> ReplicaReport:
    others: dict[str, Any] = {"node": "n", "pid": 1, "device": "cpu", "epoch": 0, "waiting": 0}
    return ReplicaReport(slot=slot, replica=name, times=times, **others | fields)


def snapshot(
    at_s: float,
    *ingresses: IngressReport,
    replicas: Sequence[ReplicaReport] = (),
    described: Mapping[str, Any] | None = None,
    **fields: Any,
) -> Snapshot:
    others: dict[str, Any] = {
        "placed": placed(),
        "suspended": None,
        "controller": "none" if described is None else "answers",
        "history": (),
        "agreement": None,
    }
    return Snapshot(at_s=at_s, ingresses=ingresses, replicas=replicas, described=described, **others | fields)
