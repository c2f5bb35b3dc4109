"""The card of a chain, which follows from the cards of its models. This needs no torch."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from earlyexit.codecs import make_codec
from earlyexit.errors import InputError, PlanError
from earlyexit.families import MEASURES_IMPORTANCE
from earlyexit.network.chain import joined
from earlyexit.network.store import CHAIN, WEIGHTS_FILE, ModelCard, read_card
from earlyexit.network.wire import Column


def check_prunable(folder: Path, ends: Collection[int]) -> None:
    """Raise PlanError unless words can be pruned after these blocks, which are ends of a chain's networks.

    The network before must measure how much attention tokens receive, and its inputs must be texts.
    """
    if not ends:
        return
    card = read_card(folder)
    members = card.members(folder)
    for block in sorted(ends):
        network = read_card(members[card.chain.network_of(block)])
        if network.family not in MEASURES_IMPORTANCE:
            raise PlanError(
                f"{network.name}: words are pruned by the attention that they receive, which networks of the family "
                f"{network.family!r} do not tell; {', '.join(MEASURES_IMPORTANCE)} do"
            )
        codec = make_codec(network.codec)
        if not codec.prunes:
            raise PlanError(f"{network.name}: words are pruned of texts, and its inputs are encoded by {codec.name!r}")


SHOWN = 3
"""Labels that an error message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """Where one of a chain's models is, and its card."""

    folder: Path
    card: ModelCard


def chain_card(name: str, folder: Path, members: Sequence[ModelFolder], *, provenance: Mapping[str, Any]) -> ModelCard:
    """Returns the card of a chain in `folder` of these models, the smallest first; the last is the reference.

    Raises InputError, in one line, for models that cannot be a chain.
    """
    check_members(members)
    cards = [member.card for member in members]
    chain = joined(
        tuple(card.name for card in cards),
        tuple(card.num_blocks for card in cards),
        tuple(card.ramps for card in cards),
    )
    models = [os.path.relpath(member.folder.resolve(), folder.resolve()) for member in members]
    reference = cards[-1]
    return ModelCard(
        name=name,
        family=CHAIN,
        backbone={"models": models, "names": list(chain.names), "blocks": list(chain.lengths)},
        codec=_codec(models, cards),
        task=reference.task,
        # Nothing of a network crosses after its end, where another network follows.
        boundaries=tuple(each for card in cards[:-1] for each in (*card.boundaries[:-1], ())) + reference.boundaries,
        inputs=cards[0].inputs,
        ramp_style=reference.ramp_style,
        pooling=reference.pooling,
        head_style=reference.head_style,
        head_pooling=reference.head_pooling,
        ramps=chain.ramps,
        num_blocks=chain.num_blocks,
        provenance={
            **provenance,
            "members": [{"name": each.card.name, "sha256": weights_file_sha256(each.folder)} for each in members],
        },
    )


def weights_file_sha256(folder: Path) -> str:
    """Returns the digest of a folder's weights, with temperatures; raises InputError for a folder without weights."""
    path = folder / WEIGHTS_FILE
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error


def _codec(models: Sequence[str], cards: Sequence[ModelCard]) -> dict[str, Any]:
    """Returns the chain's codec: every model has its own; inputs are no longer than all of them take."""
    lengths = [card.codec["max_length"] for card in cards if "max_length" in card.codec]
    longest = {"max_length": min(lengths)} if lengths else {}
    return {"name": CHAIN, "models": list(models), "members": [card.codec for card in cards], **longest}


def check_members(members: Sequence[ModelFolder]) -> None:
    """Raise InputError, in one line, for models that cannot be a chain."""
    if len(members) < 2:
        raise InputError("a chain has two models at least, the smallest first; the last is the reference")
    _check_different(members)
    for member in members:
        if member.card.family == CHAIN:
            raise InputError(f"{member.folder} is a chain itself: name its models one by one")
        if not member.card.label_names:
            raise InputError(
                f"{member.folder} answers by task {member.card.task['name']!r}; a chain's models answer with labels"
            )
    reference = members[-1]
    for member in members[:-1]:
        _check_labels(member, reference)
        _check_inputs(member, reference)


def _check_different(members: Sequence[ModelFolder]) -> None:
    for place, member in enumerate(members):
        for other in members[:place]:
            if member.folder.resolve() == other.folder.resolve():
                raise InputError(f"{member.folder} is named twice: a chain has a model once")
            if member.card.name == other.card.name:
                raise InputError(
                    f"{other.folder} and {member.folder} are both called {member.card.name!r}: a chain tells its "
                    f"models apart by name; change one in its model.json"
                )


def _check_labels(member: ModelFolder, reference: ModelFolder) -> None:
    ours, theirs = member.card.label_names, reference.card.label_names
    if ours == theirs:
        return
    where = f"{member.folder} and {reference.folder}"
    if len(ours) == len(theirs) and set(ours) == set(theirs):
        place = next(k for k, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their)
        raise InputError(
            f"{where} have the same labels in another order: label {place} is {ours[place]!r} in the one, "
            f"{theirs[place]!r} in the other"
        )
    lacking = [(reference.folder, sorted(set(ours) - set(theirs))), (member.folder, sorted(set(theirs) - set(ours)))]
    said = [f"{folder} has no {_listed(names)}" for folder, names in lacking if names]
    raise InputError(f"{where} have other labels, {len(ours)} and {len(theirs)}: {'; '.join(said)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def _check_inputs(member: ModelFolder, reference: ModelFolder) -> None:
    ours, theirs = member.card.codec, reference.card.codec
    kinds = _columns(ours), _columns(theirs)
    if ours["name"] != theirs["name"] or kinds[0] != kinds[1]:
        said = [f"{each.folder} takes {_in_words(each.card.codec)}" for each in (member, reference)]
        raise InputError(f"{', '.join(said)}: the models of a chain take the same inputs")


def _columns(codec: Mapping[str, Any]) -> tuple[Column, ...]:
    return make_codec(codec).inputs


def _in_words(codec: Mapping[str, Any]) -> str:
    columns = (f"{each.name} {'|'.join(each.datatypes)} {list(each.shape)}" for each in _columns(codec) if each.shape)
    return f"{codec['name']!r} inputs {', '.join(columns)}".rstrip()
