"""What a `/predict` body asks and how it is answered, as Offramp does; the same for every peer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from earlyexit.errors import InputError


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The full model's answer to one text."""

    label: str
    score: float
    """Softmax probability of the label."""
    exit: int
    """The last block: no input leaves early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The texts of one request."""

    texts: tuple[str, ...]
    alone: bool
    """Whether a text was asked for, not a list of them."""


def parse_body(document: object) -> Asked:
    """The texts of a parsed body, whose other fields do not matter; raises InputError for what has none."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    if isinstance(inputs, str):
        return Asked(texts=(inputs,), alone=True)
    if not isinstance(inputs, list) or not inputs or not all(isinstance(text, str) for text in inputs):
        raise InputError('the body must be {"inputs": "text"} or {"inputs": ["text", ...]}')
    return Asked(texts=tuple(inputs), alone=False)


def reply(documents: Sequence[dict[str, Any]], *, alone: bool) -> dict[str, Any]:
    """The body that answers a request, ready for JSON."""
    return documents[0] if alone else {"outputs": list(documents)}


def answer_together(
    predict: Callable[[Sequence[str]], list[Prediction]], requests: Sequence[Asked]
) -> list[dict[str, Any]]:
    """The replies to several requests, whose texts are one batch."""
    predictions = iter(predict([text for asked in requests for text in asked.texts]))
    return [reply([asdict(next(predictions)) for _ in asked.texts], alone=asked.alone) for asked in requests]


def answer(predict: Callable[[Sequence[str]], list[Prediction]], asked: Asked | Sequence[Asked]) -> Any:
    """Of a batch; some servers make none where batches are to be of one request each."""
    return answer_together(predict, [asked])[0] if isinstance(asked, Asked) else answer_together(predict, asked)
