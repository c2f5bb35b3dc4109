"""Variants by name in a card or a setting: from a table, or a user's own as `module:function`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, Literal

from earlyexit.errors import ModelFolderError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Model names stand in URLs and file names."""
HopDtype = Literal["same", "float16"]
"""The type of `float` tensors between processes: the model's own type, or half precision."""
Fill = Literal["compute", "copy"]
"""How skipped blocks fill the keys and values of a token: see `earlyexit.sequences.kv_memory`."""
NamedSpec = Mapping[str, Any]
"""`{"name": NAME, ...}`; the other keys are the variant's own settings."""


def is_own(name: str) -> bool:
    """Whether a name is a function, `module:function`, rather than an entry of a table."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def make_named(spec: NamedSpec, table: Mapping[str, str], *, called: str) -> Any:
    """Import what the name stands for, and call it with the settings beside the name.

    Raises ModelFolderError for unknown names, for functions that cannot be imported, and for settings that do not fit.
    """
    name = spec.get("name")
    if not isinstance(name, str):
        raise ModelFolderError(f"a {called} needs a name, which {dict(spec)} does not have")
    settings = {key: value for key, value in spec.items() if key != "name"}
    make = import_own(name if is_own(name) else look_up(name, table, called), called=called)
    try:
        return make(**settings)
    except (TypeError, ValueError) as error:
        raise ModelFolderError(f"{called} {name!r} does not take {settings}: {error}") from error


class Named:
    """A variant that a card names."""

    name: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """Returns its entry in a card, of which `make_named` makes an equal object.

        Here these are its name, and the constructor's parameters of the class with that name, which must be attributes;
        None is left out.
        """
        kind: Any = type(self)
        given = {key: _plain(getattr(self, key)) for key in _parameters(kind)}
        return {"name": self.name} | {key: value for key, value in given.items() if value is not None}


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    named = next((each for each in kind.__mro__ if "name" in vars(each)), kind)
    return tuple(signature(named).parameters)


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def import_own(name: str, *, called: str) -> Callable[..., Any]:
    """Returns the function that `module:function` names; raises ModelFolderError."""
    place, _, attribute = name.partition(":")
    try:
        module = import_module(place)
    except (ImportError, AttributeError, SyntaxError, ValueError) as error:
        missing = isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}.")
        advice = "; add the folder of its module to PYTHONPATH" if missing else ""
        raise ModelFolderError(f"{called} {name!r} cannot be imported: {error}{advice}") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None:
        where = getattr(module, "__file__", None) or "a namespace package"
        raise ModelFolderError(
            f"{called} {name!r} cannot be imported: module {place!r} ({where}) has no attribute {attribute!r}"
        )
    return function


def import_attribute(name: str) -> Any:
    """Returns what `module:name` names, imported now; raises what importing raises."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def look_up(name: str, table: Mapping[str, str], called: str) -> str:
    """Returns the entry of a name; raises ModelFolderError that lists the known names."""
    if name not in table:
        raise ModelFolderError(f"unknown {called} {name!r}; known: {', '.join(table)}, or your own as module:function")
    return table[name]
