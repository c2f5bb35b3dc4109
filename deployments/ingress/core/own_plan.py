"""What an ingress says of the plan that it follows where no controller does."""

from __future__ import annotations

from typing import Any

from earlyexit.boundary import HopDtype
from optimizer.placement import PlacedPlan, placed_document


def own_plan(placed: PlacedPlan, hop_dtype: HopDtype) -> dict[str, Any]:
    """Plain data, of which `parse_placed` reads the plan back."""
    return {**placed_document(placed), "hops": {"dtype": hop_dtype}}
