"""`offramp chain`: several models one after the other, as one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from offramp.cli.options import AsJson


def chain(
    models: Annotated[
        list[Path], typer.Argument(help="Folders of calibrated models, the smallest first; the last is the reference.")
    ],
    out: Annotated[Path, typer.Option(help="Folder to write the chain to; it names the models' folders.")],
    name: Annotated[str | None, typer.Option(help="Model name in URLs; default: the last model's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Put small models before a large one: inputs that a model is not sure of go on to the next."""
    from offramp.jobs.chaining import chain_models

    card = chain_models(models, out, name=name)
    found = card.chain
    if as_json:
        networks = [
            {"name": each, "first": first, "end": end}
            for each, first, end in zip(found.names, found.starts, found.bounds, strict=True)
        ]
        print(json.dumps({"name": card.name, "networks": networks, "ramps": list(card.ramps)}))
        return
    for place, each in enumerate(found.names):
        role = "the reference" if place == len(found.names) - 1 else f"its end is ramp {found.ends[place]}"
        print(f"{each}: blocks {found.starts[place]} to {found.ends[place]}, {role}")
    print(f"chain: {out}; next: offramp calibrate {out} --data VALIDATION_FILE")
