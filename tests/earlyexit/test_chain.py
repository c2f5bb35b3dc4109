from __future__ import annotations

import pytest

from earlyexit.errors import ModelFolderError
from earlyexit.network.chain import Chain, joined

TWO = Chain(names=("small", "large"), lengths=(3, 4), ramps=(0, 2, 4, 5))


def test_blocks_are_numbered_through() -> None:
    assert (TWO.num_blocks, TWO.bounds, TWO.starts, TWO.ends, TWO.end_ramps) == (7, (3, 7), (0, 3), (2, 6), (2,))
    assert [TWO.locate(block) for block in range(7)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (1, 3)]
    assert [TWO.ramps_of(network) for network in (0, 1)] == [(0,), (1, 2)]
    assert (TWO.networks, TWO.is_one) == ((3, 7), False)


def test_of_one_network_all_is_its_own() -> None:
    one = Chain(names=("only",), lengths=(4,), ramps=(0, 2))
    assert (one.networks, one.end_ramps, one.starts, one.ends, one.is_one) == ((), (), (0,), (3,), True)
    assert [one.locate(block) for block in range(4)] == [(0, block) for block in range(4)]
    assert one.ramps_of(0) == one.ramps


def test_networks_are_joined_with_their_ramps_and_ends() -> None:
    assert joined(("small", "large"), (3, 4), ((0,), (1, 2))) == TWO
    assert joined(("only",), (4,), ((0, 2),)).ramps == (0, 2)
    assert joined(("a", "b", "c"), (1, 2, 1), ((), (0,), ())).ramps == (0, 1, 2)


@pytest.mark.parametrize(
    ("names", "lengths", "ramps", "said"),
    [
        pytest.param((), (), (), "a chain of 0 networks", id="none"),
        pytest.param(("a", "b"), (2,), (1,), "a chain of 2 networks, with blocks of 1", id="a length is missing"),
        pytest.param(("a", "b"), (2, 0), (1,), "every network of a chain has blocks", id="an empty network"),
        pytest.param(("a", "a"), (2, 2), (1,), "have different names: a, a", id="twice"),
        pytest.param(("a", "b"), (2, 2), (1, 0), "ascend without repeats", id="disorder"),
        pytest.param(("a", "b"), (2, 2), (1, 4), r"4 blocks has no ramps \[4\]", id="outside"),
        pytest.param(("a", "b"), (2, 2), (0,), r"no ramps \[1\]", id="no ramp at an end"),
    ],
)
def test_what_is_no_chain_is_refused(
    names: tuple[str, ...], lengths: tuple[int, ...], ramps: tuple[int, ...], said: str
) -> None:
    with pytest.raises(ModelFolderError, match=said):
        Chain(names=names, lengths=lengths, ramps=ramps)
