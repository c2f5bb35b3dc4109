from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from earlyexit.network.boundary import Split
from earlyexit.network.chain_network import ChainNetwork
from earlyexit.policies.ensemble import EnsemblePolicy
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.training.ramps import exit_outputs
from offramp.commands.recording import find_ensemble, mixed_outputs
from optimizer.ensemble import together
from tests.earlyexit.network.chains import Inputs, chained, follow, inputs_for

WEIGHTS = {1: 0.3, 2: 0.5}
HALF = 5e-4


@pytest.fixture(scope="module")
def network() -> ChainNetwork:
    return chained(2, 1, 2)


def outputs_of(network: ChainNetwork, inputs: Inputs) -> dict[int, Tensor]:
    """Every network run in full alone."""
    return {
        network.chain.starts[place] + block: outputs
        for place, member in enumerate(network.members)
        for block, outputs in exit_outputs(member, inputs.of_network[place]).items()
    }


@pytest.mark.parametrize("used", [(0, 1, 2), (0, 2), (1, 2), (2,)], ids=str)
def test_records_of_an_ensemble_hold_what_the_served_chain_says(network: ChainNetwork, used: Sequence[int]) -> None:
    inputs = inputs_for(network)
    outputs = mixed_outputs(outputs_of(network, inputs), network.chain, network.task, WEIGHTS, used)
    splits = [Split(first=network.chain.starts[k], end=network.chain.bounds[k], batch=4) for k in used]
    ended = [
        Split(first=each.first, end=each.end, batch=4, ramps=tuple({each.end - 1} & set(network.chain.end_ramps)))
        for each in splits
    ]
    nobody_leaves = EnsemblePolicy(ConfidencePolicy(2.0), WEIGHTS)
    _, seen = follow(network, nobody_leaves, inputs, ended, kind="probe")
    for block in network.ramp_indices:
        if network.chain.network_of(block) in used:
            score_N = outputs[block].softmax(-1).amax(-1).tolist()
            found = [seen[name, block].score for name in inputs.ids]
            assert found == pytest.approx(score_N, abs=HALF)


def test_the_end_says_equation_6(network: ChainNetwork) -> None:
    inputs = inputs_for(network)
    outputs = outputs_of(network, inputs)
    alone = [outputs[end].double().softmax(-1).numpy() for end in network.chain.ends]
    mixed = mixed_outputs(outputs, network.chain, network.task, WEIGHTS)
    expected_NC = together(alone, WEIGHTS, network.chain.end_ramps)
    assert np.abs(mixed[4].softmax(-1).numpy() - expected_NC).max() < HALF
    assert torch.equal(mixed[0], outputs[0])
    assert torch.equal(mixed[1], outputs[1])


def test_weights_are_found_by_the_given_rows_and_mixing_is_off_where_nothing_is_gained(network: ChainNetwork) -> None:
    inputs = inputs_for(network, count=200)
    outputs = outputs_of(network, inputs)
    truth_N = outputs[4].argmax(1).numpy()  # no answer can be more right than the last network's
    goes_on_NE = np.ones((200, 2), dtype=bool)
    rows = np.arange(0, 200, 2)
    found = find_ensemble(outputs, network.chain, truth_N, goes_on_NE, rows)
    assert set(found.weights) == {1, 2}
    assert not found.is_on
    assert found.gain is not None
    assert found.gain.num_inputs == 100
    assert set(found.document()["weights"]) == {"accuracy", "likelihood", "best"}
    none = find_ensemble(outputs, network.chain, truth_N, np.zeros((200, 2), dtype=bool), rows)
    assert (none.gain, none.is_on, none.document()["gain"]) == (None, False, None)
