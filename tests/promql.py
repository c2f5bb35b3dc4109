"""Of a PromQL expression the names it uses: enough of the language for a dashboard, no evaluation."""

from __future__ import annotations

import re
from dataclasses import dataclass

AGGREGATIONS = {"sum", "min", "max", "avg", "count", "topk"}
FUNCTIONS = {"rate", "increase", "changes", "histogram_quantile", "scalar"}
KEYWORDS = {"by", "without", "on", "ignoring", "group_left", "group_right", "and", "or", "unless", "bool", "offset"}
TOKEN = re.compile(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<range>\[[^\]]*\])|(?P<number>\d+(?:\.\d+)?)'
    r"|(?P<name>[A-Za-z_:][\w:]*)|(?P<mark>=~|!~|!=|==|>=|<=|[-+*/%^(){},=<>]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Used:
    """A metric of an expression, and the labels that are asked of it."""

    metric: str
    labels: frozenset[str]


def uses(expression: str) -> list[Used]:
    """Every metric, with the labels it is selected or grouped by; raises ValueError for what is no expression.

    A grouping counts for all metrics in its parentheses.
    """
    tokens = list(_tokens(expression))
    found, rest = _expression(tokens, 0, frozenset())
    if rest != len(tokens):
        raise ValueError(f"{expression}: {tokens[rest][1]!r} is left over")
    return found


def _tokens(expression: str) -> list[tuple[str, str]]:
    found, position = [], 0
    expression = expression.rstrip()
    while position < len(expression):
        match = TOKEN.match(expression, position)
        if match is None or match.lastgroup is None:
            raise ValueError(f"{expression}: cannot be read from {expression[position:]!r}")
        found.append((match.lastgroup, match[match.lastgroup]))
        position = match.end()
    return found


def _expression(tokens: list[tuple[str, str]], at: int, grouped: frozenset[str]) -> tuple[list[Used], int]:
    """One operand after the other, until a parenthesis or a comma ends them."""
    found, at = _operand(tokens, at, grouped)
    while at < len(tokens) and tokens[at][1] in {"+", "-", "*", "/", "%", "^", "==", "!=", ">", "<", ">=", "<="}:
        more, at = _operand(tokens, at + 1, grouped)
        found += more
    return found, at


def _operand(tokens: list[tuple[str, str]], at: int, grouped: frozenset[str]) -> tuple[list[Used], int]:
    kind, text = tokens[at] if at < len(tokens) else ("end", "")
    if kind == "number":
        return [], at + 1
    if text == "(":
        return _arguments(tokens, at, grouped)
    if kind != "name" or text in KEYWORDS:
        raise ValueError(f"{text!r} where a value is needed")
    if text in AGGREGATIONS:
        labels, at = _grouping(tokens, at + 1)
        return _arguments(tokens, at, grouped | labels)
    if at + 1 < len(tokens) and tokens[at + 1][1] == "(":
        if text not in FUNCTIONS:
            raise ValueError(f"no function {text!r}")
        return _arguments(tokens, at + 1, grouped)
    return _selector(tokens, at, grouped)


def _arguments(tokens: list[tuple[str, str]], at: int, grouped: frozenset[str]) -> tuple[list[Used], int]:
    at = _expect(tokens, at, "(")
    found, at = _expression(tokens, at, grouped)
    while tokens[at : at + 1] == [("mark", ",")]:
        more, at = _expression(tokens, at + 1, grouped)
        found += more
    return found, _expect(tokens, at, ")")


def _grouping(tokens: list[tuple[str, str]], at: int) -> tuple[frozenset[str], int]:
    """The labels of a `by (...)`, where there is one."""
    if tokens[at : at + 1] != [("name", "by")]:
        return frozenset(), at
    at, labels = _expect(tokens, at + 1, "("), set()
    while tokens[at][1] != ")":
        if tokens[at][0] == "name":
            labels.add(tokens[at][1])
        else:
            _expect(tokens, at, ",")
        at += 1
    return frozenset(labels), at + 1


def _selector(tokens: list[tuple[str, str]], at: int, grouped: frozenset[str]) -> tuple[list[Used], int]:
    metric, labels = tokens[at][1], set(grouped)
    at += 1
    if tokens[at : at + 1] == [("mark", "{")]:
        while tokens[at][1] != "}":
            if tokens[at][0] == "name":
                labels.add(tokens[at][1])
            at += 1
        at += 1
    if at < len(tokens) and tokens[at][0] == "range":
        at += 1
    return [Used(metric=metric, labels=frozenset(labels))], at


def _expect(tokens: list[tuple[str, str]], at: int, text: str) -> int:
    if at >= len(tokens) or tokens[at][1] != text:
        raise ValueError(f"{text!r} is missing before {tokens[at][1] if at < len(tokens) else 'the end'!r}")
    return at + 1
