from __future__ import annotations

from pathlib import Path

import pytest

from cluster.catalogue import ClusterLink, known_link
from cluster.inventory_file import read_inventory
from earlyexit.errors import InputError


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "cluster.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def test_what_a_file_says_is_taken_and_what_it_leaves_out_is_the_catalogues(tmp_path: Path) -> None:
    found = read_inventory(written(tmp_path, "devices: {V100: {count: 16}}\n"))
    assert found.counts == {"V100": 16}
    assert found.devices["V100"].usd_per_hour == 2.93
    assert found.devices["V100"].memory_bytes == 16 * 2**30
    assert "E3" in (found.devices["V100"].source or "")
    assert (found.link, found.time_scale) == (known_link(), 1)
    text = (
        "schema_version: 1\n"
        "devices:\n"
        "  emulated:V100: {count: 2, usd_per_hour: 1, memory_bytes: 100, source: me,\n"
        "                  labels: {tier: fast}, node_selector: {pool: gpu}}\n"
        "link: {bandwidth_bytes_per_s: 1.0e9, source: iperf}\n"
        "time_scale: 20\n"
    )
    found = read_inventory(written(tmp_path, text))
    each = found.devices["emulated:V100"]
    assert (each.usd_per_hour, each.memory_bytes, each.source) == (1.0, 100, "me")
    assert (each.labels, each.node_selector) == ({"tier": "fast"}, {"pool": "gpu"})
    assert (found.link, found.time_scale) == (ClusterLink(bandwidth_bytes_per_s=1e9, source="iperf"), 20)


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        pytest.param("devices:\n  V1000: {count: 1}\n", 2, "unknown device 'V1000'; known: cpu", id="unknown device"),
        pytest.param(
            "devices:\n  V100: {count: 1}\ntime_scale: 2\n", 3, "V100 cannot be stretched", id="real time stretched"
        ),
        pytest.param("devices:\n  cpu: {count: 1}\nlink:\n  delay_s: 1\n", 4, "Field required", id="no bandwidth"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, line: int, words: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(InputError) as refusal:
        read_inventory(path)
    assert str(refusal.value).startswith(f"{path}:{line}: ")
    assert words in str(refusal.value)
