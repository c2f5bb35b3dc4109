"""Whether a new plan does what it promised, or the one before comes back and the new one is not chosen for a while.

E3 drops what cannot be served in time (section 3.1) and trusts its plan; here drops and late answers are held against
the plan that caused them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from earlyexit.errors import DataError, PlanError
from optimizer.plan import Stage
from optimizer.problem import PlanProblem

LEAST_INPUTS = 100
"""Of fewer, a share is not known to a tenth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """What an application did over a while; differences of the ingresses' counts."""

    seconds: float
    arrived: int
    """Inputs that came, refused ones too."""
    answered: int
    in_slo: int
    dropped: int
    """Inputs that were refused, or given up."""

    def __post_init__(self) -> None:
        if min(self.seconds, self.arrived, self.in_slo, self.dropped) < 0 or self.in_slo > self.answered:
            raise DataError(f"counts must be at least 0, and answers in time be among the answers, not {self}")

    @property
    def offered_rps(self) -> float:
        return self.arrived / self.seconds if self.seconds > 0 else 0.0

    @property
    def goodput_rps(self) -> float:
        return self.in_slo / self.seconds if self.seconds > 0 else 0.0

    def kept(self, predicted_rps: float) -> float:
        """Share of the goodput expected that came: the rate predicted, or all that is offered where that is less.

        Of less than the plan can do, only what was dropped or late is missing, not what is still under way.
        """
        if self.offered_rps > predicted_rps:
            return self.goodput_rps / predicted_rps
        settled = self.answered + self.dropped
        return self.in_slo / settled if settled else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A plan that was just switched to, beside the one before."""

    epoch: int
    predicted_rps: float
    """The plan's rate by its forecast."""
    before: Delivered | None
    """Under the plan before, say over its last period; None: nothing to go back to, or nothing measured."""
    before_predicted_rps: float

    def __post_init__(self) -> None:
        if self.predicted_rps <= 0 or self.before_predicted_rps <= 0:
            raise PlanError("a plan on trial, and the one before, must be predicted a rate above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """The end of a trial."""

    rolls_back: bool
    words: str


def judge(
    trial: Trial,
    served: Delivered,
    *,
    margin: float,
    settle_s: float,
    patience_s: float,
) -> Judgement | None:
    """Judges a plan by what was `served` since the switch; returns None while it is too early.

    It is too early before `settle_s`, and while there are few inputs, up to `patience_s`. (Inputs are counted, not
    answers: a plan that answers nothing must not wait for ever.) The plan is rolled back where more than `margin` of
    the goodput expected is missing, the plan before kept more of its own promise, and would give more of what is
    offered now.
    """
    has_few = served.arrived < LEAST_INPUTS
    if served.seconds < settle_s or (has_few and served.seconds < patience_s):
        return None
    if has_few:
        words = f"only {served.arrived} inputs came in {served.seconds:.0f} s, nothing tells"
        return Judgement(rolls_back=False, words=f"keeps plan {trial.epoch}: {words}")
    kept, expected_rps = served.kept(trial.predicted_rps), min(served.offered_rps, trial.predicted_rps)
    promise = (
        f"plan {trial.epoch} gives {served.goodput_rps:.4g}/s in time, {kept:.1%} of what was expected "
        f"({expected_rps:.4g}/s)"
    )
    if kept >= 1 - margin:
        return Judgement(rolls_back=False, words=f"keeps the plan: {promise}")
    if trial.before is None:
        return Judgement(rolls_back=False, words=f"keeps the plan: {promise}; none was measured before it")
    before_kept = trial.before.kept(trial.before_predicted_rps)
    before_rps = before_kept * min(served.offered_rps, trial.before_predicted_rps)
    is_worse = before_kept > kept and before_rps > kept * expected_rps
    before = f"the one before kept {before_kept:.1%} of its own and would give {before_rps:.4g}/s"
    return Judgement(
        rolls_back=is_worse, words=f"{'rolls back' if is_worse else 'keeps the plan'}: {promise}; {before}"
    )


CLEAR_SHARE = 0.1
"""Share of inputs that reach a block; a forecast that differs by more is of another stream."""
CLEAR_FACTOR = 1.2
"""The same for the rate that is asked for, as a factor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    """A plan that was rolled back, and the problem that it was chosen for."""

    stages: tuple[Stage, ...]
    problem: PlanProblem
    until: int
    """The first period in which it may be chosen again."""


def is_blamed(blamed: Sequence[Blame], stages: Sequence[Stage], problem: PlanProblem) -> bool:
    """Whether a plan is blamed for a problem that is not clearly another."""
    return any(blame.stages == tuple(stages) and not clearly_another(blame.problem, problem) for blame in blamed)


def clearly_another(one: PlanProblem, other: PlanProblem) -> bool:
    """Whether two problems differ enough for a plan that failed under one to be tried under the other."""
    if one.num_blocks != other.num_blocks or one.ramps != other.ramps or one.slo != other.slo:
        return True
    if {name: supply.count for name, supply in one.devices.items()} != {
        name: supply.count for name, supply in other.devices.items()
    }:
        return True
    apart = max(abs(here - there) for here, there in zip(one.survival_N, other.survival_N, strict=True))
    return apart > CLEAR_SHARE or _rates_differ(one, other)


def _rates_differ(one: PlanProblem, other: PlanProblem) -> bool:
    rate_per_s, other_per_s = one.required_per_s, other.required_per_s
    if rate_per_s is not None and other_per_s is not None and type(one.objective) is type(other.objective):
        low, high = sorted((rate_per_s, other_per_s))
        return high > low * CLEAR_FACTOR
    return type(one.objective) is not type(other.objective)
