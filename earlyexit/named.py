"""Objects that a model card or a setting selects by name: an entry of a table, or a user's `module:function`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any, ClassVar, Literal, TypeVar

from earlyexit.errors import ModelFolderError, OfframpError, first_line

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Model names must be valid in URLs and file names."""
HopDtype = Literal["same", "float16"]
"""The dtype of `float` tensors that travel between processes: the model's dtype, or float16."""
Fill = Literal["compute", "copy"]
"""How the keys and values of a token are made for blocks that it skipped: see `earlyexit.sequences.kv`."""
Made = TypeVar("Made")
NamedSpec = Mapping[str, Any]
"""`{"name": NAME, ...}`. The other keys are keyword arguments for the object of that name."""


def is_own(name: str) -> bool:
    """Whether a name has the form `module:function`, which selects a function of the user."""
    module, colon, function = name.partition(":")
    return bool(colon) and function.isidentifier() and all(part.isidentifier() for part in module.split("."))


def make_named(spec: NamedSpec, table: Mapping[str, str], kind: type[Made]) -> Made:
    """Imports the factory that `spec` names and calls it with the other settings of `spec`.

    `table`: import paths by name. Raises ModelFolderError for unknown names, for functions that cannot be imported, for
    settings that the factory does not accept, and for objects that are no `kind`.
    """
    called = kind.__name__.lower()
    name = spec.get("name")
    if not isinstance(name, str):
        raise ModelFolderError(f"a {called} needs a name, which {dict(spec)} does not have")
    settings = {key: value for key, value in spec.items() if key != "name"}
    make = import_own(name if is_own(name) else look_up(name, table, called), called=called)
    with in_one_line(f"{called} {name!r} does not take {settings}"):
        made = make(**settings)
    if not isinstance(made, kind):
        raise ModelFolderError(f"{name!r} returned {type(made).__name__}; a {kind.__name__} is needed")
    return made


class Named:
    """Base class of objects that a model card selects by name."""

    name: ClassVar[str]

    def spec(self) -> dict[str, Any]:
        """Returns the entry for a model card. `make_named` builds an equal object from it.

        By default the entry holds the name and every constructor parameter that is not None. Each parameter must also
        be an attribute. The constructor of the class that defines `name` counts.
        """
        kind: Any = type(self)
        settings = {key: _plain(getattr(self, key)) for key in _parameters(kind)}
        return {"name": self.name} | {key: value for key, value in settings.items() if value is not None}


@cache
def _parameters(kind: Any) -> tuple[str, ...]:
    named = next((each for each in kind.__mro__ if "name" in vars(each)), kind)
    return tuple(signature(named).parameters)


def _plain(value: Any) -> Any:
    return [_plain(each) for each in value] if isinstance(value, tuple) else value


def import_own(name: str, *, called: str) -> Callable[..., Any]:
    """Returns the user's function `module:function`. Raises ModelFolderError if it cannot be imported."""
    place, _, attribute = name.partition(":")
    try:
        module = import_module(place)
    except Exception as error:  # the user's module may raise any error
        missing = isinstance(error, ModuleNotFoundError) and f"{place}.".startswith(f"{error.name}.")
        advice = "; add the folder of its module to PYTHONPATH" if missing else ""
        raise ModelFolderError(f"{called} {name!r} cannot be imported: {first_line(error)}{advice}") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None:
        where = getattr(module, "__file__", None) or "a namespace package"
        raise ModelFolderError(
            f"{called} {name!r} cannot be imported: module {place!r} ({where}) has no attribute {attribute!r}"
        )
    return function


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Replaces an error of any class, as a user's function may raise, by a ModelFolderError that begins with `what`."""
    try:
        yield
    except OfframpError:
        raise
    except Exception as error:
        kind = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        raise ModelFolderError(f"{what}: {kind}{first_line(error)}") from error


@cache
def import_attribute(name: str) -> Any:
    """Imports the module of `module:attribute` and returns the attribute. Raises the errors of the import."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


def look_up(name: str, table: Mapping[str, str], called: str) -> str:
    """Returns the table's entry for a name. Raises ModelFolderError, which lists the known names."""
    if name not in table:
        raise ModelFolderError(f"unknown {called} {name!r}; known: {', '.join(table)}, or your own as module:function")
    return table[name]
