from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError
from profiles.latency import LatencyProfile
from profiles.table import LatencyTable


def table(scale: float, batches: tuple[int, ...] = (1, 2, 4)) -> LatencyTable:
    """Two blocks of 1 and 2 ms an input, one ramp of 0.1 ms, all times the scale."""
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
    """All that a profile says, as plain data."""
    return {
        "shape": (profile.model, profile.num_blocks, profile.ramps),
        "ran": (profile.device, profile.backend, profile.dtype, profile.kind),
        "provenance": profile.provenance,
        "tables": [
            (length, each.batches, each.block_s_NB.tolist(), each.ramp_s_EB.tolist())
            for length, each in profile.tables.items()
        ],
    }


def written(folder: Path, text: str) -> Path:
    path = folder / "profile.json"
    path.write_text(text, encoding="utf-8")
    return path


def changed(old: str, new: str) -> str:
    assert TEXT.count(old) == 1
    return TEXT.replace(old, new)


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


def test_a_measured_length_comes_back_as_measured() -> None:
    table = PROFILE.at(32)
    assert (table.block_s_NB is PROFILE.tables[32].block_s_NB, table.length) == (True, 32)


def test_between_two_lengths_seconds_are_linear_in_the_length() -> None:
    between = PROFILE.at(20)  # a quarter of the way: 1.25 ms an input in the first block
    assert between.batches == (1, 2, 4)
    assert between.block_s_NB == pytest.approx(np.array([[1.25, 2.5, 5], [2.5, 5, 10]]) * 1e-3)
    assert between.ramp_s_EB == pytest.approx(np.array([[0.125, 0.25, 0.5]]) * 1e-3)


def test_between_two_lengths_only_the_batch_sizes_of_both_are_known() -> None:
    between = PROFILE.at(80)  # half way from 2 to 10 ms an input
    assert between.batches == (2, 4)
    assert between.block_s_NB[0] == pytest.approx([12e-3, 24e-3])


@pytest.mark.parametrize("length", [15, 129, 600, 0, -1])
def test_a_length_outside_the_measured_ones_is_refused(length: int) -> None:
    with pytest.raises(DataError, match=f"tiny on V100: not measured for {length} tokens .*; measured are 16 to 128"):
        PROFILE.at(length)


def test_two_lengths_without_a_common_batch_size_say_so() -> None:
    profile = replace(PROFILE, tables={16: table(1, (1, 2)), 32: table(2, (4,))})
    with pytest.raises(DataError, match=r"no batch size is measured at both lengths around: \[1, 2\] and \[4\]"):
        profile.at(20)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (("big", 2, (0,)), "of model 'tiny', wanted is 'big'"),
        (("tiny", 3, (0, 1)), "has 2 blocks and ramps [0], wanted are 3 blocks and ramps [0, 1]"),
        ((None, 2, ()), "has 2 blocks and ramps [0], wanted are 2 blocks and ramps []"),
    ],
    ids=["name", "blocks", "ramps"],
)
def test_a_profile_of_another_model_is_refused(other: tuple[str | None, int, tuple[int, ...]], said: str) -> None:
    with pytest.raises(DataError) as refused:
        PROFILE.check_fits(*other)
    assert str(refused.value).endswith(said)


def test_small_numbers_of_json_are_numbers(tmp_path: Path) -> None:
    profile = LatencyProfile.load(written(tmp_path, TEXT))
    assert profile.tables[16].ramp_s_EB.tolist() == [[1e-05, 2e-05]]
    assert profile.tables[32].ramp_s_EB.tolist() == [[1]]


MISTAKES = (
    ("[0.001, 2e-03]", "[0.001, -1]", "14: tables.0.block_s.0.1: "),
    ("[0.001, 2e-03]", "[0.001, NaN]", "14: tables.0.block_s.0.1: "),
    ("1e-05, 2e-05", "1e-05, Infinity", "18: tables.0.ramp_s.0.1: "),
    ("[0.001, 2e-03]", '[0.001, "2"]', "14: tables.0.block_s.0.1: "),
    (', "batch": [1, 2],', ",", "12: tables.0.batch: "),
    ('"batch": [1, 2]', '"batch": []', "12: tables.0.batch: "),
    ('"batch": [1, 2]', '"batch": [2, 1]', "12: batch sizes must ascend from at least 1, not [2, 1]"),
    ('"batch": [1, 2]', '"batch": [1, 2, 4]', "14: values here: 2; needed: 3, one a batch size"),
    ("        [0.001, 0.002]\n", "        [0.001]\n", "15: values here: 1; needed: 2, one a batch size"),
    ("[0.001, 2e-03],\n", "", "13: block_s has 1 rows; needed: 2, one a block"),
    ("        [1e-05, 2e-05]\n", "", "17: ramp_s has 0 rows; needed: 1, one a ramp"),
    ('"ramps": [0]', '"ramps": [1]', "6: ramps must ascend and sit below block 1, not [1]"),
    ('"num_blocks": 2', '"num_blocks": 0', "5: num_blocks: "),
    ('"kind": "measured"', '"kind": "guessed"', "3: kind: "),
    ('"schema_version": 1', '"schema_version": 2', "2: schema_version: "),
    ('"model": "tiny"', '"model": ""', "4: model: "),
    ('"dtype"', '"type"', "1: dtype: "),
    ('"dtype": "float32",', '"dtype": "float32", "x": 1,', "9: x: "),
    ('"length": 32', '"length": 0', "20: tables.1.length: "),
    ('"length": 32', '"length": 16', "11: two tables have the same length; one a length is allowed"),
    ('"length": 32', '"length": 8', "11: the lengths of a latency profile must ascend"),
    ('"kind": "measured",', '"kind": "measured"', "4: not JSON: "),
    (TEXT, "[]", "1: the latency profile: Input should be a mapping with schema_version"),
    (TEXT, TEXT.replace("  ", "\t").replace("[1]]", "[-1]]"), "22: tables.1.ramp_s.0.0: "),
)
"""What is written instead of what, and what is said: the line, and the field or what is allowed."""


def test_a_file_that_is_wrong_is_refused_with_file_and_line(tmp_path: Path) -> None:
    for old, new, said in MISTAKES:
        path = written(tmp_path, changed(old, new))
        with pytest.raises(DataError) as refused:
            LatencyProfile.load(path)
        assert str(refused.value).startswith(f"{path}:{said}"), new


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.json: no such file"):
        LatencyProfile.load(tmp_path / "gone.json")
