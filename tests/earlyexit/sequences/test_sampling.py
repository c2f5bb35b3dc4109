from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest

from earlyexit.sequences.sequence import Sampling, choose

ANSWER = np.array([[40.0, 7.0, 9.0, 3.0], np.log([0.5, 0.25, 0.15, 0.1])], dtype=np.float32)
"""Four tokens, likeliest first, and the logarithms of their probabilities."""


def shares(sampling: Sampling, draws: int = 4000) -> dict[int, float]:
    found = Counter(choose(ANSWER, sampling, place).token for place in range(draws))
    return {token: count / draws for token, count in found.items()}


def test_without_temperature_the_likeliest_token_comes_next() -> None:
    chosen = choose(ANSWER, Sampling(top_p=0.9, seed=3), 17)
    assert chosen.token == 40
    assert chosen.log_probability == pytest.approx(math.log(0.5))


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    expected = {40: 0.5, 7: 0.25, 9: 0.15, 3: 0.1}
    assert shares(Sampling(temperature=1.0)) == pytest.approx(expected, abs=0.025)


def test_temperature_divides_the_logits() -> None:
    cubed = np.array([0.5, 0.25, 0.15, 0.1]) ** 2
    expected = dict(zip([40, 7, 9, 3], cubed / cubed.sum(), strict=True))
    assert shares(Sampling(temperature=0.5)) == pytest.approx(expected, abs=0.025)


@pytest.mark.parametrize(
    ("sampling", "left"),
    [
        pytest.param(Sampling(temperature=1.0, top_p=0.75), {40, 7}, id="the share is reached by two"),
        pytest.param(Sampling(temperature=1.0, top_p=0.76), {40, 7, 9}, id="just not"),
        pytest.param(Sampling(temperature=1.0, top_p=1e-9), {40}, id="there is always one"),
        pytest.param(Sampling(temperature=1.0, top_k=3), {40, 7, 9}, id="three likeliest"),
        pytest.param(Sampling(temperature=1.0, top_k=500), {40, 7, 9, 3}, id="more than there are"),
        pytest.param(Sampling(temperature=1.0, top_k=2, top_p=0.6), {40}, id="of the two likeliest one is two thirds"),
    ],
)
def test_only_the_likeliest_are_drawn_from(sampling: Sampling, left: set[int]) -> None:
    assert set(shares(sampling, 400)) == left


def test_a_seed_and_a_place_draw_the_same_token_always_and_others_draw_others() -> None:
    once = [choose(ANSWER, Sampling(temperature=1.0, seed=5), place).token for place in range(50)]
    again = [choose(ANSWER, Sampling(temperature=1.0, seed=5), place).token for place in reversed(range(50))]
    other = [choose(ANSWER, Sampling(temperature=1.0, seed=6), place).token for place in range(50)]
    assert once == again[::-1]
    assert once != other
