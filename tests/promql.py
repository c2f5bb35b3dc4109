"""Of a PromQL expression the names it uses: as much of the language as a dashboard needs, no evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass

CALLED = {"sum", "min", "max", "rate", "increase", "changes", "histogram_quantile", "scalar", "by"}
"""Aggregations, functions, and what else stands before a parenthesis."""
CLOSING = {")": "(", "}": "{", "]": "["}


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A metric of an expression, and the labels that are asked of it."""

    metric: str
    labels: frozenset[str]


def uses(expression: str) -> list[Used]:
    """Every metric of ours, with the labels that it is selected by, or that anything in the expression is grouped by.

    Raises ValueError where brackets do not match, and for a function that is not known.
    """
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", expression)
    _check_brackets(bare)
    unknown = set(re.findall(r"(\w+)\s*\(", bare)) - CALLED
    if unknown:
        raise ValueError(f"{expression}: no function {sorted(unknown)}")
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"\{[^}]*\}|\[[^]]*\]|\bby\s*\([^)]*\)", " ", bare))
    foreign = [word for word in words if word not in CALLED and not word.startswith("ray_")]
    if foreign:
        raise ValueError(f"{expression}: no metrics of Ray's page: {foreign}")
    grouped = {label for labels in re.findall(r"\bby\s*\(([^)]*)\)", bare) for label in re.findall(r"\w+", labels)}
    found = re.findall(r"\b(ray_\w+)(?:\{([^}]*)\})?", bare)
    return [Used(metric=name, labels=frozenset({*re.findall(r"\w+", labels), *grouped})) for name, labels in found]


def _check_brackets(bare: str) -> None:
    open_brackets: list[str] = []
    for mark in re.findall(r"[](){}[]", bare):
        if mark not in CLOSING:
            open_brackets.append(mark)
        elif not open_brackets or open_brackets.pop() != CLOSING[mark]:
            raise ValueError(f"{bare}: {mark!r} closes nothing")
    if open_brackets:
        raise ValueError(f"{bare}: {open_brackets[-1]!r} is not closed")
