from __future__ import annotations

from deployments.ingress.loads import Loads


def test_a_call_counts_from_the_choice_of_its_replica_to_its_end() -> None:
    loads: Loads[str] = Loads()
    loads.begin("call", "a", 3)
    loads.begin("other", "a", 2)
    assert (loads.of("a"), loads.of("b")) == (5, 0)
    loads.end("call")
    assert loads.of("a") == 2


def test_the_replica_that_took_the_call_counts_not_the_one_that_was_chosen() -> None:
    loads: Loads[str] = Loads()
    loads.begin("call", "a", 3)
    loads.move("call", "b")
    assert (loads.of("a"), loads.of("b")) == (0, 3)


def test_a_call_that_is_reported_as_routed_after_its_end_leaves_nothing_behind() -> None:
    loads: Loads[str] = Loads()
    loads.begin("call", "a", 3)
    loads.end("call")
    loads.move("call", "b")
    assert (loads.of("a"), loads.of("b")) == (0, 0)


def test_a_call_that_is_chosen_for_again_counts_once() -> None:
    loads: Loads[str] = Loads()
    loads.begin("call", "a", 3)
    loads.begin("call", "b", 3)
    assert (loads.of("a"), loads.of("b")) == (0, 3)


def test_a_call_that_ends_before_it_is_known_to_be_elsewhere_leaves_nothing_behind() -> None:
    loads: Loads[str] = Loads()
    loads.begin("first", "a", 3)
    loads.begin("second", "b", 5)  # taken by "a", and cancelled before that was told
    loads.end("second")
    loads.end("first")
    assert (loads.of("a"), loads.of("b")) == (0, 0)
