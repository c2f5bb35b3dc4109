from __future__ import annotations

from earlyexit.network.chain import Chain
from profiles.networks import of_networks, subsets, survival_of
from tests.exit_records import exit_records

# Two blocks, then one, then two: the first network has a ramp inside, the second has not, nor has the reference.
CHAIN = Chain(names=("s", "m", "l"), lengths=(2, 1, 2), ramps=(0, 1, 2, 3))
RECORDS = exit_records([[0.9, 0.0, 0.0, 0.0], [0.0, 0.9, 0.9, 0.0], [0.0, 0.0, 0.9, 0.9], [0.0, 0.0, 0.0, 0.0]])
HALF = dict.fromkeys(RECORDS.ramps, 0.5)


def test_a_network_that_is_left_out_no_input_leaves() -> None:
    left = of_networks(RECORDS, (1, 2), CHAIN)
    assert left.ramps == (2, 3)
    assert left.outcome({2: 0.5, 3: 0.5}).exits_N.tolist() == [4, 2, 2, 4]
    assert of_networks(RECORDS, (0, 1, 2), CHAIN).outcome(HALF).exits_N.tolist() == [0, 1, 2, 4]


def test_survival_is_told_of_every_choice_of_networks_by_the_ramps_that_have_a_threshold() -> None:
    found = survival_of(RECORDS, HALF, CHAIN)
    assert found == {
        (2,): (1, 1, 1, 1, 0.75),
        (0, 2): (1, 0.75, 0.5, 0.5, 0.25),
        (1, 2): (1, 1, 1, 0.5, 0.5),
        (0, 1, 2): (1, 0.75, 0.5, 0.25, 0.25),
    }
    assert list(found) == list(subsets(CHAIN))
    assert survival_of(RECORDS, {0: 0.5}, CHAIN)[0, 2] == (1, 0.75, 0.75, 0.75, 0.75)
