"""The command line: parses, calls, prints. Heavy libraries are imported by the command that needs them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from earlyexit.errors import OfframpError
from offramp.cli.bench import bench
from offramp.cli.calibrate import calibrate
from offramp.cli.demo import demo
from offramp.cli.doctor import doctor
from offramp.cli.fields import Commands
from offramp.cli.forecast import forecast
from offramp.cli.generate import generate
from offramp.cli.inject import inject, sites
from offramp.cli.plan import plan, what_if
from offramp.cli.predict import predict
from offramp.cli.profile import profile
from offramp.cli.serve import serve
from offramp.cli.service import delete, deploy, render, status
from offramp.cli.simulate import simulate
from offramp.cli.train import chain, train
from offramp.cli.versions import canary, load, promote, unload, versions

Commands.functions = {
    each.__name__.replace("_", "-"): each
    for each in (
        *(
            serve,
            demo,
            bench,
            train,
            inject,
            chain,
            calibrate,
            doctor,
            predict,
            generate,
            profile,
            forecast,
            plan,
            what_if,
        ),
        *(simulate, sites, render, deploy, status, delete, versions, canary, promote, load, unload),
    )
}

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command; what went wrong is one line on stderr, and the error's exit status."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app(arguments)
    except OfframpError as error:
        print(f"offramp: {error}", file=sys.stderr)
        raise SystemExit(error.exit_status) from None
