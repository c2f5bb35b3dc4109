"""What the page is made of: the service as it was at one moment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from deployments.controller.intake import IngressIntake, Interval
from deployments.wire.messages import IngressReport, ReplicaReport
from earlyexit.codecs.base import Codec
from earlyexit.network.chain import Chain
from optimizer.placement import PlacedPlan

ControllerState = Literal["none", "answers", "silent"]
"""There is none; it answers; it does not, and what it said last is old."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceFacts:
    """What stays while a service runs."""

    model: str
    chain: Chain
    """Its networks, one after the other; of most models that is one."""
    slo_s: float | None
    emulated: Mapping[str, float]
    """By accelerator type that is not there: our seconds per emulated one."""
    generates: bool = False
    """Whether answers are steps of sequences: each is a token, or takes in a part of a prompt."""
    image: Mapping[str, Any] | None = None
    """Of a model of images, how one comes to its size, and the types of its files; None of others."""


def image_facts(codec: Codec[Any]) -> Mapping[str, Any] | None:
    """What the page must know to show an image as the model sees it; None for models of other inputs."""
    codec = codec.of(0)  # callers send what a chain's first network takes
    return {**codec.spec(), "types": codec.content_types} if codec.name == "image" else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counts of all processes, which only grow, and the controller's last report."""

    at_s: float
    """Wall clock."""
    placed: PlacedPlan
    """The plan that the ingress which looks goes by."""
    suspended: str | None
    """Why nothing is served; None where something is."""
    ingresses: Sequence[IngressReport]
    """None that answered: empty, and no figure can be given."""
    replicas: Sequence[ReplicaReport]
    """Of the slots of the plan."""
    controller: ControllerState
    described: Mapping[str, Any] | None
    """As `GET /plan`; None where there is no controller, or it never answered."""
    history: Sequence[Mapping[str, Any]]
    """As `GET /plan/history`."""
    agreement: float | None
    """Of the probes so far of the ingress that looks."""


def within(snapshots: Sequence[Snapshot], seconds: float) -> Sequence[Snapshot]:
    """Those of the last seconds before the newest, in order."""
    return [each for each in snapshots if each.at_s >= snapshots[-1].at_s - seconds]


def under_present_plan(snapshots: Sequence[Snapshot]) -> Sequence[Snapshot]:
    """Those since the newest's plan came."""
    return [each for each in snapshots if each.placed.epoch == snapshots[-1].placed.epoch]


def between(before: Snapshot, now: Snapshot) -> Interval | None:
    """What all ingresses did meanwhile; None where they could not be asked, or no time went by."""
    if not before.ingresses or now.at_s <= before.at_s:
        return None
    intake = IngressIntake()
    intake.take(before.ingresses, before.at_s)
    return intake.take(now.ingresses, now.at_s)
