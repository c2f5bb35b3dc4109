"""What settings of tasks over images must be, whoever wrote the card; all raise ValueError."""

from __future__ import annotations

from collections.abc import Sequence


def listed_names(names: Sequence[str]) -> tuple[str, ...]:
    """Texts, as they are; a single text is no list of letters."""
    if isinstance(names, str) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"a list of names is needed, not {names!r}")
    return tuple(names)


def check_whole(most: int, **numbers: int) -> None:
    """Whole numbers from 1 to `most`, such as the sides of an image in pixels."""
    for called, number in numbers.items():
        if type(number) is not int or not 1 <= number <= most:
            raise ValueError(f"{called} is {number!r}; whole numbers from 1 to {most} are allowed")
