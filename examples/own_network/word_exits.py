"""Examples of custom exit policies. A plan names one with `own: word_exits:margin`."""

from __future__ import annotations

from torch import Tensor

from earlyexit.policies.wrapper import exit_wrapper

LEAST_MARGIN = (0.9, 0.8, 0.6)
"""Least margin, or probability, at each ramp. Earlier ramps are stricter."""


@exit_wrapper
def margin(ramp: int, logits_BC: Tensor) -> Tensor:
    """An input leaves if the probabilities of its two most probable labels differ enough; rows are independent."""
    best_B2 = logits_BC.softmax(-1).topk(2).values
    leave_B: Tensor = best_B2[:, 0] - best_B2[:, 1] >= LEAST_MARGIN[ramp]
    return leave_B


@exit_wrapper(state_width=1)
def twice_sure(ramp: int, logits_BC: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
    """An input leaves if two ramps in a row are sure. The state starts as zeros and travels with the input."""
    sure_B = logits_BC.softmax(-1).max(-1).values >= LEAST_MARGIN[ramp]
    before_B = state_BS[:, 0] > 0
    return sure_B & before_B, sure_B[:, None].to(state_BS.dtype)
