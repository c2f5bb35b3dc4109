from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from profiles.windows import last_break

FloatArray = npt.NDArray[np.float64]
WINDOWS = np.arange(60)


def breaks(go_on_WR: FloatArray, num_inputs: int, seed: int) -> int:
    """The last break of windows where so many inputs reach each ramp."""
    go_on = np.random.default_rng(seed).binomial(num_inputs, go_on_WR).astype(float)
    return last_break(np.full(go_on_WR.shape, float(num_inputs)), go_on)


def line(_: np.random.Generator) -> FloatArray:
    return 0.8 - 0.4 * WINDOWS / 60


def half_cycle(_: np.random.Generator) -> FloatArray:
    return 0.5 + 0.3 * np.sin(np.pi * WINDOWS / 60)


def walk(rng: np.random.Generator) -> FloatArray:
    return np.asarray(1 / (1 + np.exp(-1 - np.cumsum(rng.normal(0, 0.1, 60)))))


def still(_: np.random.Generator) -> FloatArray:
    return np.full(60, 0.6)


@pytest.mark.parametrize("num_inputs", [240, 12_000])
@pytest.mark.parametrize("num_ramps", [1, 3, 11])
@pytest.mark.parametrize("level", [still, line, half_cycle, walk])
def test_drift_is_no_jump(level: Callable[[np.random.Generator], FloatArray], num_ramps: int, num_inputs: int) -> None:
    """Of 40 histories hardly one: all ramps drift together."""
    found = [
        breaks(np.tile(level(np.random.default_rng(seed))[:, None], (1, num_ramps)), num_inputs, 1000 + seed)
        for seed in range(40)
    ]
    assert np.count_nonzero(found) <= 3


@pytest.mark.parametrize("num_inputs", [240, 12_000])
@pytest.mark.parametrize("before", [3, 15, 30])
def test_a_jump_is_found_wherever_it_is(before: int, num_inputs: int) -> None:
    # Of easy inputs 0.4 go on at each of three ramps, of hard ones 0.9; their mix goes from 80:20 to 50:50.
    go_on_W1 = np.repeat([0.5, 0.65], [before, 31 - before])[:, None]
    found = [breaks(np.tile(go_on_W1, (1, 3)), num_inputs, seed) for seed in range(20)]
    assert found.count(before) >= 18


def test_of_several_jumps_the_last_is_found_and_none_in_too_few_windows() -> None:
    go_on_W1 = np.repeat([0.8, 0.5, 0.8], 15)[:, None]
    assert breaks(np.tile(go_on_W1, (1, 3)), 240, seed=2) == 30
    assert breaks(np.repeat([0.8, 0.4], [3, 1])[:, None], 12_000, seed=3) == 0
    assert last_break(np.zeros((3, 0)), np.zeros((3, 0))) == 0


def test_a_window_is_compared_with_several_taken_together() -> None:
    """Against one window alone this change would be lost in its noise: 240 inputs from 0.70 to 0.56, two ramps."""
    go_on_W1 = np.repeat([0.70, 0.56], [30, 1])[:, None]
    found = [breaks(np.tile(go_on_W1, (1, 2)), 240, seed) for seed in range(40)]
    assert found.count(30) >= 28
