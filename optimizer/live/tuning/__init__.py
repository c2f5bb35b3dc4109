"""Tuners: they adapt the thresholds of a service to its stream, with an alarm on the loss of its answers."""

from collections.abc import Mapping

from optimizer.live.tuning.apparate import ApparateTuner
from optimizer.live.tuning.base import Tuner
from optimizer.live.tuning.guarantee import GuaranteeTuner
from optimizer.live.tuning.pame import PameTuner

TUNERS: Mapping[str, type[Tuner]] = {tuner.name: tuner for tuner in (GuaranteeTuner, ApparateTuner, PameTuner)}
"""`guarantee` (the default) has tested thresholds and an alarm. `apparate` and `pame` follow these papers."""
