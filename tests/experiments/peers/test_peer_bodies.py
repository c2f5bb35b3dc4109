from __future__ import annotations

from collections.abc import Sequence

import pytest

from earlyexit.errors import InputError
from experiments.peers.bodies import Asked, Prediction, answer, answer_together, parse_body


def echo(texts: Sequence[str]) -> list[Prediction]:
    """Answers a text with itself; its score is the size of the batch that it was in."""
    return [Prediction(label=text, score=float(len(texts)), exit=5) for text in texts]


def test_a_text_alone_is_told_from_a_list_of_one() -> None:
    assert parse_body({"inputs": "pay"}) == Asked(texts=("pay",), alone=True)
    assert parse_body({"inputs": ["pay"]}) == Asked(texts=("pay",), alone=False)


def test_further_fields_do_not_matter() -> None:
    assert parse_body({"ids": ["a"], "inputs": "pay", "timeout_s": 1.0}) == parse_body({"inputs": "pay"})


@pytest.mark.parametrize(
    "document", [None, "pay", ["pay"], {}, {"inputs": None}, {"inputs": 3}, {"inputs": []}, {"inputs": ["pay", 3]}]
)
def test_what_asks_nothing_is_an_input_error(document: object) -> None:
    with pytest.raises(InputError, match="the body must be"):
        parse_body(document)


def test_requests_of_several_texts_are_one_batch_and_get_their_own_answers_back() -> None:
    requests = [parse_body({"inputs": inputs}) for inputs in ("a", ["b", "c"], ["d"])]
    assert answer_together(echo, requests) == [
        {"label": "a", "score": 4.0, "exit": 5},
        {"outputs": [{"label": "b", "score": 4.0, "exit": 5}, {"label": "c", "score": 4.0, "exit": 5}]},
        {"outputs": [{"label": "d", "score": 4.0, "exit": 5}]},
    ]


def test_a_request_that_no_batch_was_made_of_is_answered_too() -> None:
    asked = parse_body({"inputs": "a"})
    assert answer(echo, asked) == {"label": "a", "score": 1.0, "exit": 5}
    assert answer(echo, [asked]) == [answer(echo, asked)]
