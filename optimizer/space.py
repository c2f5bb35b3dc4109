"""Which plans a strategy chooses from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from earlyexit.network.boundary import AfterAnswer
from optimizer.decision import Strategy
from optimizer.evaluate import TOLERANCE
from optimizer.problem import PlanProblem, device_names

RampRule = Literal["choose", "all", "none", "split-ends"]
"""Which sets of ramps may be active: any, all of the model, none, or any of those at the ends of splits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """Everything that it does not rule out."""

    strategy: Strategy = "best"
    """Whose space it is, or of which it is a variant."""
    ramps: RampRule = "choose"
    splits_per_stage: bool = True
    """Whether a stage may have several splits."""
    several_stages: bool = True
    one_batch: bool = False
    """Whether all splits have the same batch size."""
    most_chains: int = 3
    """Side by side."""
    after_answer: tuple[AfterAnswer, ...] = ("stop",)
    """What inputs may do whose answer left, where the mean answer time is sought; else nothing is won by staying."""


SPACES: dict[Strategy, Space] = {
    "best": Space(after_answer=("stop", "stay")),
    # The model without exits, replicated.
    "stock": Space(strategy="stock", ramps="none", splits_per_stage=False, several_stages=False),
    # All ramps in one split: the batch shrinks (E3 section 2.3).
    "early-exit": Space(strategy="early-exit", ramps="all", splits_per_stage=False, several_stages=False),
    # Each split on replicas of its own, one batch size, ramps as the model has them (E3 sections 3.2 and 3.3).
    "e3": Space(strategy="e3", ramps="all", splits_per_stage=False, one_batch=True, most_chains=1),
    # One device runs all splits.
    "serial": Space(strategy="serial", several_stages=False, after_answer=("stop", "stay")),
    # The model as it is, replicated: ramps are switched on, answers leave early, and every input runs on to the end
    # (Apparate, SOSP'24).
    "apparate": Space(strategy="apparate", splits_per_stage=False, several_stages=False, after_answer=("stay",)),
    # The model as it is, replicated, with the exits that a search by recorded batches finds (PAME, ICS'22, section 6).
    "pame": Space(strategy="pame", splits_per_stage=False, several_stages=False),
}


def payable_names(problem: PlanProblem) -> tuple[str, ...]:
    """The devices that there are, and of which the budget pays for one."""
    budget = problem.budget_usd_per_hour
    most = math.inf if budget is None else budget * (1 + TOLERANCE)
    return tuple(name for name in device_names(problem) if problem.devices[name].usd_per_hour <= most)


def parts_of(problem: PlanProblem, space: Space, names: Sequence[str]) -> list[PlanProblem]:
    """The problem on some devices: all of them, or one after the other where a plan has one stage."""
    groups = [names] if space.several_stages else [(name,) for name in names]
    return [replace(problem, devices={name: problem.devices[name] for name in group}) for group in groups if group]
