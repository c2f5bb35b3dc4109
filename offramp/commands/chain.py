"""`offramp chain`: makes a model folder of several models that run one after the other."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from earlyexit.codecs import find_codec
from earlyexit.errors import InputError
from earlyexit.network.store import CARD_FILE, CHAIN, ModelCard, ModelFolder, chain_card, check_members, read_card
from offramp.commands.calibration_files import calibrate_command, read_calibration
from offramp.commands.jobs import ChainJob, check_name
from offramp.commands.output import provenance
from offramp.commands.train import replacing_model


def chain_models(folders: Sequence[Path], out: Path, *, name: str | None = None) -> ModelCard:
    """Writes a chain of these models, the smallest first, into `out`, and replaces a chain that is there.

    The chain refers to the models' folders by relative paths, and copies nothing. Raises InputError or ModelFolderError
    for models that cannot be chained, are not calibrated, or lack a file of their codec.

    `name`: the model name in URLs; None: that of the last model.
    """
    if name is not None:
        check_name(name)
    members = [ModelFolder(folder=folder, card=read_card(folder)) for folder in folders]
    check_members(members)
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise InputError(f"{out} is one of the chain's models: a chain needs its own folder")
    if (out / CARD_FILE).is_file() and read_card(out).family != CHAIN:
        raise InputError(f"{out} contains a single model: a chain needs its own folder")
    card = chain_card(name or members[-1].card.name, out, members, provenance=provenance())
    for member in members:
        find_codec(member.card.codec, member.folder)
        read_calibration(member.folder)
    with replacing_model(out) as made:
        (made / CARD_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return card


def run(job: ChainJob) -> None:
    """Writes the chain, and prints its networks."""
    card = chain_models(job.models, job.out, name=job.name)
    chain = card.chain
    if job.as_json:
        networks = [
            {"name": name, "first": first, "end": end}
            for name, first, end in zip(chain.names, chain.starts, chain.bounds, strict=True)
        ]
        print(json.dumps({"name": card.name, "networks": networks, "ramps": list(card.ramps)}))
        return
    for name, start, end in zip(chain.names, chain.starts, chain.ends, strict=True):
        role = "the reference" if end == chain.ends[-1] else f"its end is ramp {end}"
        print(f"{name}: blocks {start} to {end}, {role}")
    print(f"chain: {job.out}; next: {calibrate_command(job.out)}")
