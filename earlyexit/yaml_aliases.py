"""How much a text of YAML says by its aliases: a few hundred bytes of aliases of aliases would fill any memory."""

from __future__ import annotations

import yaml

MOST_REPEATED = 100_000
"""Values that aliases may add to those that are written out."""


def check_aliases(root: yaml.Node) -> None:
    """Raise yaml.MarkedYAMLError where an alias stands inside what it names, or aliases repeat too much.

    Takes time and memory by what is written out, not by what it says.
    """
    says: dict[int, int | None] = {}
    _count(root, says)


def _count(node: yaml.Node, says: dict[int, int | None]) -> int:
    """Values in a node with all that its aliases repeat; None in `says` while one is being counted."""
    if id(node) in says:
        known = says[id(node)]
        if known is None:
            raise yaml.MarkedYAMLError(problem="an alias stands inside what it names", problem_mark=node.start_mark)
        return known
    says[id(node)] = None
    count = 1
    for inner in _inside(node):
        count += _count(inner, says)
        if count > len(says) + MOST_REPEATED:
            words = f"aliases repeat more than {MOST_REPEATED:,} values; so many are allowed"
            raise yaml.MarkedYAMLError(problem=words, problem_mark=node.start_mark)
    says[id(node)] = count
    return count


def _inside(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [each for pair in node.value for each in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
