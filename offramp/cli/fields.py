"""Commands whose options are the fields of a pydantic model: name, type, default, bounds and help are the field's.

A command names its model as text, so that only the command that runs, or that shows its help, imports the model.
"""

from __future__ import annotations

import inspect
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
import typer.core

from earlyexit.errors import InputError
from offramp.cli.options import choice, completes

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

BOUNDS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "gt": (operator.gt, "above {:g}"),
    "ge": (operator.ge, "{:g} or above"),
    "le": (operator.le, "{:g} or below"),
}
"""How a field's metadata names a bound, when it holds, and what a message says of it."""
Command = Callable[..., Any]
CommandT = TypeVar("CommandT", bound=Command)


def takes_fields(model: str, options: Mapping[str, str] | None = None) -> Callable[[CommandT], CommandT]:
    """Give a command options that are fields of a model, which is `module:class`.

    `options` maps an option's parameter name to the field's path, such as `ingress.port`; the command receives the
    values as keyword arguments, None where one is not given. Without `options` every field is one, under its alias
    where it has one, unless it is excluded, and the command receives the model as `job`.
    """

    def mark(command: CommandT) -> CommandT:
        command.__dict__["fields"] = (model, options)
        return command

    return mark


class Commands(typer.core.TyperGroup):
    """The commands by name. The parameters of a command are built only when the command runs or shows its help."""

    functions: Mapping[str, Command] = {}

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of the help."""
        return list(self.functions)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command without its parameters, for the list of commands."""
        function = self.functions.get(cmd_name)
        return None if function is None else typer.core.TyperCommand(cmd_name, help=inspect.getdoc(function))

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name, the command with its parameters, and the arguments that are left."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, build(name, self.functions[name]) if command is not None and name is not None else None, rest


class _Command(typer.core.TyperCommand):
    """A command whose help shows no type beside a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


def build(name: str, function: Command) -> Any:
    """Return the command of a function, with all its parameters."""
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=_Command)(with_options(function) if "fields" in function.__dict__ else function)
    return typer.main.get_command(alone)


def with_options(function: Command) -> Command:
    """Return the function with a signature in which its options stand one by one."""
    named, options = function.__dict__["fields"]
    module, _, model = named.partition(":")
    shape: type[BaseModel] = getattr(import_module(module), model)
    hints = get_type_hints(function, localns={model: shape}, include_extras=True)
    own = [
        each.replace(annotation=hints[each.name])
        for each in inspect.signature(function).parameters.values()
        if each.kind is not inspect.Parameter.VAR_KEYWORD and each.name != "job"
    ]
    if options is None:
        declared = {each.alias or name: each for name, each in shape.model_fields.items() if not each.exclude}
        fields = [parameter(name, each, defaults=True) for name, each in declared.items()]
    else:
        fields = [parameter(option, field_at(shape, path)) for option, path in options.items()]

    def command(*arguments: Any, **given: Any) -> Any:
        if options is None:
            stated = {each.name: given.pop(each.name) for each in fields}
            given["job"] = validated(shape, {name: value for name, value in stated.items() if value is not None})
        return function(*arguments, **given)

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = {each.name: each.annotation for each in (*own, *fields)}
    command.__dict__["__signature__"] = inspect.Signature([*own, *fields])
    return command


def field_at(shape: type[BaseModel], path: str) -> FieldInfo:
    """Return the field at a path of names."""
    *above, last = path.split(".")
    for name in above:
        [shape] = [each for each in _members(shape.model_fields[name].annotation) if isinstance(each, type)]
    return shape.model_fields[last]


def _members(annotation: Any) -> tuple[Any, ...]:
    """The types that a union has besides None."""
    if get_origin(annotation) in (Union, UnionType):
        return tuple(each for each in get_args(annotation) if each is not NoneType)
    return (annotation,)


def parameter(name: str, field: FieldInfo, *, defaults: bool = False) -> inspect.Parameter:
    """Return the parameter of an option. With `defaults` it has the field's default, else None when it is left out."""
    kind = _members(field.annotation)[0]
    default: Any = (inspect.Parameter.empty if field.is_required() else field.default) if defaults else None
    default = None if default == "" else default
    option: dict[str, Any] = {"help": help_of(field, shows_default=default is None)}
    allowed: tuple[str, ...] = ()
    if get_origin(kind) is Literal:
        allowed, kind = get_args(kind), str
        option |= completes(allowed)
    elif kind is str:
        option |= completes(tuple(map(str, field.examples or ())))
    elif get_origin(kind) is tuple and get_args(kind)[0] in (int, float):  # numbers separated by commas
        kind, default = str, default and ",".join(map(str, default))
    elif get_origin(kind) is tuple:
        kind = list[str]
    bounds = {key: getattr(each, key) for each in field.metadata for key in ("ge", "le") if hasattr(each, key)}
    if kind is int or len(bounds) > 1:  # typer says less of a float's one bound than the check below
        option |= {typers: bounds[ours] for ours, typers in (("ge", "min"), ("le", "max")) if ours in bounds}
    wanted: Any = kind | None if default is None else kind
    check = _check(name, field, allowed)
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "argument" in extra:
        metavar = str(extra["argument"])
        return inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=default,
            annotation=Annotated[wanted, typer.Argument(metavar=metavar, callback=check, **option)],
        )
    names = (f"--{name.replace('_', '-')}",) if default is False else ()  # else typer adds --no-...
    annotation: Any = Annotated[wanted, typer.Option(*names, callback=check, **option)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _check(name: str, field: FieldInfo, allowed: tuple[str, ...]) -> Callable[[Any], Any]:
    """The check of a given choice or number: raises InputError, or typer.BadParameter."""
    held = [
        (holds, getattr(each, key), words.format(getattr(each, key)))
        for key, (holds, words) in BOUNDS.items()
        for each in field.metadata
        if hasattr(each, key)
    ]

    def check(value: Any) -> Any:
        if allowed:
            return choice(name.replace("_", "-"), value, allowed)
        if held and isinstance(value, float) and not _holds(value, held):
            raise typer.BadParameter(f"{value} is not a finite number, {', '.join(words for *_, words in held)}")
        return value

    return check


def _holds(value: float, bounds: Sequence[tuple[Callable[[float, float], bool], float, str]]) -> bool:
    return math.isfinite(value) and all(holds(value, bound) for holds, bound, _ in bounds)


def help_of(field: FieldInfo, *, shows_default: bool = True) -> str:
    """Return the first sentence of a field's docstring, and its default unless typer shows it."""
    said = " ".join((field.description or "").split())
    first = re.split(r"(?<=[.;])\s", said)[0].rstrip(".;")
    if not shows_default:
        return f"{first}."
    default = field.get_default(call_default_factory=True)
    if default in (None, ""):
        [_, *unset] = said.split("None: ")
        words = unset[0].split(". ")[0].rstrip(".") if unset else "none"
    else:
        words = "none" if default == () else f"{default}"
    return f"{first}; default: {words}."


def nested(options: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options as a document of the model: values that are not given are left out."""
    document: dict[str, Any] = {}
    for name, path in options.items():
        value = given[name]
        if value is None or value == []:
            continue
        *above, last = path.split(".")
        part = document
        for each in above:
            part = part.setdefault(each, {})
        part[last] = value
    return document


def validated(shape: type[Any], document: Mapping[str, Any]) -> Any:
    """Return the document as a model; raises InputError that names the field."""
    from pydantic import ValidationError

    try:
        return shape.model_validate(document)
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {first['msg']}, not {first['input']}") from error
