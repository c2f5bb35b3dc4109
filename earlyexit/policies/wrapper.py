"""Exit policies from a user's own function (E3 section 3.4, `exit-wrapper`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, overload

import torch
from torch import Tensor

from earlyexit.errors import PlanError, raising
from earlyexit.named import import_attribute
from earlyexit.policies.base import Decision, ExitOutput, ExitPolicy

IndependentRule = Callable[[int, Tensor], Tensor]
"""(ramp, outputs (B, C), which are logits if answers are labels) -> which inputs leave, bool (B,)."""
DependentRule = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""(ramp, outputs (B, C), state (B, S)) -> which inputs leave, bool (B,), and the new state (B, S)."""


class OwnExit(ExitPolicy):
    """A policy made of a user's rule. Its state, initially `state_width` float32 zeros, travels with every input."""

    name = "own"
    state_dtype: ClassVar[torch.dtype] = torch.float32

    def __init__(self, rule: DependentRule, state_width: int) -> None:
        self._rule = rule
        self._state_width = state_width

    def state_width(self, num_outputs: int) -> int:
        return self._state_width

    def decide(self, ramp: int, output: ExitOutput, state_BS: Tensor, sample_ids: Sequence[str]) -> Decision:
        leave_B, state_BS = self._rule(ramp, output.outputs_BC, state_BS)
        return output.decision(leave_B, state_BS)


@overload
def exit_wrapper(rule: IndependentRule) -> OwnExit: ...
@overload
def exit_wrapper(*, state_width: int) -> Callable[[DependentRule], OwnExit]: ...


def exit_wrapper(
    rule: IndependentRule | None = None, *, state_width: int | None = None
) -> OwnExit | Callable[[DependentRule], OwnExit]:
    """Returns an exit policy made of a function. Plans name it as `own: "module:name"`.

    `@exit_wrapper` on `rule(ramp, outputs)` makes independent ramps: switching one off does not affect other ramps.
    `@exit_wrapper(state_width=2)` on `rule(ramp, outputs, state)` makes dependent ramps. A row must not affect others.
    """
    if rule is None:
        if state_width is None:
            raise TypeError("exit_wrapper needs a rule, or the state_width of a dependent rule")
        return lambda dependent: OwnExit(dependent, state_width)
    return OwnExit(lambda ramp, outputs_BC, state_BS: (rule(ramp, outputs_BC), state_BS), 0)


def own_policy(own: str) -> ExitPolicy:
    """Returns the policy that `module:name` names; raises PlanError if it cannot be imported or is no policy."""
    with raising(PlanError, f"exit policy {own!r} cannot be imported", ImportError, AttributeError):
        policy = import_attribute(own)
    if not isinstance(policy, ExitPolicy):
        raise PlanError(f"{own!r} is not an exit policy; make one with earlyexit.policies.wrapper.exit_wrapper")
    return policy
