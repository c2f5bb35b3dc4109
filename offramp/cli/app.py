"""The command line. It builds the options of each command from the fields of a pydantic model.

A field gives its option's name, type, default, bounds and help. Commands import the heavy libraries that they need.
"""

from __future__ import annotations

import ast
import gc
import inspect
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache
from importlib import import_module
from io import TextIOWrapper
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

import typer
import typer.core

from earlyexit.errors import InputError, OfframpError
from offramp import __version__

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo


COMMANDS = {
    "serve": ("spec.documents:ServeJob", "commands.serve:run"),
    "demo": ("commands.options:DemoJob", "demo.run:run"),
    "bench": ("commands.options:BenchJob", "commands.bench:run"),
    "train": ("commands.jobs:TrainOptions", "commands.train:run"),
    "ramp": ("commands.jobs:RampJob", "commands.ramp:run"),
    "inject": ("commands.jobs:InjectOptions", "commands.inject:run"),
    "chain": ("commands.jobs:ChainJob", "commands.train:run_chain"),
    "calibrate": ("commands.jobs:CalibrateOptions", "commands.calibrate_command:run"),
    "doctor": ("commands.options:DoctorJob", "commands.doctor:run"),
    "predict": ("commands.options:PredictJob", "commands.predict:run"),
    "generate": ("commands.options:GenerateJob", "commands.predict:run_generate"),
    "profile": ("commands.jobs:ProfileOptions", "commands.profile:run"),
    "forecast": ("commands.options:ForecastJob", "commands.forecast:run"),
    "plan": ("commands.options:PlanJob", "commands.plan:run"),
    "fleet": ("commands.options:FleetJob", "commands.fleet:run"),
    "what-if": ("commands.options:WhatIfJob", "commands.plan:run_what_if"),
    "simulate": ("commands.options:SimulateJob", "commands.simulate:run"),
    "sites": ("commands.jobs:SitesJob", "commands.sites:run"),
    "render": ("commands.options:RenderJob", "commands.service:render"),
    "deploy": ("commands.options:DeployJob", "commands.service:deploy"),
    "status": ("commands.options:StatusJob", "commands.service:status"),
    "delete": ("commands.options:DeleteJob", "commands.service:delete"),
    "versions": ("commands.options:VersionsJob", "commands.service:versions"),
    "canary": ("commands.options:CanaryJob", "commands.service:canary"),
    "promote": ("commands.options:PromoteJob", "commands.service:promote"),
    "load": ("commands.options:LoadJob", "commands.service:load"),
    "unload": ("commands.options:UnloadJob", "commands.service:unload"),
}
"""The commands by name, in the order of the help: a pydantic model, whose fields are the options and whose docstring is
the help, and the function that runs the command, given an instance of it. Both are `module:name` in `offramp`, and are
imported when the command runs. The model's module is light."""


def _help(command: str) -> str | None:
    """Returns a model's docstring, read from the source, because importing all models would slow down completion."""
    module, _, name = COMMANDS[command][0].partition(":")
    return ast.get_docstring(_classes(module)[name])


@cache
def _classes(module: str) -> Mapping[str, ast.ClassDef]:
    path = Path(__file__).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    parsed = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name: node for node in parsed.body if isinstance(node, ast.ClassDef)}


class _Command(typer.core.TyperCommand):
    """A command whose help shows no type next to a flag, such as `--help`."""

    def get_params(self, ctx: Any) -> list[Any]:
        params = super().get_params(ctx)
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Commands(typer.core.TyperGroup, _Command):
    """The group of all commands. The parameters of a command are built only when it runs or shows its help."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Returns the names of the commands, in the order of the help."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Returns a command without its parameters, which is enough for the list of commands."""
        return typer.core.TyperCommand(cmd_name, help=_help(cmd_name)) if cmd_name in COMMANDS else None

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Returns the name, the command with its parameters, and the remaining arguments."""
        self.commands = dict.fromkeys(COMMANDS, self)  # for an unknown command, typer suggests similar ones of these
        name, command, rest = super().resolve_command(ctx, args)
        return name, build(name) if command is not None and name is not None else None, rest


def build(name: str) -> Any:
    """Returns a command with all its parameters. Options that the user leaves out get the model's defaults."""
    job, runs = COMMANDS[name]
    job_class: type[BaseModel] = _import(job)
    fields = {each.alias or name: each for name, each in job_class.model_fields.items() if not each.exclude}

    def run(context_: typer.Context, **values: Any) -> None:
        from offramp.commands.options import validated

        given = {
            name: value
            for name, value in values.items()
            if value is not None and getattr(context_.get_parameter_source(name), "name", None) != "DEFAULT"
        }
        valid = validated(job_class, given)
        _import(runs)(valid)  # the import can take seconds, so invalid options are refused first

    parameters = [parameter(name, field) for name, field in fields.items()]
    context = inspect.Parameter("context_", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
    run.__annotations__ = {each.name: each.annotation for each in (context, *parameters)}
    run.__dict__["__signature__"] = inspect.Signature([context, *parameters])
    single = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    single.command(name, cls=_Command, help=_help(name))(run)
    return typer.main.get_command(single)


def _import(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(import_module(f"offramp.{module}"), name)


def parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Returns the parameter for a field: an argument if the field's schema has the key `argument`, else an option."""
    value_type = _base_type(field.annotation)
    default: Any = inspect.Parameter.empty if field.is_required() else field.default
    if default in ("", ()) or field.default_factory is not None:
        default = None
    option: dict[str, Any] = {"help": help_of(field, shows_default=default is None)}
    choices = get_args(value_type) if get_origin(value_type) is Literal else field.examples
    if choices:
        option["autocompletion"] = lambda incomplete: [each for each in choices if each.startswith(incomplete)]
    if get_origin(value_type) in (Literal, dict) or is_dataclass(value_type):
        value_type = str  # which the model parses
    elif get_origin(value_type) is tuple and _base_type(get_args(value_type)[0]) in (int, float):
        value_type, default = str, default and ",".join(map(str, default))  # numbers separated by commas
    constraints = list(field.metadata)
    if get_origin(value_type) in (tuple, list):
        [item, *_] = get_args(value_type)
        constraints += [each for info in getattr(item, "__metadata__", ()) for each in info.metadata]
        value_type = list[_base_type(item)]  # type: ignore[misc] # a type that is computed at run time
    bounds = {key: getattr(each, key) for each in constraints for key in ("ge", "le") if hasattr(each, key)}
    if value_type is int or len(bounds) > 1:  # for a float with one bound, pydantic's message is clearer than typer's
        option |= {limit: bounds[key] for key, limit in (("ge", "min"), ("le", "max")) if key in bounds}
    extra = field.json_schema_extra
    if isinstance(extra, dict) and "argument" in extra:
        shown: Any = typer.Argument(metavar=str(extra["argument"]), **option)
    else:
        names = (f"--{name.replace('_', '-')}",) if default is False else ()  # otherwise typer adds --no-...
        shown = typer.Option(*names, **option)
    annotation: Any = Annotated[value_type | None if default is None else value_type, shown]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _base_type(annotation: Any) -> Any:
    """Returns the first type of a union that is not None, without the metadata of `Annotated`."""
    if get_origin(annotation) in (Union, UnionType):
        annotation = next(each for each in get_args(annotation) if each is not NoneType)
    return get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation


def help_of(field: FieldInfo, *, shows_default: bool = True) -> str:
    """Returns the first sentence of a field's docstring and, if `shows_default`, the text after `None:` as default."""
    description = " ".join((field.description or "").split())
    first = re.split(r"(?<=[.;])\s", description)[0].rstrip(".;")
    if not shows_default or field.is_required():
        return f"{first}."
    _, has_default, default = description.partition("None: ")
    text = default.split(". ")[0].rstrip(".") if has_default else "none"
    return f"{first}; default: {text}."


HELP = {"help_option_names": ["--help", "-h"]}
app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, context_settings=HELP)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"offramp {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Early-exit model serving on Ray Serve."""


SERVED = {
    *("PIL", "google", "grpc", "httptools", "httpx", "jinja2", "packaging", "psutil", "ray"),
    *("safetensors", "starlette", "tokenizers", "torch", "transformers", "uvicorn"),
}
"""Modules that the extra `serve` installs."""

PLANNERS = {"plan", "what-if", "fleet"}
"""Commands of a second or two, which create hardly any reference cycles, and start neither threads nor processes."""


def _run(arguments: Sequence[str] | None) -> None:
    """Runs a command. The process of a planner collects no garbage, and ends without freeing its objects.

    Both together take a fifth of its time.
    """
    if arguments is not None or PLANNERS.isdisjoint(sys.argv[1:2]):
        app(arguments)
        return
    gc.disable()
    try:
        app()
    except SystemExit as end:
        if end.code:
            raise
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs a command. An error is printed as one printable line on stderr; its class has the exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    # None: the caller has closed the stream.
    sys.stdout, sys.stderr = (each or open(os.devnull, "w") for each in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, TextIOWrapper):  # as stderr does: half a character, as of a cut emoji, has no UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _run(arguments)
    except (OfframpError, OSError, MemoryError, UnicodeEncodeError) as error:  # such as a full disk, or a file name
        text = f"{error.object}: {error.reason}" if isinstance(error, UnicodeEncodeError) else str(error)
        text = re.sub(r"\[Errno \d+\] ", "", text)
        shown = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
        print(f"offramp: {shown}", file=sys.stderr)
        raise SystemExit(getattr(error, "exit_status", OfframpError.exit_status)) from None
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SERVED:
            raise
        print(f"offramp: {missing} is not installed; run in Offramp's clone: pip install '.[serve]'", file=sys.stderr)
        raise SystemExit(InputError.exit_status) from None
