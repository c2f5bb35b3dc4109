from __future__ import annotations

from collections.abc import Sequence

import pytest

from earlyexit.errors import InputError
from experiments.peers.bodies import Asked, Prediction, answer_together, parse_body, reply


class Echo:
    """Answers a text with itself; its score is the size of the batch that it was in."""

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        return [Prediction(label=text, score=float(len(texts))) for text in texts]


def test_a_text_alone_is_answered_by_an_object() -> None:
    asked = parse_body({"inputs": "pay"})
    assert asked == Asked(texts=("pay",), alone=True)
    assert reply(asked, [Prediction(label="bill", score=0.5)]) == {"label": "bill", "score": 0.5}


def test_a_list_is_answered_by_a_list_even_if_it_holds_one_text() -> None:
    asked = parse_body({"inputs": ["pay"]})
    assert asked == Asked(texts=("pay",), alone=False)
    assert reply(asked, [Prediction(label="bill", score=0.5)]) == {"predictions": [{"label": "bill", "score": 0.5}]}


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
    assert answer_together(Echo(), requests) == [
        {"label": "a", "score": 4.0},
        {"predictions": [{"label": "b", "score": 4.0}, {"label": "c", "score": 4.0}]},
        {"predictions": [{"label": "d", "score": 4.0}]},
    ]
