"""The tuners there are, by name."""

from __future__ import annotations

from collections.abc import Mapping

from earlyexit.errors import PlanError
from optimizer.live.tuning.apparate import ApparateTuner
from optimizer.live.tuning.base import Question, Tuner
from optimizer.live.tuning.guarantee import GuaranteeTuner
from optimizer.live.tuning.pame import PameTuner

TUNERS: Mapping[str, type[Tuner]] = {kind.name: kind for kind in (GuaranteeTuner, ApparateTuner, PameTuner)}
"""`guarantee`: tested thresholds and an alarm, the default; `apparate` and `pame`: those papers'."""


def make_tuner(name: str, question: Question) -> Tuner:
    """Raises PlanError with the known names."""
    if name not in TUNERS:
        raise PlanError(f"unknown tuner {name!r}; known: {', '.join(TUNERS)}")
    return TUNERS[name](question)
