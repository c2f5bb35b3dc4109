"""Exit policies: when an input may leave; `base.py` holds the contract. Without torch, until one is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from earlyexit.errors import PlanError
from earlyexit.named import imported

if TYPE_CHECKING:
    from earlyexit.policies.base import ExitPolicy


@dataclass(frozen=True, slots=True)
class PolicyKind:
    """One kind of exit policy."""

    make: str
    """Where its factory is."""
    takes: frozenset[str]
    """The fields of a plan's policy that it needs, all of them and no others."""


def _kind(make: str, *takes: str) -> PolicyKind:
    return PolicyKind(f"earlyexit.policies.{make}", frozenset(takes))


# A policy is a class in one of the files beside this one, or in one more, and one line here.
POLICIES = {
    "entropy": _kind("threshold:EntropyPolicy", "thresholds"),
    "confidence": _kind("threshold:ConfidencePolicy", "thresholds"),
    "patience": _kind("counting:PatiencePolicy", "patience"),
    "voting": _kind("counting:VotingPolicy", "votes"),
    "recorded": _kind("recorded:RecordedPolicy", "thresholds", "records"),
    "own": _kind("wrapper:own_policy", "own"),
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
