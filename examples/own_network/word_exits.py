"""Exit logic of one's own. A plan names it as own: word_exits:margin."""

from __future__ import annotations

from torch import Tensor

from earlyexit.policies.wrapper import exit_wrapper

LEAST_MARGIN = (0.9, 0.8, 0.6)
"""By ramp: the earlier, the surer."""


@exit_wrapper
def margin(ramp: int, logits_BC: Tensor) -> Tensor:
    """An input leaves where the likeliest label is ahead of the second by enough; every row is judged by itself."""
    best_B2 = logits_BC.softmax(-1).topk(2).values
    leave_B: Tensor = best_B2[:, 0] - best_B2[:, 1] >= LEAST_MARGIN[ramp]
    return leave_B


@exit_wrapper(state_width=1)
def twice_sure(ramp: int, logits_BC: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
    """An input leaves where two ramps in a row are sure; the state, zeros at first, travels with the input."""
    sure_B = logits_BC.softmax(-1).max(-1).values >= LEAST_MARGIN[ramp]
    before_B = state_BS[:, 0] > 0
    return sure_B & before_B, sure_B[:, None].to(state_BS.dtype)
