"""`offramp chain`: several models one after the other, as one model's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from earlyexit.codecs import find_codec
from earlyexit.errors import InputError
from earlyexit.network.store import CARD_FILE, CHAIN, ModelCard, ModelFolder, chain_card, check_members, read_card
from offramp.commands.calibrated import calibrate_command, read_calibration
from offramp.commands.jobs import ChainJob, check_name
from offramp.commands.progress import provenance
from offramp.commands.train import in_place_of


def chain_models(folders: Sequence[Path], out: Path, *, name: str | None = None) -> ModelCard:
    """Write the chain of these models, the smallest first, into `out`, in place of the chain that it may hold.

    It names the models' folders relative to its own, and copies nothing of them. Raises InputError or ModelFolderError,
    in one line, for models that make no chain, and for those that lack a calibration or what their codec reads.

    `name`: in URLs; None: the reference's, of which a chain is another version then.
    """
    if name is not None:
        check_name(name)
    members = [ModelFolder(folder=folder, card=read_card(folder)) for folder in folders]
    check_members(members)
    if out.resolve() in {folder.resolve() for folder in folders}:
        raise InputError(f"{out} is one of the chain's models: a chain has a folder of its own")
    if (out / CARD_FILE).is_file() and read_card(out).family != CHAIN:
        raise InputError(f"{out} holds a single model: a chain has a folder of its own")
    card = chain_card(name or members[-1].card.name, out, members, provenance=provenance())
    for member in members:
        find_codec(member.card.codec, member.folder)
        read_calibration(member.folder)
    with in_place_of(out) as made:
        (made / CARD_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return card


def run(job: ChainJob) -> None:
    """Write the chain, and print of what it consists."""
    card = chain_models(job.models, job.out, name=job.name)
    found = card.chain
    if job.as_json:
        networks = [
            {"name": each, "first": first, "end": end}
            for each, first, end in zip(found.names, found.starts, found.bounds, strict=True)
        ]
        print(json.dumps({"name": card.name, "networks": networks, "ramps": list(card.ramps)}))
        return
    for place, each in enumerate(found.names):
        role = "the reference" if place == len(found.names) - 1 else f"its end is ramp {found.ends[place]}"
        print(f"{each}: blocks {found.starts[place]} to {found.ends[place]}, {role}")
    print(f"chain: {job.out}; next: {calibrate_command(job.out)}")
