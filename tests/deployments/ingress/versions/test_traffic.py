from __future__ import annotations

import pytest
from pydantic import ValidationError

from deployments.ingress.api.orders import Canary
from deployments.ingress.versions.choice import draws


def test_a_requests_draws_are_the_first_and_second_word_of_its_ids_hash() -> None:
    # printf r-1 | b2sum -l 64: 7d99a80e 76bbad0e, little-endian
    assert draws("r-1") == (0x0EA8997D / 2**32, 0x0EADBB76 / 2**32)


def test_the_share_of_many_ids_is_about_the_one_asked_for_and_the_draws_are_not_alike() -> None:
    drawn = [draws(f"request-{number}") for number in range(10_000)]
    assert sum(first < 0.1 for first, _ in drawn) == pytest.approx(1000, abs=100)  # 3.3 standard deviations
    assert sum(first < 0.1 and second < 0.1 for first, second in drawn) == pytest.approx(100, abs=33)


@pytest.mark.parametrize("id_", ["", "ä", "x" * 10_000])
def test_any_id_draws_from_0_to_1(id_: str) -> None:
    assert all(0 <= drawn < 1 for drawn in draws(id_))


WRONG = [{"share": 1.1}, {"share": -0.1}, {"compare_share": 2}, {"shares": 0}, {"version": ""}, {"share": "0.1"}]


@pytest.mark.parametrize("wrong", WRONG)
def test_a_canary_that_contradicts_itself_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        Canary.model_validate({"version": "2"} | wrong)
