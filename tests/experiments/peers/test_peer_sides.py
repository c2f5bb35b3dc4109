from __future__ import annotations

from experiments.peers.compare import sides_before


def test_more_rounds_are_of_the_sides_that_the_comparison_had() -> None:
    assert sides_before({"sweeps": {"mosec": []}}, ("offramp", "stock", "ray-serve", "mosec")) == (
        "offramp",
        "stock",
        "mosec",
    )
