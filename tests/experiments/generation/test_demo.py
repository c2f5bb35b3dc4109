from __future__ import annotations

from experiments.generation.demo import ASKED, NUM_LEARNED, TOPICS, divided


def test_no_prompt_is_in_both_parts_and_none_is_left_out() -> None:
    learned, others = divided()
    assert len(learned) == NUM_LEARNED
    assert len({*learned, *others}) == len(learned) + len(others) == len(TOPICS) * len(ASKED)
