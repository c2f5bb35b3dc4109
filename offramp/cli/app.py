"""The command line: parses, calls, prints. Heavy libraries are imported by the command that needs them.

The options of a command are the fields of a pydantic model: name, type, default, bounds and help are the field's.
"""

from __future__ import annotations

import ast
import inspect
import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.core

from earlyexit.errors import InputError, OfframpError

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


@dataclass(frozen=True, slots=True)
class Command:
    """A command by what it loads when it is called, `module:name` in `offramp`."""

    job: str
    """The model whose fields are the options and whose docstring is the help. Its module loads nothing heavy."""
    run: str
    """The function that takes the job."""

    @property
    def help(self) -> str | None:
        """The docstring, read from the source: the list of commands, which a shell completes from, loads no model."""
        module, _, name = self.job.partition(":")
        return ast.get_docstring(_classes(module)[name])


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    spec = find_spec(f"offramp.{module}")
    assert spec is not None
    assert spec.origin is not None
    parsed = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}


COMMANDS = {
    "serve": Command("spec.jobs:ServeJob", "commands.serve:run"),
    "demo": Command("commands.options:DemoJob", "demo.run:run"),
    "bench": Command("commands.options:BenchJob", "commands.bench:run"),
    "train": Command("commands.jobs:TrainOptions", "commands.train:run"),
    "ramp": Command("commands.jobs:RampJob", "commands.ramp:run"),
    "inject": Command("commands.jobs:InjectOptions", "commands.inject:run"),
    "chain": Command("commands.jobs:ChainJob", "commands.chain:run"),
    "calibrate": Command("commands.jobs:CalibrateOptions", "commands.calibrate_command:run"),
    "doctor": Command("commands.options:DoctorJob", "commands.doctor:run"),
    "predict": Command("commands.options:PredictJob", "commands.predict:run"),
    "generate": Command("commands.options:GenerateJob", "commands.generate:run"),
    "profile": Command("commands.jobs:ProfileOptions", "commands.profile:run"),
    "forecast": Command("commands.options:ForecastJob", "commands.forecast:run"),
    "plan": Command("commands.options:PlanJob", "commands.plan_command:run"),
    "what-if": Command("commands.options:WhatIfJob", "commands.plan_command:run_what_if"),
    "simulate": Command("commands.options:SimulateJob", "commands.simulate:run"),
    "sites": Command("commands.jobs:SitesJob", "commands.sites:run"),
    "render": Command("commands.options:RenderJob", "commands.service:render"),
    "deploy": Command("commands.options:DeployJob", "commands.service:deploy"),
    "status": Command("commands.options:StatusJob", "commands.service:status"),
    "delete": Command("commands.options:DeleteJob", "commands.service:delete"),
    "versions": Command("commands.options:VersionsJob", "commands.versions:versions"),
    "canary": Command("commands.options:CanaryJob", "commands.versions:canary"),
    "promote": Command("commands.options:PromoteJob", "commands.versions:promote"),
    "load": Command("commands.options:LoadJob", "commands.versions:load"),
    "unload": Command("commands.options:UnloadJob", "commands.versions:unload"),
}
"""By the model of its options, whose docstring is the help, and by the function that takes such a model."""


class Commands(typer.core.TyperGroup):
    """The commands by name. The parameters of a command are built only when the command runs or shows its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command without its parameters, for the list of commands."""
        found = COMMANDS.get(cmd_name)
        return None if found is None else typer.core.TyperCommand(cmd_name, help=found.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Return the name, the command with its parameters, and the arguments that are left."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, build(name, COMMANDS[name]) if command is not None and name is not None else None, rest


class _Command(typer.core.TyperCommand):
    """A command whose help shows no type beside a flag, which takes no value."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


def build(name: str, command: Command) -> Any:
    """Return a command with all its parameters; the job gets those that are given, and its own defaults."""
    shape: type[BaseModel] = _loaded(command.job)
    fields = {each.alias or name: each for name, each in shape.model_fields.items() if not each.exclude}

    def run(context_: typer.Context, **values: Any) -> None:
        given = {
            name: value
            for name, value in values.items()
            if value is not None and getattr(context_.get_parameter_source(name), "name", None) != "DEFAULT"
        }
        job = validated(shape, given)
        _loaded(command.run)(job)  # which may take seconds to load

    parameters = [parameter(name, field) for name, field in fields.items()]
    context = inspect.Parameter("context_", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__annotations__ = {each.name: each.annotation for each in (context, *parameters)}
    run.__dict__["__signature__"] = inspect.Signature([context, *parameters])
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    alone.command(name, cls=_Command, help=command.help)(run)
    return typer.main.get_command(alone)


def _loaded(named: str) -> Any:
    module, _, name = named.partition(":")
    return getattr(import_module(f"offramp.{module}"), name)


def parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Return the parameter of a field, which is an argument where the field's schema has the key `argument`."""
    kind = _kind(field.annotation)
    default: Any = inspect.Parameter.empty if field.is_required() else field.default
    if default in ("", ()):
        default = None
    option: dict[str, Any] = {"help": help_of(field, shows_default=default is None)}
    allowed = get_args(kind) if get_origin(kind) is Literal else field.examples if kind is str else None
    if allowed:
        option["autocompletion"] = lambda incomplete: [each for each in allowed if each.startswith(incomplete)]
    if get_origin(kind) is Literal:
        kind = str
    elif get_origin(kind) is tuple and _kind(get_args(kind)[0]) in (int, float):  # numbers separated by commas
        kind, default = str, default and ",".join(map(str, default))
    limits = list(field.metadata)
    if get_origin(kind) in (tuple, list):
        [item, *_] = get_args(kind)
        limits += [each for said in getattr(item, "__metadata__", ()) for each in said.metadata]
        kind = list[_kind(item)]  # type: ignore[misc] # known only when it runs
    bounds = {key: getattr(each, key) for each in limits for key in ("ge", "le") if hasattr(each, key)}
    if kind is int or len(bounds) > 1:  # typer says less of a float's one bound than pydantic does
        option |= {typers: bounds[ours] for ours, typers in (("ge", "min"), ("le", "max")) if ours in bounds}
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "argument" in extra:
        shown: Any = typer.Argument(metavar=str(extra["argument"]), **option)
    else:
        names = (f"--{name.replace('_', '-')}",) if default is False else ()  # else typer adds --no-...
        shown = typer.Option(*names, **option)
    annotation: Any = Annotated[kind | None if default is None else kind, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _kind(annotation: Any) -> Any:
    """The first type that a union has besides None, without what is annotated."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(each for each in get_args(annotation) if each is not NoneType)
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def help_of(field: FieldInfo, *, shows_default: bool = True) -> str:
    """Return the first sentence of a field's docstring, and its default unless typer shows it."""
    said = " ".join((field.description or "").split())
    first = re.split(r"(?<=[.;])\s", said)[0].rstrip(".;")
    if not shows_default or field.is_required():
        return f"{first}."
    [_, *unset] = said.split("None: ")
    words = unset[0].split(". ")[0].rstrip(".") if unset else "none"
    return f"{first}; default: {words}."


def validated(shape: type[Any], given: Mapping[str, Any]) -> Any:
    """Return the given options as a model; raises InputError that names the option and what it may be."""
    from pydantic import ValidationError

    from offramp.commands.options import refusal

    try:
        return shape.model_validate(given)
    except ValidationError as error:
        [first, *_] = error.errors()
    name = str(first["loc"][0])
    if first["type"] == "literal_error":
        [field] = [each for key, each in shape.model_fields.items() if name in (key, each.alias)]
        allowed = ", ".join(map(str, get_args(_kind(field.annotation))))
        raise InputError(f"--{name.replace('_', '-')} {first['input']!r}; allowed: {allowed}")
    raise refusal(name, first)


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Early-exit model serving on Ray Serve.",
)


def _print_version(asked: bool) -> None:
    if asked:
        import offramp

        print(f"offramp {offramp.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Early-exit model serving on Ray Serve."""


SERVED = {
    *("PIL", "google", "grpc", "httptools", "httpx", "jinja2", "networkx", "packaging", "psutil", "ray"),
    *("safetensors", "starlette", "tokenizers", "torch", "transformers", "uvicorn"),
}
"""Modules of the extra `serve`."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what went wrong is one line on stderr, and the error's exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app(arguments)
    except (OfframpError, OSError) as error:  # such as a full disk
        print(f"offramp: {error}", file=sys.stderr)
        raise SystemExit(getattr(error, "exit_status", OfframpError.exit_status)) from None
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SERVED:
            raise
        print(f"offramp: {missing} is not installed; run: pip install 'offramp[serve]'", file=sys.stderr)
        raise SystemExit(InputError.exit_status) from None
