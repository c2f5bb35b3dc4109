"""What a `/predict` body asks and how it is answered; the same for every peer, whatever it parses JSON with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from earlyexit.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The full model's answer to one text."""

    label: str
    score: float
    """Softmax probability of the label."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The texts of one request."""

    texts: tuple[str, ...]
    alone: bool
    """Whether a text was asked for, not a list of them."""


class Predictor(Protocol):
    """What answers texts, all of them in one batch."""

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction per text."""
        ...


def parse_body(document: object) -> Asked:
    """The texts of a parsed body, whose other fields do not matter; raises InputError for what has none."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    if isinstance(inputs, str):
        return Asked(texts=(inputs,), alone=True)
    if not isinstance(inputs, list) or not inputs or not all(isinstance(text, str) for text in inputs):
        raise InputError('the body must be {"inputs": "text"} or {"inputs": ["text", ...]}')
    return Asked(texts=tuple(inputs), alone=False)


def reply(asked: Asked, predictions: Sequence[Prediction]) -> dict[str, Any]:
    """The body that answers a request, ready for JSON."""
    documents = [{"label": each.label, "score": each.score} for each in predictions]
    return documents[0] if asked.alone else {"predictions": documents}


def answer_together(model: Predictor, requests: Sequence[Asked]) -> list[dict[str, Any]]:
    """The replies to several requests, whose texts are one batch."""
    predictions = iter(model.predict([text for asked in requests for text in asked.texts]))
    return [reply(asked, [next(predictions) for _ in asked.texts]) for asked in requests]
