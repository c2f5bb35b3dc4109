"""Exit policies: when an input may leave; `base.py` holds the contract. Without torch, until one is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from earlyexit.errors import PlanError
from earlyexit.named import imported

if TYPE_CHECKING:
    from earlyexit.policies.base import ExitPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKind:
    """One kind of exit policy."""

    make: str
    """Where its factory is."""
    takes: frozenset[str]
    """The fields of a plan's policy that it needs, all of them and no others."""
    leaves: str
    """When an input may leave, for readers of plans."""


def _kind(make: str, *takes: str, leaves: str) -> PolicyKind:
    return PolicyKind(make=f"earlyexit.policies.{make}", takes=frozenset(takes), leaves=leaves)


# A policy is a class in one of the files beside this one, or in one more, and one entry here.
POLICIES = {
    "entropy": _kind(
        "threshold:EntropyPolicy",
        "thresholds",
        leaves="the entropy of the label's probabilities, in nats, is at most the (calibrated) threshold",
    ),
    "confidence": _kind(
        "threshold:ConfidencePolicy",
        "thresholds",
        leaves="the answer's score, as its task has it, is at least the (calibrated) threshold",
    ),
    "share": _kind(
        "threshold:SharePolicy",
        *("thresholds", "confidences"),
        leaves="the share of its principal values above the ramp's confidence is at least the threshold",
    ),
    "patience": _kind(
        "counting:PatiencePolicy",
        "patience",
        leaves="so many ramps in a row repeated the label of the one before",
    ),
    "voting": _kind("counting:VotingPolicy", "votes", leaves="so many ramps gave the same label"),
    "recorded": _kind(
        "recorded:RecordedPolicy",
        *("thresholds", "records"),
        leaves="its exit record, found by the caller's `ids`, passes the threshold; for experiments",
    ),
    "own": _kind(
        "wrapper:own_policy",
        "own",
        leaves="your function, named as `module:function`, says so; made with `exit_wrapper`",
    ),
}
if TYPE_CHECKING:
    PolicyName = str
else:  # what reads files refuses other names, and lists these
    PolicyName = Literal[tuple(POLICIES)]


def kind_of(name: str) -> PolicyKind:
    """Raises PlanError with the known names."""
    if name not in POLICIES:
        raise PlanError(f"unknown exit policy {name!r}; known: {', '.join(POLICIES)}")
    return POLICIES[name]


def make_policy(name: str, **settings: Any) -> ExitPolicy:
    """The policy of that name, imported now; raises PlanError for settings that it refuses."""
    policy: ExitPolicy = imported(kind_of(name).make)(**settings)
    return policy
