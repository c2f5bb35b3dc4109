"""The command line: parses, calls, prints. Heavy libraries are imported by the command that needs them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from earlyexit.errors import InputError, OfframpError
from offramp.cli.fields import Command, Commands

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

Commands.by_name = COMMANDS
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
    except OfframpError as error:
        print(f"offramp: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in SERVED:
            raise
        print(f"offramp: {missing} is not installed; run: pip install 'offramp[serve]'", file=sys.stderr)
        raise SystemExit(InputError.exit_status) from None
