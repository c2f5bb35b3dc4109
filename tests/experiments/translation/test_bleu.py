from __future__ import annotations

import pytest

from experiments.translation.bleu import bleu, words_of


def test_one_word_of_six_is_wrong() -> None:
    found = bleu(["the cat sat on a mat"], ["the cat sat on the mat"])
    assert found == pytest.approx(100 * (5 / 6 * 3 / 5 * 2 / 4 * 1 / 3) ** 0.25)


def test_what_is_too_short_is_punished() -> None:
    assert bleu(["a man rides a"], ["a man rides a horse"]) == pytest.approx(100 * 2.718281828 ** (1 - 5 / 4))


def test_a_word_counts_as_often_as_the_reference_has_it() -> None:
    assert bleu(["the the the the the"], ["the cat sat on the mat"]) == 0


def test_marks_are_words_and_numbers_stay_whole() -> None:
    assert words_of('He said: "3.5, no!"') == ["He", "said", ":", '"', "3.5", ",", "no", "!", '"']
