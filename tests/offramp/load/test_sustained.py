from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offramp.load.sustained import Bounds, Ending, Measured, Search, Verdict

Server = Callable[[float, int], Verdict]
"""What a probe of a rate gives, and the how manyth probe it is, from 0."""


def run(**changes: Any) -> Measured:
    """A good one, unless told otherwise."""
    good = {"lost_share": 0.0, "p99_s": 0.05, "from_sent_p99_s": 0.05, "lateness_p99_s": 0.001}
    return Measured(**(good | changes))


def up_to(capacity_per_s: float) -> Server:
    return lambda rate_per_s, _: "passed" if rate_per_s <= capacity_per_s else "failed"


def searched(server: Server, *, growth: float = 2.0, resolution: float = 0.1, most_probes: int = 30) -> Search:
    """From 100/s, between 10/s and 1000/s."""
    bounds = Bounds(low_per_s=10.0, high_per_s=1000.0, resolution=resolution, most_probes=most_probes)
    search = Search(start_per_s=100.0, bounds=bounds, growth=growth)
    while (rate_per_s := search.next_rate()) is not None:
        search = search.learn(rate_per_s, server(rate_per_s, len(search.probes)))
    return search


def rates(search: Search) -> list[float]:
    return [round(probe.rate_per_s, 1) for probe in search.probes]


@pytest.mark.parametrize(
    ("told", "verdict"),
    [
        pytest.param(run(), "passed", id="all is well"),
        pytest.param(run(p99_s=0.1, from_sent_p99_s=0.1, lost_share=0.01), "passed", id="just well enough"),
        pytest.param(run(p99_s=0.101), "failed", id="too slow"),
        pytest.param(run(lost_share=0.02), "failed", id="too much lost"),
        pytest.param(run(p99_s=None, from_sent_p99_s=None), "failed", id="nothing answered"),
        pytest.param(run(lateness_p99_s=0.011), "client late", id="a late client hides a server that may be well"),
        pytest.param(
            run(lateness_p99_s=0.02, p99_s=0.13, from_sent_p99_s=0.12), "client late", id="slow by no more than late"
        ),
        pytest.param(
            run(lateness_p99_s=0.02, p99_s=0.14, from_sent_p99_s=0.121), "failed", id="slow by more than late"
        ),
        pytest.param(run(lateness_p99_s=0.02, lost_share=0.02), "failed", id="late, but the server refused too much"),
    ],
)
def test_a_run_passes_fails_or_tells_nothing_because_its_client_was_late(told: Measured, verdict: Verdict) -> None:
    assert told.verdict(0.1) == verdict


def test_a_search_brackets_the_capacity_and_asks_each_failure_again() -> None:
    search = searched(up_to(250.0), resolution=0.2)
    # 100 passes, so does 2 times that, 4 times that is 800; means: sqrt(200 * 800) = 400, 282.8, 237.8; 282.8 / 237.8
    # is 1.19.
    assert rates(search) == [100.0, 200.0, 800.0, 400.0, 282.8, 237.8, 282.8]
    assert (round(search.best_per_s, 1), search.ending) == (237.8, "bracketed")
    # The second probe, of 200/s, fails although 500/s are sustained.
    search = searched(lambda rate, index: "failed" if index == 1 else up_to(500.0)(rate, index))
    assert search.best_per_s <= 500.0 <= 1.1 * search.best_per_s
    # 141.4, 168.2 and 183.4 pass, and 183.4 is within 10 % of 200, which then passes as well: up from there.
    assert rates(search)[:6] == [100.0, 200.0, 141.4, 168.2, 183.4, 200.0]
    assert search.probes[6].rate_per_s > 200.0
    assert search.ending == "bracketed"


@pytest.mark.parametrize("capacity_per_s", [11.0, 99.0, 100.0, 101.0, 333.3, 950.0], ids=str)
def test_the_result_is_within_the_resolution_of_the_capacity(capacity_per_s: float) -> None:
    best_per_s = searched(up_to(capacity_per_s), resolution=0.03).best_per_s
    assert best_per_s <= capacity_per_s <= 1.03 * best_per_s


def test_a_search_ends_at_both_bounds_and_asks_a_late_client_again() -> None:
    search = searched(up_to(0.0))
    assert rates(search) == [100.0, 50.0, 12.5, 10.0, 10.0]
    assert (search.best_per_s, search.ending) == (0.0, "none passed")
    search = searched(up_to(1e9))
    assert rates(search) == [100.0, 200.0, 800.0, 1000.0]
    assert (search.best_per_s, search.ending) == (1000.0, "highest")
    search = searched(lambda rate, index: "client late" if index == 1 else up_to(250.0)(rate, index), resolution=0.2)
    assert rates(search) == [100.0, 200.0, 200.0, 800.0, 400.0, 282.8, 237.8, 282.8]
    assert search.ending == "bracketed"
    search = searched(lambda rate, _: "passed" if rate <= 250.0 else "client late", resolution=0.2)
    assert rates(search) == [100.0, 200.0, 800.0, 800.0, 400.0, 400.0, 282.8, 282.8, 237.8]
    assert (round(search.best_per_s, 1), search.ending) == (237.8, "client late")


@pytest.mark.parametrize(("most_probes", "ending"), [(3, "most probes"), (4, "highest")], ids=str)
def test_a_search_takes_no_more_probes_than_it_may(most_probes: int, ending: Ending) -> None:
    search = searched(up_to(1e9), most_probes=most_probes)
    assert (len(search.probes), search.ending) == (most_probes, ending)
