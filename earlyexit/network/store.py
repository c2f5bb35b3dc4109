"""Model folders: weights (`model.safetensors`), the card (`model.json`), and the files of the codec."""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from earlyexit.backends import BackendName, open_segments
from earlyexit.codecs import make_codec
from earlyexit.errors import InputError, ModelFolderError, PlanError, first_mistake, raising
from earlyexit.families import FILES, MEASURES_IMPORTANCE
from earlyexit.named import NAME_PATTERN, Fill
from earlyexit.network.boundary import Boundary
from earlyexit.network.chain import ModelChain, join_chains
from earlyexit.ramps import RampStyle
from earlyexit.ramps.pooling import Pooling
from earlyexit.sequences.sequence import PAGE_TOKENS
from earlyexit.tasks import find_task

if TYPE_CHECKING:
    import torch

    from earlyexit.engine.device import Memory
    from earlyexit.engine.queue import Attention
    from earlyexit.network.model import EarlyExitModel, Network, SegmentRunner
    from earlyexit.network.piece import Piece

logger = logging.getLogger(__name__)

CARD_FILE = "model.json"
CHAIN = "chain"
"""The family of chains of models. The folder of a chain has a card but no weights."""
WEIGHTS_FILE = "model.safetensors"


class ChainModels(BaseModel):
    """The field `backbone` of a chain's card: the models of the chain, the smallest first."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    models: tuple[str, ...] = Field(min_length=2)
    """The models' folders, relative to the chain's folder."""
    names: tuple[str, ...]
    blocks: tuple[int, ...]
    """The number of blocks of each model."""

    def chain(self, ramps: tuple[int, ...]) -> ModelChain:
        """Returns the chain. Raises ModelFolderError for contradictory values."""
        if len(self.models) != len(self.names):
            raise ModelFolderError(f"a chain has {len(self.models)} models, but {len(self.names)} names")
        return ModelChain(names=self.names, lengths=self.blocks, ramps=ramps)

    def network_folders(self, folder: Path, chain: ModelChain) -> Iterator[Path]:
        """Yields the models' folders. Raises ModelFolderError if one is missing or holds another model."""
        for network, (relative, name) in enumerate(zip(self.models, self.names, strict=True)):
            path, before = (folder / relative).resolve(), (name, self.blocks[network], tuple(chain.ramps_of(network)))
            if not (path / CARD_FILE).is_file():
                raise ModelFolderError(
                    f"{folder / CARD_FILE}: its model {name!r} is not at {relative}, there is no {path / CARD_FILE}; "
                    "run `offramp chain` again"
                )
            card = read_card(path)
            if (now := (card.name, card.num_blocks, card.ramps)) != before:
                raise ModelFolderError(
                    f"{folder / CARD_FILE}: {path} held {_describe_network(*before)}, and now holds "
                    f"{_describe_network(*now)}; run `offramp chain` again"
                )
            yield path


def _describe_network(name: str, num_blocks: int, ramps: tuple[int, ...]) -> str:
    return f"{name!r} of {num_blocks} blocks with ramps {list(ramps)}"


class ModelCard(BaseModel):
    """The content of `model.json`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[2] = 2
    name: str = Field(pattern=NAME_PATTERN)
    family: str
    backbone: dict[str, Any]
    codec: dict[str, Any]
    """How inputs are encoded: the codec's name and its settings."""
    task: dict[str, Any]
    """The meaning of answers: the task's name and its settings."""
    boundaries: tuple[Boundary, ...]
    """The tensors after every block, so that hops can be planned without building the network."""
    inputs: Boundary | None = None
    """The network's input tensors. None: unknown, in old folders."""
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
        """Checks the settings that the card itself reads. Codec and task check the others."""
        if not isinstance(spec.get("name"), str):
            raise ValueError("a name is needed")
        length, names = spec.get("max_length", 1), spec.get("label_names", [])
        if type(length) is not int or length < 1:
            raise ValueError(f"max_length must be an integer of at least 1, not {length!r}")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"label_names must be a list of names, not {names!r}")
        return spec

    @model_validator(mode="after")
    def _describes_every_block(self) -> ModelCard:
        if len(self.boundaries) != self.num_blocks:
            raise ValueError(f"boundaries has {len(self.boundaries)} entries, but num_blocks is {self.num_blocks}")
        if self.family == CHAIN:
            try:
                chain = self.chain
            except ValidationError as error:
                raise ValueError(f"backbone: {first_mistake(error, 'the file')}") from error
            except ModelFolderError as error:
                raise ValueError(str(error)) from error
            if chain.num_blocks != self.num_blocks:
                raise ValueError(f"backbone.blocks sum to {chain.num_blocks}, but num_blocks is {self.num_blocks}")
        return self

    @property
    def chain(self) -> ModelChain:
        """The model's networks as a chain. Most models have one network."""
        if self.family == CHAIN:
            return ChainModels.model_validate(self.backbone).chain(self.ramps)
        return ModelChain(names=(self.name,), lengths=(self.num_blocks,), ramps=self.ramps)

    def network_folders(self, folder: Path) -> tuple[Path, ...]:
        """Returns the folders of the networks of the model in `folder`: see `ChainModels`."""
        if self.family != CHAIN:
            return (folder,)
        return tuple(ChainModels.model_validate(self.backbone).network_folders(folder, self.chain))

    @property
    def max_length(self) -> int:
        """The longest input in tokens; 1 if inputs have no tokens."""
        return int(self.codec.get("max_length", 1))

    @property
    def input_kind(self) -> str:
        """The name of the codec. All models of a chain have the same."""
        codec = self.codec["members"][0] if self.family == CHAIN else self.codec
        return str(codec["name"])

    @property
    def has_tokens(self) -> bool:
        """Whether inputs consist of tokens: the codec has a maximum length, or an input tensor has a row per token."""
        return self.max_length > 1 or any(each.per_token for each in self.inputs or ())

    @property
    def generates(self) -> bool:
        """Whether answers are the next tokens of sequences."""
        return bool(self.task["name"] == "token")

    @property
    def label_names(self) -> tuple[str, ...]:
        """The labels; empty if answers are not labels."""
        return tuple(self.task.get("label_names", ()))

    @property
    def network_files(self) -> tuple[str, ...]:
        """The files in the folder that the network needs beside the weights."""
        return FILES.get(self.family, ())

    def check_dtype(self, dtype: str) -> None:
        """Raises ModelFolderError for a float type that the model's family does not support."""
        if dtype != "float32" and self.family in FILES:
            raise ModelFolderError(f"{self.name}: {self.family} models run in float32, not {dtype}")


def read_card(folder: Path) -> ModelCard:
    """Reads and checks `model.json`. Raises ModelFolderError if it is missing or invalid."""
    path = folder / CARD_FILE
    if not os.path.isfile(path):  # also False for a name that is too long
        raise ModelFolderError(f"{folder} is not a model folder: it has no {CARD_FILE}")
    try:
        return ModelCard.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise ModelFolderError(f"{path}: {first_mistake(error, 'the file')}") from error


def save_model(model: EarlyExitModel, folder: Path) -> None:
    """Writes the weights, the backbone's other files, and the card. The caller adds the tokenizer's file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    model.backbone.write_files(folder)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in model.tied}
    try:
        save_file(state, folder / WEIGHTS_FILE)
    except SafetensorError as error:  # such as a full disk
        raise OSError(f"{folder / WEIGHTS_FILE}: {error}") from error
    info = {each.name: getattr(model.info, each.name) for each in fields(model.info)}
    card = ModelCard(
        **info | {"codec": dict(model.info.codec), "task": model.task.spec()},
        backbone=model.backbone.to_config(),
        boundaries=tuple(map(model.takes, range(1, model.num_blocks + 1))),
        inputs=model.takes(0),
        ramps=model.ramp_indices,
        num_blocks=model.num_blocks,
    )
    (folder / CARD_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")
    shutil.copymode(folder / CARD_FILE, folder / WEIGHTS_FILE)  # safetensors writes a file that only its owner can read


def load_model(folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> EarlyExitModel:
    """Loads a saved model in inference mode. `dtype`: the type of the weights; None: as saved, in float32.

    Raises ModelFolderError if the folder does not match its card.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from earlyexit.families import find_family
    from earlyexit.network.checkpoint import SkipMetaInit, assemble
    from earlyexit.network.model import ModelInfo

    card = read_card(folder)
    if not card.chain.is_one:
        raise ModelFolderError(f"{folder} is a chain of {', '.join(card.chain.names)}; a single model is needed here")
    not_in_info = {"schema_version", "backbone", "task", "boundaries", "inputs", "ramps", "num_blocks"}
    info = ModelInfo(**card.model_dump(exclude=not_in_info), task=find_task(card.task))
    with raising(
        ModelFolderError, f"{folder / CARD_FILE}: no {card.family} backbone can be built", KeyError, TypeError
    ):
        family = find_family(card.family)
        with torch.device("meta" if family.lazy_weights else "cpu"), SkipMetaInit():  # random weights would take time
            model = assemble(info, family.build(card.backbone, folder), card.ramps)
    unfit = FileNotFoundError, KeyError, RuntimeError, SafetensorError
    with raising(ModelFolderError, f"{folder / WEIGHTS_FILE} does not fit {CARD_FILE}", *unfit):
        state = load_file(folder / WEIGHTS_FILE)
        model.load_state_dict(state | {name: state[other] for name, other in model.tied.items()}, assign=True)
        model.tie()
    if dtype is not None:
        card.check_dtype(str(dtype).removeprefix("torch."))
    sha256 = info.provenance.get("backbone_sha256")
    if sha256 is not None and model.backbone.sha256() != sha256:
        raise ModelFolderError(f"{folder / WEIGHTS_FILE}: ramps were trained on another backbone: train them again")
    model.requires_grad_(False)
    model.to(device)
    if dtype is not None:
        model.backbone.to(dtype)
        model.ramps.to(dtype)
        model.head.to(dtype)
        # A single tensor of the file would keep the whole file in memory.
        model.temperatures_E = model.temperatures_E.clone()
    return model.eval()


def load_network(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None, attention: Attention = "auto"
) -> Network:
    """Loads the network, or chain of networks, of a model folder, in inference mode: see `load_model`.

    Raises ModelFolderError for an unusable folder, and if the models of a chain no longer match its card.
    """
    from earlyexit.network.model import ChainNetwork

    card = read_card(folder)
    members = [load_model(path, device=device, dtype=dtype) for path in card.network_folders(folder)]
    for member in members:
        member.attention = attention
    if card.chain.is_one:
        return members[0]
    network = ChainNetwork(members)
    if network.task.spec() != find_task(card.task).spec():  # answers would get wrong names
        raise ModelFolderError(f"{folder / CARD_FILE}: its models have other labels now; run `offramp chain` again")
    return network


def open_network(backend: BackendName, network: Network, folder: Path) -> SegmentRunner:
    """Opens a backend for a network or chain whose weights are final: see `open_segments`."""
    from earlyexit.network.model import ChainNetwork

    pairs = list(zip(network.members, read_card(folder).network_folders(folder), strict=True))
    runners = [open_segments(backend, member, path) for member, path in pairs]
    if len(runners) == 1:
        return runners[0]
    run_themselves = all(runner is member for runner, (member, _) in zip(runners, pairs, strict=True))
    return network if run_themselves else ChainNetwork(network.members, runners)


CPU_SHARE, GPU_SHARE = 0.25, 0.8
"""The default share of free memory, after loading the weights, for keys and values. The rest of a GPU's memory is for
batches (vLLM leaves a tenth of all memory). On CPUs, the replicas of a machine share its memory."""
MOST_BYTES = 4 << 30
"""The default limit in host memory, in bytes. It holds a hundred thousand tokens of a model with 135 million
parameters, which is more than a few cores can serve."""
MOST_SEQUENCES = 256
"""The default limit, in sequences of the longest length. Small models need no more memory."""


def open_memory(network: Network, tokens: int | None, fill: Fill, free_bytes: int) -> Memory[Piece] | None:
    """Returns memory for `tokens` tokens of sequences, by default a share of `free_bytes`; None if it is not needed."""
    backbone = network.members[0].backbone
    if not backbone.kept_bytes:
        return None
    if tokens is None:
        on_gpu = network.device.type == "cuda"
        tokens = tokens_that_fit(free_bytes, backbone.kept_bytes, network.max_length, on_gpu=on_gpu)
    memory = backbone.open_memory(tokens, fill)
    capacity = memory.use().num_pages * memory.use().page_tokens
    megabytes = capacity * backbone.kept_bytes / 1e6
    logger.info("reserved keys and values of %d tokens, %.0f MB", capacity, megabytes)
    return memory


def tokens_that_fit(free_bytes: int, token_bytes: int, max_length: int, *, on_gpu: bool) -> int:
    """Returns the default capacity in tokens: the share of free memory, within the limits above."""
    most_bytes = free_bytes * GPU_SHARE if on_gpu else min(free_bytes * CPU_SHARE, MOST_BYTES)
    return max(PAGE_TOKENS, min(int(most_bytes) // token_bytes, MOST_SEQUENCES * max_length))


def check_prunable(folder: Path, ends: Collection[int]) -> None:
    """Raises PlanError unless words can be pruned after these blocks, the ends of networks of a chain.

    Each of these networks must measure the attention that tokens receive, and its inputs must be texts.
    """
    if not ends:
        return
    card = read_card(folder)
    folders = card.network_folders(folder)
    for block in sorted(ends):
        network = read_card(folders[card.chain.network_of(block)])
        if network.family not in MEASURES_IMPORTANCE:
            raise PlanError(
                f"{network.name}: words are pruned by the attention that they receive, which networks of the family "
                f"{network.family!r} do not measure; {', '.join(MEASURES_IMPORTANCE)} do"
            )
        codec = make_codec(network.codec)
        if not codec.prunes:
            raise PlanError(f"{network.name}: words are pruned of texts, and its inputs are encoded by {codec.name!r}")


SHOWN = 3
"""The most labels that an error message lists."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFolder:
    """The folder of one of a chain's models, and its card."""

    folder: Path
    card: ModelCard


def chain_card(name: str, folder: Path, members: Sequence[ModelFolder], *, provenance: Mapping[str, Any]) -> ModelCard:
    """Returns the card for a chain of these models in `folder`. The smallest model is first, the reference last.

    Raises InputError for models that cannot form a chain.
    """
    check_members(members)
    cards = [member.card for member in members]
    chain = join_chains([card.chain for card in cards])
    models = [os.path.relpath(member.folder.resolve(), folder.resolve()) for member in members]
    reference, lengths = cards[-1], [card.codec["max_length"] for card in cards if "max_length" in card.codec]
    longest = {"max_length": min(lengths)} if lengths else {}  # every model must accept every input
    return ModelCard(
        name=name,
        family=CHAIN,
        backbone={"models": models, "names": list(chain.names), "blocks": list(chain.lengths)},
        codec={"name": CHAIN, "models": models, "members": [card.codec for card in cards], **longest},
        task=reference.task,
        # No hidden state passes from one network to the next.
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
    """Returns the SHA-256 of a folder's weights file. Raises InputError if it cannot be read."""
    path = folder / WEIGHTS_FILE
    with raising(InputError, f"{path} cannot be read", OSError), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_members(members: Sequence[ModelFolder]) -> None:
    """Raises InputError for models that cannot form a chain."""
    if len(members) < 2:
        raise InputError("a chain needs at least two models, the smallest first; the last is the reference")
    for other, member in combinations(members, 2):
        if member.folder.resolve() == other.folder.resolve():
            raise InputError(f"{member.folder} is named twice: a chain has each model once")
        if member.card.name == other.card.name:
            raise InputError(
                f"{other.folder} and {member.folder} have the same name {member.card.name!r}: the models of a chain "
                "need different names; change one in its model.json"
            )
    for member in members:
        if member.card.family == CHAIN:
            raise InputError(f"{member.folder} is a chain itself: name its models one by one")
        if not member.card.label_names:
            raise InputError(
                f"{member.folder} has the task {member.card.task['name']!r}; the models of a chain answer with labels"
            )
    reference = members[-1]
    for member in members[:-1]:
        _check_labels(member, reference)
        ours, theirs = member.card.codec, reference.card.codec
        if ours["name"] != theirs["name"] or make_codec(ours).inputs != make_codec(theirs).inputs:
            described = [f"{each.folder} takes {_describe_inputs(each.card.codec)}" for each in (member, reference)]
            raise InputError(f"{', '.join(described)}: the models of a chain must take the same inputs")


def _check_labels(member: ModelFolder, reference: ModelFolder) -> None:
    ours, theirs = member.card.label_names, reference.card.label_names
    if ours == theirs:
        return
    where = f"{member.folder} and {reference.folder}"
    if len(ours) == len(theirs) and set(ours) == set(theirs):
        index = next(k for k, (our, their) in enumerate(zip(ours, theirs, strict=True)) if our != their)
        raise InputError(
            f"{where} have the same labels in another order: label {index} is {ours[index]!r} in the one, "
            f"{theirs[index]!r} in the other"
        )
    missing = [(reference.folder, sorted(set(ours) - set(theirs))), (member.folder, sorted(set(theirs) - set(ours)))]
    described = [f"{folder} has no {_listed(names)}" for folder, names in missing if names]
    raise InputError(f"{where} have different labels, {len(ours)} and {len(theirs)}: {'; '.join(described)}")


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(repr, names[:SHOWN])) + more


def _describe_inputs(codec: Mapping[str, Any]) -> str:
    inputs = (each for each in make_codec(codec).inputs if each.shape)
    columns = (f"{each.name} {'|'.join(each.datatypes)} {list(each.shape)}" for each in inputs)
    return f"{codec['name']!r} inputs {', '.join(columns)}".rstrip()
