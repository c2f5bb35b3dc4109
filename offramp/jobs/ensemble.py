"""An ensemble of a chain's networks at calibration: its weights, whether it gains, and what exits say with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.chain import Chain
from optimizer.ensemble import RULES, Gain, fitted, held_out_gain

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.tasks.base import IntArray, Task, ValueArray
    from profiles.scores import BoolArray

SERVED = "likelihood"
"""The rule whose weights are served; those of the others are told beside them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ensemble:
    """What was found on the rows that weights are fitted on."""

    weights: Mapping[int, float]
    """By the end of a network, as policies take them."""
    by_rule: Mapping[str, Mapping[int, float]]
    """Those of every rule."""
    gain: Gain | None
    """On the rows that go on at every end, each answered by weights fitted without it; None where none does."""

    @property
    def is_on(self) -> bool:
        """Whether mixing is worth it: chance alone would hardly have gained as much."""
        return self.gain is not None and self.gain.is_sure

    def document(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "on": self.is_on,
            "weights": {rule: dict(weights) for rule, weights in self.by_rule.items()},
            "gain": None if self.gain is None else asdict(self.gain),
        }


def find_ensemble(
    outputs: Mapping[int, Tensor], chain: Chain, truth_N: ValueArray, goes_on_NE: BoolArray, rows: IntArray
) -> Ensemble:
    """Weights by some rows of a chain's temperature-scaled outputs (N, C), by block.

    `goes_on_NE`: which rows go on at every end of a network that is not the last.
    """
    said = [outputs[end].double().softmax(-1).numpy()[rows] for end in chain.ends]
    truth, goes_on = np.asarray(truth_N)[rows].astype(np.int64), goes_on_NE[rows]
    by_rule = {name: fitted(said, truth, goes_on, chain.end_ramps, rule) for name, rule in RULES.items()}
    return Ensemble(
        weights=by_rule[SERVED],
        by_rule=by_rule,
        gain=held_out_gain(said, truth, goes_on, chain.end_ramps, RULES[SERVED]),
    )


def mixed_outputs(
    outputs: Mapping[int, Tensor],
    chain: Chain,
    task: Task,
    weights: Mapping[int, float],
    used: Collection[int] | None = None,
) -> dict[int, Tensor]:
    """What every exit says, (N, C) by block, of inputs that came by the ends of the networks before it.

    It is what is served, rounding included. `used`: which networks a plan uses; None: all. Those it leaves out add
    nothing, and what their own exits would say is left as it is.
    """
    import torch

    from earlyexit.policies.base import Opinion
    from earlyexit.policies.ensemble import CARRIED, carried, mixed

    some = next(iter(outputs.values()))
    state_BS = torch.zeros(len(some), task.num_outputs, dtype=CARRIED)
    found = dict(outputs)
    for block in sorted(outputs):
        network = chain.network_of(block)
        if used is not None and network not in used:
            continue
        found[block] = mixed(Opinion(task, outputs[block]), state_BS).outputs_BC
        if block in weights:
            state_BS = carried(found[block], weights[block])
    return found
