from __future__ import annotations

from earlyexit.sequences.sequence import Shown


def steps_of(shown: Shown) -> list[tuple[int, int, bool]]:
    """Where every step begins and ends, and whether a token came of it, until the sequence is whole."""
    steps = []
    while not shown.is_whole:
        begin, end = shown.seen, shown.until
        steps.append((begin, end, shown.answered()))
    return steps


def test_a_prompt_is_shown_in_chunks_and_then_one_token_at_a_time() -> None:
    assert steps_of(Shown(5, 7, 2)) == [(0, 2, False), (2, 4, False), (4, 5, True), (5, 6, True)]


def test_a_source_is_shown_whole_however_small_the_chunks() -> None:
    assert steps_of(Shown(5, 7, 2, first_chunk=5)) == [(0, 5, True), (5, 6, True)]


def test_what_begins_anew_is_shown_with_all_that_came_of_it() -> None:
    shown = Shown(2, 6, 3)
    assert shown.answered()
    assert shown.answered()
    shown.begin()
    assert steps_of(shown) == [(0, 3, False), (3, 4, True), (4, 5, True)]
