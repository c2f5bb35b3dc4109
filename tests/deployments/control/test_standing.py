"""What a controller remembers of where it stands, of a chain."""

from __future__ import annotations

import json
from dataclasses import replace

from deployments.controller.remember import State, parse_state
from earlyexit.network.split import Split
from optimizer.live.trial import Blame
from optimizer.placement import initial_placement
from optimizer.plan import Plan, Stage
from tests.deployments.control.control_fakes import POLICY, problem

NETWORKS = (2, 4)


def alone(epoch: int) -> Plan:
    """The last network, without the first."""
    split = Split(first=2, end=4, batch=4)
    return Plan(
        stages=(Stage(device="cpu", replicas=1, splits=(split,)),), policy=POLICY, networks=NETWORKS, epoch=epoch
    )


def test_plans_and_blames_of_a_chain_come_back_with_its_networks() -> None:
    chain = replace(problem(), networks=NETWORKS, survival_of={(1,): (1.0, 1.0, 1.0, 0.5)})
    state = State(
        placed=initial_placement(alone(3)),
        reason="period",
        at_s=1.0,
        planned_s=1.0,
        changed_s=0.0,
        rate_changed_s=0.0,
        followed=initial_placement(alone(2)),
        blamed=(Blame(stages=alone(0).stages, problem=chain, until=9),),
    )
    back = parse_state(json.loads(json.dumps(state.document())))
    assert (back.placed, back.followed) == (state.placed, state.followed)
    assert back.placed.plan.used == (1,)
    (blame,) = back.blamed
    assert blame.stages == alone(0).stages
    assert (blame.problem.networks, blame.problem.survival_of) == (NETWORKS, chain.survival_of)
