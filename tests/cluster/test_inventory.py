from __future__ import annotations

from typing import Any

import pytest

from cluster.catalogue import ClusterLink, known_link, read_cluster_catalogue
from cluster.inventory import Accelerators, Inventory, from_nodes, lacking
from earlyexit.errors import InputError

LINK = ClusterLink(bandwidth_bytes_per_s=1.0)


def node(resources: dict[str, float], labels: dict[str, str] | None = None, *, alive: bool = True) -> dict[str, Any]:
    """One of those that `ray.nodes()` returns, without what is not read."""
    return {"Alive": alive, "Resources": resources, "Labels": labels or {}}


def v100(gpus: float, **labels: str) -> dict[str, Any]:
    resources = {"CPU": 8.0, "GPU": gpus, "accelerator_type:V100": 1.0, "node:10.0.0.1": 1.0, "memory": 1e9}
    return node(resources, labels)


def inventory(**counts: int) -> Inventory:
    return Inventory(devices={name: Accelerators(count=count) for name, count in counts.items()}, link=LINK)


@pytest.mark.parametrize(
    ("nodes", "counts"),
    [
        ([v100(4.0), v100(2.0)], {"V100": 6, "cpu": 16}),
        ([node({"CPU": 8.0}, alive=False), node({"CPU": 2.0})], {"cpu": 2}),
        ([node({"CPU": 1.0, "GPU": 2.0})], {"cuda": 2, "cpu": 1}),
        ([node({"emulated:V100": 6.0}), node({"emulated:V100": 1.0})], {"emulated:V100": 7}),
    ],
    ids=["by the type that Ray told", "of live nodes", "of an unknown type", "emulated"],
)
def test_accelerators_of_all_nodes_are_counted(nodes: list[dict[str, Any]], counts: dict[str, int]) -> None:
    assert from_nodes(nodes).counts == counts


def test_labels_are_those_that_all_nodes_have_alike_prices_and_the_link_the_catalogues() -> None:
    found = from_nodes(
        [v100(1.0, tier="fast", zone="a"), v100(1.0, tier="fast", zone="b"), node({"CPU": 1.0}, {"tier": "slow"})]
    )
    assert found.devices["V100"].labels == {"tier": "fast"}
    assert found.devices["cpu"].labels == {}
    itself = node({"CPU": 1.0}, {"ray.io/node-id": "a", "tier": "slow"})
    assert from_nodes([itself]).devices["cpu"].labels == {"tier": "slow"}
    found = from_nodes([v100(1.0)])
    assert found.devices["V100"].usd_per_hour == 2.93
    assert found.link == known_link()


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        pytest.param({"V100": 4}, {}, id="all there"),
        pytest.param({"V100": 5, "T4": 1}, {"V100": 1, "T4": 1}, id="too few, and none"),
        pytest.param({"cuda": 6}, {}, id="cuda takes any GPU"),
        pytest.param({"cuda": 6, "V100": 1}, {"cuda": 1}, id="but not those wanted by name"),
        pytest.param({"T4": 0}, {}, id="none wanted"),
    ],
)
def test_what_a_cluster_lacks_is_counted_by_type(wanted: dict[str, int], missing: dict[str, int]) -> None:
    assert lacking(wanted, inventory(V100=4, cuda=2, cpu=8)) == missing


def test_time_can_be_stretched_on_emulated_accelerators_only() -> None:
    emulated = {"emulated:V100": Accelerators(count=1)}
    assert Inventory(devices=emulated, link=LINK, time_scale=20.0).time_scale == 20
    with pytest.raises(InputError, match="time_scale 20 stretches emulated time; V100 cannot be stretched"):
        Inventory(devices={**emulated, "V100": Accelerators(count=1)}, link=LINK, time_scale=20.0)


def test_every_figure_of_the_catalogue_names_a_source_that_it_has() -> None:
    catalogue = read_cluster_catalogue()
    named = {each.memory for each in catalogue.devices.values()} | {catalogue.link.source}
    named |= {each.price for each in catalogue.devices.values() if each.price is not None}
    assert named == set(catalogue.sources)
    assert all((each.usd_per_hour is None) == (each.price is None) for each in catalogue.devices.values())
