from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import DataError
from earlyexit.policies.recorded import RecordedAnswers
from experiments.data import data_folder
from experiments.gpu.workbench import SURVIVAL, Exits, drawn_exits, find_exits
from experiments.recorded_exits import BERT12_SST2


def three_blocks() -> Exits:
    """x is sure at once, y at ramp 1 only, z never."""
    answers = RecordedAnswers(
        row_of={"x": 0, "y": 1, "z": 2},
        ramps=(0, 1),
        scores_NR=np.array([[0.1, 0.1], [0.5, 0.4], [0.5, 0.5]], dtype=np.float32),
        answers_NE=np.column_stack([np.array([[10, 11], [20, 21], [30, 31]]), np.array([12, 22, 32])]),
    )
    return Exits(answers=answers, num_blocks=3, source="made up")


@pytest.mark.parametrize(
    ("active", "expected"),
    [
        pytest.param((0, 1), {"x": (0, 10), "y": (1, 21), "z": (2, 32)}, id="both ramps on"),
        pytest.param((1,), {"x": (1, 11), "y": (1, 21), "z": (2, 32)}, id="the second on"),
        pytest.param((), {"x": (2, 12), "y": (2, 22), "z": (2, 32)}, id="none on"),
    ],
)
def test_inputs_leave_at_the_first_active_ramp_that_is_sure(
    active: tuple[int, ...], expected: dict[str, tuple[int, int]]
) -> None:
    assert three_blocks().expected(active) == expected


def test_survival_is_the_share_that_reaches_each_block() -> None:
    assert three_blocks().survival == pytest.approx((1.0, 2 / 3, 1 / 3))


def test_in_a_model_twice_as_deep_ramps_sit_after_every_second_block() -> None:
    deeper = three_blocks().on_blocks(6)
    assert (deeper.ramps, deeper.num_blocks) == ((1, 3), 6)
    assert deeper.survival == pytest.approx((1.0, 1.0, 2 / 3, 2 / 3, 1 / 3, 1 / 3))
    assert deeper.expected((1, 3)) == {"x": (1, 10), "y": (3, 21), "z": (5, 32)}


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_a_model_that_is_no_multiple_as_deep_is_refused(num_blocks: int) -> None:
    with pytest.raises(DataError, match="exits of 3 blocks cannot be laid on"):
        three_blocks().on_blocks(num_blocks)


def test_drawn_exits_survive_as_they_say() -> None:
    exits = drawn_exits(np.random.default_rng(3))
    assert exits.survival == pytest.approx(SURVIVAL)
    assert exits.source.startswith("synthetic: drawn to survive 1, 0.75, 0.6")


def test_equal_seeds_draw_equal_exits() -> None:
    one, other = (find_exits("synthetic", np.random.default_rng(5)) for _ in range(2))
    assert one.expected(one.ramps) == other.expected(other.ramps)


def test_drawn_exits_survive_about_as_the_recorded_ones() -> None:
    folder = data_folder()
    if folder is None or not (folder / BERT12_SST2).is_file():
        pytest.skip(f"{BERT12_SST2} is not in OFFRAMP_DATA")
    recorded = find_exits("recorded", np.random.default_rng(0))
    assert recorded.source == f"recorded: {BERT12_SST2}"
    assert recorded.survival == pytest.approx(SURVIVAL, abs=0.01)
