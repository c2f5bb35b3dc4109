"""What Tabi's paper says, asked of our cost model and planner."""

from __future__ import annotations

import pytest

from experiments.studies import cascades, load


@pytest.mark.parametrize("name", ["SST-2", "MNLI"])
def test_the_cost_model_gives_the_papers_mean_latencies_within_a_twentieth(name: str) -> None:
    cascade = cascades.CASCADES[name]
    assert cascades.ours_s(cascade) == pytest.approx(cascade.paper_s, rel=0.05)


def test_a_mean_latency_is_every_networks_by_who_reaches_it() -> None:
    assert cascades.mean_latency_s([0.007, 0.020, 0.030], [0.5, 0.3, 0.2]) == pytest.approx(
        0.007 + 0.5 * 0.020 + 0.2 * 0.030
    )
    assert cascades.mean_latency_s([0.007], [1.0]) == pytest.approx(0.007)


def test_a_small_network_before_bert_large_does_what_is_asked() -> None:
    found = load("tabi_v100").run("quick")
    sst2, mnli = (each.ours for each in found.comparisons)
    assert sst2 is not None
    assert sst2 >= 2.1
    assert mnli is not None
    assert mnli >= 1.5
