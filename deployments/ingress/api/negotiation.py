"""What kind of answer a caller takes, and how it may be packed: HTTP's `Accept` and `Accept-Encoding`. Pure."""

from __future__ import annotations

from collections.abc import Sequence

ANYTHING = "*/*"
GZIP = "gzip"
LEAST_BYTES = 1_500
"""Of an answer that is compressed: below, it fits into one packet anyway."""


def preferred(accept: str, offered: Sequence[str]) -> str | None:
    """The content type that a caller likes best (RFC 9110, section 12.5.1), the first of several; None: it takes none.

    A type's weight is that of the most specific range which it falls into. Ranges that cannot be read count as absent.
    """
    ranges = _weights(accept)
    if not ranges:
        return offered[0] if not accept.strip() else None
    weights = [
        _weight(ranges, (content_type, f"{content_type.partition('/')[0]}/*", ANYTHING)) for content_type in offered
    ]
    best = max(weights)
    return offered[weights.index(best)] if best > 0 else None


def takes_gzip(accept_encoding: str) -> bool:
    """Whether a caller that sends this would have its answer compressed."""
    return _weight(_weights(accept_encoding), (GZIP, "*")) > 0


def _weights(header: str) -> dict[str, float]:
    """By range, in small letters, without its parameters."""
    weights: dict[str, float] = {}
    for part in header.split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        weight = next((each[2:] for each in parameters if each.startswith("q=")), "1")
        if name and (number := _number(weight)) is not None:
            weights[name] = number
    return weights


def _weight(weights: dict[str, float], names: Sequence[str]) -> float:
    return next((weights[name] for name in names if name in weights), 0.0)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if 0 <= number <= 1 else None
