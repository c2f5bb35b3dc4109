from __future__ import annotations

import pytest

from deployments.accelerators import has_labels, room


@pytest.mark.parametrize(
    ("device", "resources", "replicas"),
    [
        ("cpu", {"CPU": 3.9}, 3),
        ("cuda", {"CPU": 8.0, "GPU": 2.0}, 2),
        ("V100", {"CPU": 8.0, "GPU": 2.0, "accelerator_type:V100": 1.0}, 2),
        ("V100", {"CPU": 8.0, "GPU": 2.0, "accelerator_type:T4": 1.0}, 0),
        ("emulated:V100", {"CPU": 2.0, "emulated:V100": 5.0}, 5),
        ("emulated:V100", {"CPU": 2.0}, 0),
    ],
    ids=["cpu", "cuda", "its GPUs", "other GPUs", "emulated", "none"],
)
def test_a_node_has_room_for_what_its_resources_hold(device: str, resources: dict[str, float], replicas: int) -> None:
    assert room(resources, device) == replicas


def test_a_node_is_wanted_by_some_of_its_labels() -> None:
    node = {"ray.io/node-id": "1", "tier": "fast"}
    assert has_labels(node, {})
    assert has_labels(node, {"tier": "fast"})
    assert not has_labels(node, {"tier": "slow"})
    assert not has_labels(node, {"zone": "a"})
