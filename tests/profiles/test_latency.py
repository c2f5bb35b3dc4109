from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.network.chain import ModelChain
from profiles.latency import LatencyProfile
from profiles.networks import of_networks, subsets, survival_of
from profiles.table import LatencyTable
from tests.exit_records import exit_records


def table(scale: float, batches: tuple[int, ...] = (1, 2, 4)) -> LatencyTable:
    """Returns two blocks of 1 and 2 ms per input, and one ramp of 0.1 ms, all times the scale."""
    sizes = np.array(batches) * 1e-3 * scale
    return LatencyTable(batches=batches, block_s_NB=np.array([sizes, 2 * sizes]), ramp_s_EB=0.1 * sizes[None])


PROFILE = LatencyProfile(
    model="tiny",
    num_blocks=2,
    ramps=(0,),
    device="V100",
    backend="torch",
    dtype="float32",
    kind="measured",
    tables={16: table(1), 32: table(2), 128: table(10, (2, 4, 8))},
    provenance={"driver": "550.1", "note": "a “quoted” word", "runs": [1, 2]},
)
TEXT = """\
{
  "schema_version": 1,
  "kind": "measured",
  "model": "tiny",
  "num_blocks": 2,
  "ramps": [0],
  "device": "V100",
  "backend": "torch",
  "dtype": "float32",
  "provenance": {},
  "tables": [
    {"length": 16, "batch": [1, 2],
      "block_s": [
        [0.001, 2e-03],
        [0.001, 0.002]
      ],
      "ramp_s": [
        [1e-05, 2e-05]
      ]},
    {"length": 32, "batch": [1],
      "block_s": [[0.01], [0.02]],
      "ramp_s": [[1]]}
  ]
}
"""


def facts(profile: LatencyProfile) -> dict[str, Any]:
    """Returns all fields of a profile as plain data."""
    return {
        "shape": (profile.model, profile.num_blocks, profile.ramps),
        "ran": (profile.device, profile.backend, profile.dtype, profile.kind),
        "provenance": profile.provenance,
        "tables": [
            (length, each.batches, each.block_s_NB.tolist(), each.ramp_s_EB.tolist())
            for length, each in profile.tables.items()
        ],
    }


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(PROFILE, id="three lengths"),
        pytest.param(
            replace(
                PROFILE,
                ramps=(),
                tables={1: LatencyTable(batches=(1,), block_s_NB=np.ones((2, 1)), ramp_s_EB=np.zeros((0, 1)))},
            ),
            id="no ramps",
        ),
    ],
)
def test_a_saved_profile_is_read_back_equal(profile: LatencyProfile, tmp_path: Path) -> None:
    profile.save(tmp_path / "profile.json")
    assert facts(LatencyProfile.load(tmp_path / "profile.json")) == facts(profile)


def test_between_two_lengths_seconds_are_linear_for_the_batch_sizes_of_both() -> None:
    between = PROFILE.at(20)  # a quarter of the way: 1.25 ms an input in the first block
    assert between.batches == (1, 2, 4)
    assert between.block_s_NB == pytest.approx(np.array([[1.25, 2.5, 5], [2.5, 5, 10]]) * 1e-3)
    assert between.ramp_s_EB == pytest.approx(np.array([[0.125, 0.25, 0.5]]) * 1e-3)
    between = PROFILE.at(80)  # half way from 2 to 10 ms an input
    assert between.batches == (2, 4)
    assert between.block_s_NB[0] == pytest.approx([12e-3, 24e-3])


def test_small_numbers_of_json_are_numbers(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    path.write_text(TEXT, encoding="utf-8")
    profile = LatencyProfile.load(path)
    assert profile.tables[16].ramp_s_EB.tolist() == [[1e-05, 2e-05]]
    assert profile.tables[32].ramp_s_EB.tolist() == [[1]]


# Networks of two blocks, one block and two blocks: only the first has a ramp inside.
CHAIN = ModelChain(names=("s", "m", "l"), lengths=(2, 1, 2), ramps=(0, 1, 2, 3))
RECORDS = exit_records([[0.9, 0.0, 0.0, 0.0], [0.0, 0.9, 0.9, 0.0], [0.0, 0.0, 0.9, 0.9], [0.0, 0.0, 0.0, 0.0]])
HALF = dict.fromkeys(RECORDS.ramps, 0.5)


def test_no_input_leaves_in_a_network_that_is_left_out() -> None:
    left = of_networks(RECORDS, (1, 2), CHAIN)
    assert left.ramps == (2, 3)
    assert left.outcome({2: 0.5, 3: 0.5}).exits_N.tolist() == [4, 2, 2, 4]
    assert of_networks(RECORDS, (0, 1, 2), CHAIN).outcome(HALF).exits_N.tolist() == [0, 1, 2, 4]


def test_survival_is_computed_for_every_set_of_networks_from_ramps_with_a_threshold() -> None:
    found = survival_of(RECORDS, HALF, CHAIN)
    assert found == {
        (2,): (1, 1, 1, 1, 0.75),
        (0, 2): (1, 0.75, 0.5, 0.5, 0.25),
        (1, 2): (1, 1, 1, 0.5, 0.5),
        (0, 1, 2): (1, 0.75, 0.5, 0.25, 0.25),
    }
    assert list(found) == list(subsets(len(CHAIN.lengths)))
    assert survival_of(RECORDS, {0: 0.5}, CHAIN)[0, 2] == (1, 0.75, 0.75, 0.75, 0.75)
