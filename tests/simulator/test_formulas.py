"""The formulas, at figures that can be worked out otherwise."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from earlyexit.errors import DataError
from tests.simulator.queueing import batch_latency_s, fixed_service_wait_s, tandem_latency_s


def test_before_one_server_an_input_waits_by_its_load() -> None:
    assert fixed_service_wait_s(0.25, 2.0) == 1.0  # 0.5 / (2 * 0.5 * (1 - 0.5)): half of 2 s
    assert fixed_service_wait_s(1e-6, 2.0) == pytest.approx(2e-6, rel=1e-5)


@pytest.mark.parametrize("services_s", [(2.0, 0.5, 1.0), (0.5, 1.0, 2.0)], ids=["slowest-first", "slowest-last"])
def test_in_a_tandem_inputs_wait_as_before_its_slowest_server(services_s: tuple[float, ...]) -> None:
    assert tandem_latency_s(0.25, services_s) == 1.0 + 3.5


def test_batches_of_one_are_served_as_inputs_are() -> None:
    for load in (0.1, 0.5, 0.9):
        expected_s = 2.0 + fixed_service_wait_s(load / 2, 2.0)
        assert batch_latency_s(load / 2, [2.0]) == pytest.approx(expected_s, rel=1e-9)


def test_a_batch_takes_all_that_came_meanwhile_and_ends_with_its_last_input() -> None:
    # Where a batch takes as long as its inputs alone, nothing is gained by it.
    assert batch_latency_s(0.25, [2.0, 4.0, 6.0]) > 2.0 + fixed_service_wait_s(0.25, 2.0)
    # Under hardly any load a batch is one input; hardly ever full, it gains nothing by a larger limit.
    assert batch_latency_s(1e-6, [2.0, 3.0]) == pytest.approx(2.0, rel=1e-5)
    assert batch_latency_s(0.5, [2.0] * 20) == pytest.approx(batch_latency_s(0.5, [2.0] * 40), rel=1e-9)


@pytest.mark.parametrize(
    "formula",
    [
        pytest.param(lambda: fixed_service_wait_s(0.5, 2.0), id="fixed"),
        pytest.param(lambda: tandem_latency_s(0.5, [1.0, 2.0]), id="tandem"),
        pytest.param(lambda: batch_latency_s(1.0, [1.0, 2.0]), id="batches"),
    ],
)
def test_more_than_can_be_served_has_no_mean_wait(formula: Callable[[], float]) -> None:
    with pytest.raises(DataError, match="a load of 1 has no mean wait"):
        formula()


def test_queues_too_long_to_be_counted_with_are_refused() -> None:
    with pytest.raises(DataError, match="queues of more than 1024 are likely"):
        batch_latency_s(0.9999, [1.0])
