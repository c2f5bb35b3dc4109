from __future__ import annotations

from experiments.generation.demo import ASKED, NUM_LEARNED, NUM_SHOWN, TOPICS, Timed, divided, same_words, told
from offramp.client.generation import Generation


def said(text: str, *exits: int) -> Generation:
    return Generation(text=text, ended="stop", exits=exits, num_prompt=3)


def test_no_prompt_is_in_two_parts_and_none_is_left_out() -> None:
    parts = divided()
    assert [len(part) for part in parts[:2]] == [NUM_SHOWN, NUM_LEARNED]
    together = [prompt for part in parts for prompt in part]
    assert len(set(together)) == len(together) == len(TOPICS) * len(ASKED)


def test_answers_are_compared_word_by_word() -> None:
    full = [said("the cat sat down"), said("yes")]
    assert same_words(full, full) == 1.0
    assert same_words([said("the dog sat"), said("no")], full) == 2 / 5


def test_the_table_says_what_left_early() -> None:
    stock = [Timed(generation=said("a b", 29, 29), first_s=0.1, last_s=0.3)]
    early = [Timed(generation=said("a b", 7, 29), first_s=0.1, last_s=0.2)]
    table = told({"stock": (stock, 0.5), "early-exit": (early, 0.25)})
    rows = list(zip(*(column.cells for column in table.columns), strict=True))
    assert rows == [
        ("stock", "4.0", "100 ms", "200 ms", "0.0%", "100.0%"),
        ("early-exit", "8.0", "100 ms", "100 ms", "50.0%", "100.0%"),
    ]
