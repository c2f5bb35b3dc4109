"""A model's folder: `model.safetensors`, `model.json` (schema, codec, task, provenance), and what its codec needs."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from earlyexit.codecs import make_codec
from earlyexit.errors import InputError, ModelFolderError, PlanError, first_mistake
from earlyexit.families import FILES, FLOAT32_ONLY, MEASURES_IMPORTANCE
from earlyexit.named import NAME_PATTERN
from earlyexit.network.boundary import Boundary
from earlyexit.network.chain import Chain, join_chains
from earlyexit.ramps import RampStyle
from earlyexit.ramps.pooling import Pooling

if TYPE_CHECKING:
    import torch

    from earlyexit.network.model import EarlyExitModel

CARD_FILE = "model.json"
CHAIN = "chain"
"""The family of several models one after the other: its folder holds a card, and no weights."""
WEIGHTS_FILE = "model.safetensors"


class ChainModels(BaseModel):
    """The `backbone` of a chain's card: the models in the chain, the smallest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = Field(min_length=2)
    """Their folders, relative to the chain's."""
    names: tuple[str, ...]
    blocks: tuple[int, ...]
    """Of each model."""

    def chain(self, ramps: tuple[int, ...]) -> Chain:
        """Returns the chain; raises ModelFolderError for contradictory facts."""
        if len(self.models) != len(self.names):
            raise ModelFolderError(f"a chain of {len(self.models)} models, with the names of {len(self.names)}")
        return Chain(names=self.names, lengths=self.blocks, ramps=ramps)

    def members(self, folder: Path) -> Iterator[Path]:
        """Yields the models' folders, given the chain's; raises ModelFolderError where one does not hold its model."""
        for said, name, num_blocks in zip(self.models, self.names, self.blocks, strict=True):
            path = (folder / said).resolve()
            if not (path / CARD_FILE).is_file():
                raise ModelFolderError(
                    f"{folder / CARD_FILE}: its model {name!r} is not at {said}, there is no {path / CARD_FILE}; "
                    f"`offramp chain` makes the chain anew"
                )
            card = read_card(path)
            if (card.name, card.num_blocks) != (name, num_blocks):
                raise ModelFolderError(
                    f"{folder / CARD_FILE}: {path} held {name!r} of {num_blocks} blocks, and now holds {card.name!r} "
                    f"of {card.num_blocks}; `offramp chain` makes the chain anew"
                )
            yield path


class ModelCard(BaseModel):
    """What `model.json` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[2] = 2
    name: str = Field(pattern=NAME_PATTERN)
    family: str
    backbone: dict[str, Any]
    codec: dict[str, Any]
    """How inputs are encoded: the codec's name, and its settings beside it."""
    task: dict[str, Any]
    """What answers are: the task's name, and its settings beside it."""
    boundaries: tuple[Boundary, ...]
    """What crosses after every block, so that hops can be planned without building the network."""
    inputs: Boundary | None = None
    """What the network takes, one tensor per entry; None in folders that do not say it."""
    ramp_style: RampStyle
    pooling: Pooling
    head_style: RampStyle
    head_pooling: Pooling
    ramps: tuple[int, ...]
    num_blocks: int = Field(gt=0)
    provenance: dict[str, Any]

    @field_validator("codec", "task")
    @classmethod
    def _are_named(cls, spec: dict[str, Any]) -> dict[str, Any]:
        """Check what the card itself reads; codec and task check the rest."""
        if not isinstance(spec.get("name"), str):
            raise ValueError("a name is needed")
        length, names = spec.get("max_length", 1), spec.get("label_names", [])
        if type(length) is not int or length < 1:
            raise ValueError(f"max_length must be a whole number from 1 on, not {length!r}")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"label_names must be a list of names, not {names!r}")
        return spec

    @model_validator(mode="after")
    def _describes_every_block(self) -> ModelCard:
        if len(self.boundaries) != self.num_blocks:
            raise ValueError(f"boundaries are those of {len(self.boundaries)} blocks, num_blocks is {self.num_blocks}")
        if self.family == CHAIN:
            try:
                chain = self.chain
            except ValidationError as error:
                raise ValueError(f"backbone: {first_mistake(error, 'the file')}") from error
            except ModelFolderError as error:
                raise ValueError(str(error)) from error
            if chain.num_blocks != self.num_blocks:
                raise ValueError(f"backbone.blocks are {chain.num_blocks} together, num_blocks is {self.num_blocks}")
        return self

    @property
    def chain(self) -> Chain:
        """Its networks one after the other; most models have one."""
        if self.family == CHAIN:
            return ChainModels.model_validate(self.backbone).chain(self.ramps)
        return Chain(names=(self.name,), lengths=(self.num_blocks,), ramps=self.ramps)

    def members(self, folder: Path) -> tuple[Path, ...]:
        """Returns the folders of its networks, given its own folder, which is the only one for most models.

        Raises ModelFolderError where a folder of a chain's model is gone, or holds another model.
        """
        if self.family != CHAIN:
            return (folder,)
        return tuple(ChainModels.model_validate(self.backbone).members(folder))

    @property
    def max_length(self) -> int:
        """The longest input in tokens; 1 where inputs have none."""
        return int(self.codec.get("max_length", 1))

    @property
    def input_kind(self) -> str:
        """The name of the codec of what callers send; in a chain, all models have it."""
        codec = self.codec["members"][0] if self.family == CHAIN else self.codec
        return str(codec["name"])

    @property
    def has_tokens(self) -> bool:
        """Whether inputs have lengths: the codec has a longest one, or the network takes a row for every token."""
        return self.max_length > 1 or any(each.per_token for each in self.inputs or ())

    @property
    def generates(self) -> bool:
        """Whether answers are the next tokens of sequences."""
        return bool(self.task["name"] == "token")

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels; empty where answers are not labels."""
        return tuple(self.task.get("label_names", ()))

    @property
    def network_files(self) -> tuple[str, ...]:
        """Files of its folder that its network needs, beside the weights that every model has."""
        return FILES.get(self.family, ())

    def check_dtype(self, dtype: str) -> None:
        """Raise ModelFolderError for a float type that its family does not run in."""
        if dtype != "float32" and self.family in FLOAT32_ONLY:
            raise ModelFolderError(f"{self.name}: {self.family} models run in float32, not {dtype}")


def read_card(folder: Path) -> ModelCard:
    """Read and check `model.json`; raises ModelFolderError saying what is wrong."""
    path = folder / CARD_FILE
    if not path.is_file():
        raise ModelFolderError(f"{folder} is not a model folder: it has no {CARD_FILE}")
    try:
        return ModelCard.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ModelFolderError(f"{path}: {first_mistake(error, 'the file')}") from error


def save_model(model: EarlyExitModel, folder: Path) -> None:
    """Write weights, the backbone's other files, and the card; the caller adds the tokenizer's file."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model.backbone.write_files(folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in model.tied}
    save_file(state, folder / WEIGHTS_FILE)
    info = {each.name: getattr(model.info, each.name) for each in fields(model.info)}
    card = ModelCard(
        **info | {"codec": dict(model.info.codec), "task": model.task.spec()},
        backbone=model.backbone.to_config(),
        boundaries=tuple(model.boundary(block) for block in range(model.num_blocks)),
        inputs=model.boundary(-1),
        ramps=model.ramp_indices,
        num_blocks=model.num_blocks,
    )
    (folder / CARD_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    shutil.copymode(folder / CARD_FILE, folder / WEIGHTS_FILE)  # safetensors makes a file for its owner alone


def load_model(folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> EarlyExitModel:
    """Read a saved model, in inference mode, weights in `dtype` (default: as saved, float32).

    Raises ModelFolderError where the folder does not hold what its card says.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from earlyexit.families import find_family
    from earlyexit.network.checkpoint import SkipMetaInit, assemble
    from earlyexit.network.model import ModelInfo
    from earlyexit.tasks import find_task

    card = read_card(folder)
    if not card.chain.is_one:
        raise ModelFolderError(f"{folder} is a chain of {', '.join(card.chain.names)}; a single model is needed here")
    facts = card.model_dump(
        exclude={"schema_version", "backbone", "task", "boundaries", "inputs", "ramps", "num_blocks"}
    )
    info = ModelInfo(**facts, task=find_task(card.task))
    try:
        family = find_family(card.family)
        with torch.device("meta" if family.lazy_weights else "cpu"), SkipMetaInit():  # no time spent on random weights
            model = assemble(info, family.build(card.backbone, folder), card.ramps)
    except (KeyError, TypeError) as error:
        raise ModelFolderError(f"{folder / CARD_FILE}: no {card.family} backbone can be built: {error}") from error
    try:
        state = load_file(folder / WEIGHTS_FILE)
        model.load_state_dict(state | {name: state[other] for name, other in model.tied.items()}, assign=True)
        model.tie()
    except (FileNotFoundError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelFolderError(f"{folder / WEIGHTS_FILE} does not fit {CARD_FILE}: {error}") from error
    if dtype not in (None, torch.float32) and model.backbone.float32_only:
        raise ModelFolderError(
            f"{card.name}: {card.family} models run in float32, not {str(dtype).removeprefix('torch.')}"
        )
    wanted = info.provenance.get("backbone_sha256")
    if wanted is not None and model.backbone.sha256() != wanted:
        raise ModelFolderError(
            f"{folder / WEIGHTS_FILE}: the backbone's weights are not those that ramps were trained on: their SHA-256 "
            f"is not {str(wanted)[:12]}..."
        )
    model.requires_grad_(False)
    model.to(device)
    if dtype is not None:
        model.backbone.to(dtype)
        model.ramps.to(dtype)
        model.head.to(dtype)
        # Any tensor of the file that is left keeps the whole file in memory.
        model.temperatures_E = model.temperatures_E.clone()
    return model.eval()


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
    chain = join_chains([card.chain for card in cards])
    models = [os.path.relpath(member.folder.resolve(), folder.resolve()) for member in members]
    reference, lengths = cards[-1], [card.codec["max_length"] for card in cards if "max_length" in card.codec]
    longest = {"max_length": min(lengths)} if lengths else {}  # inputs are no longer than all of them take
    return ModelCard(
        name=name,
        family=CHAIN,
        backbone={"models": models, "names": list(chain.names), "blocks": list(chain.lengths)},
        codec={"name": CHAIN, "models": models, "members": [card.codec for card in cards], **longest},
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


def check_members(members: Sequence[ModelFolder]) -> None:
    """Raise InputError, in one line, for models that cannot be a chain."""
    if len(members) < 2:
        raise InputError("a chain has two models at least, the smallest first; the last is the reference")
    for other, member in combinations(members, 2):
        if member.folder.resolve() == other.folder.resolve():
            raise InputError(f"{member.folder} is named twice: a chain has a model once")
        if member.card.name == other.card.name:
            raise InputError(
                f"{other.folder} and {member.folder} are both called {member.card.name!r}: a chain tells its models "
                "apart by name; change one in its model.json"
            )
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
        ours, theirs = member.card.codec, reference.card.codec
        if ours["name"] != theirs["name"] or make_codec(ours).inputs != make_codec(theirs).inputs:
            said = [f"{each.folder} takes {_in_words(each.card.codec)}" for each in (member, reference)]
            raise InputError(f"{', '.join(said)}: the models of a chain take the same inputs")


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


def _in_words(codec: Mapping[str, Any]) -> str:
    inputs = (each for each in make_codec(codec).inputs if each.shape)
    columns = (f"{each.name} {'|'.join(each.datatypes)} {list(each.shape)}" for each in inputs)
    return f"{codec['name']!r} inputs {', '.join(columns)}".rstrip()
