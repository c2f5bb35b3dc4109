"""The option `--order` of `offramp serve`, `plan` and `simulate`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from earlyexit.engine.order import OrderSpec
from earlyexit.errors import InputError, PlanError


class OfOrder(BaseModel):
    """The order in which inputs of a plan's queues go."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    order: str | None = Field(default=None, examples=["arrival", "deadline", "shortest", "das"])
    """Which of the inputs that wait go first: arrival, deadline, shortest, das (or das:0.3, with its eta). None: as the
    plan says, else deadline."""


def order_option(text: str | None) -> OrderSpec | None:
    """Returns the order that `--order` names; raises InputError."""
    try:
        return None if text is None else OrderSpec.parse(text)
    except PlanError as error:
        raise InputError(f"--order: {error}") from error
