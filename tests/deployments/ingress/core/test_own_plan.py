from __future__ import annotations

from deployments.ingress.core.ingress_core import own_plan
from optimizer.placement import initial_placement, parse_placed
from optimizer.plan import PolicySpec, early_exit_plan


def test_without_a_controller_the_plan_says_in_what_hidden_states_travel() -> None:
    spec = PolicySpec(name="entropy", thresholds=0.5)
    placed = initial_placement(early_exit_plan(4, (0,), spec, batch=4, device="cpu"))
    said = own_plan(placed, "float16")
    assert said["hops"] == {"dtype": "float16"}
    assert parse_placed(said) == placed
