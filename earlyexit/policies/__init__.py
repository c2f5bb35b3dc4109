"""Exit policies: when an input may leave. `base.py` has the contract. torch is imported when a policy is created."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from earlyexit.errors import PlanError
from earlyexit.named import import_attribute

if TYPE_CHECKING:
    from earlyexit.policies.base import ExitPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKind:
    """One kind of exit policy."""

    make: str
    """Import path of the factory, as `module:name`."""
    takes: frozenset[str]
    """The fields of a plan's policy that this kind requires."""
    leaves: str
    """When an input may leave, as text for readers of plans."""
    mixes: bool
    """Whether the policy can judge mixed answers of a chain's networks. It then also accepts ensemble `weights`."""
    decays: bool
    """Whether scores are from 0 to 1 and a larger score is surer. If answers are tokens, it then accepts a `decay`."""


def _kind(make: str, takes: str, *, leaves: str, mixes: bool = False, decays: bool = False) -> PolicyKind:
    make = f"earlyexit.policies.{make}"
    return PolicyKind(make=make, takes=frozenset(takes.split()), leaves=leaves, mixes=mixes, decays=decays)


Score = Literal["entropy", "confidence", "share", "foreseen", "similar"]
"""Policies that compare a score with thresholds that `offramp calibrate` finds. Units: `profiles/scores.py`."""
# To add a policy, write its class in this folder and add one entry here. A score is also listed above.
POLICIES = {
    "entropy": _kind(
        "threshold:EntropyPolicy",
        "thresholds",
        leaves="the entropy of the label's probabilities, in nats, is at most the (calibrated) threshold",
        mixes=True,
    ),
    "confidence": _kind(
        "threshold:ConfidencePolicy",
        "thresholds",
        leaves="the score that the task gives the answer is at least the (calibrated) threshold",
        mixes=True,
        decays=True,
    ),
    "share": _kind(
        "threshold:SharePolicy",
        "thresholds confidences",
        leaves="the share of the map's values above the ramp's confidence is at least the threshold",
        mixes=True,
    ),
    "foreseen": _kind(
        "threshold:ForeseenPolicy",
        "thresholds",
        leaves="the ramp's classifier, before the answer is computed, predicts agreement with the full model with at "
        "least this probability",
        decays=True,
    ),
    "similar": _kind(
        "threshold:SimilarPolicy",
        "thresholds",
        leaves="the cosine of the states before and after the ramp's block is at least the threshold",
        decays=True,
    ),
    "tabi": _kind(
        "counting:TabiPolicy",
        "c k",
        leaves="a pseudo-random draw (a hash of the sample id) decides: never up to confidence c; above c with "
        "probability 1/(1+exp(-k((con-c)/(1-c)-1/2))). Tabi's rule (EuroSys'23, equation 4), without a guarantee",
        mixes=True,
    ),
    "patience": _kind("counting:PatiencePolicy", "patience", leaves="this many ramps in a row repeated the last label"),
    "voting": _kind("counting:VotingPolicy", "votes", leaves="this many ramps gave the same label"),
    "recorded": _kind(
        "ensemble:RecordedPolicy",
        "thresholds records",
        leaves="the score in its exit record, found by the caller's `ids`, passes the threshold; for experiments",
    ),
    "own": _kind(
        "wrapper:own_policy",
        "own",
        leaves="your function `module:function`, made with `exit_wrapper`, returns true",
        mixes=True,
    ),
}


def kind_of(name: str) -> PolicyKind:
    """Returns the kind with a name; raises PlanError with the known names."""
    if name not in POLICIES:
        raise PlanError(f"unknown exit policy {name!r}; known: {', '.join(POLICIES)}", at=("name",))
    return POLICIES[name]


def make_policy(name: str, *, weights: Mapping[int, float] | None = None, **settings: Any) -> ExitPolicy:
    """Returns a new policy. With an ensemble's `weights`, it judges the mixed answers of a chain's networks.

    Raises PlanError for an unknown name and for invalid settings.
    """
    policy: ExitPolicy = import_attribute(kind_of(name).make)(**settings)
    if weights is None:
        return policy
    from earlyexit.policies.ensemble import EnsemblePolicy

    return EnsemblePolicy(policy, weights)
