"""A model's folder: `model.safetensors`, `model.json` (schema, labels, provenance), `tokenizer.json`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from earlyexit.errors import ModelFolderError

if TYPE_CHECKING:  # the ingress reads model.json without torch
    import torch

    from earlyexit.model import EarlyExitModel

CARD_FILE = "model.json"
NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
"""Model names stand in URLs and file names."""
WEIGHTS_FILE = "model.safetensors"


class ModelCard(BaseModel):
    """What `model.json` holds."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    schema_version: Literal[1] = 1
    name: str = Field(pattern=NAME_PATTERN)
    family: str
    backbone: dict[str, Any]
    label_names: tuple[str, ...] = Field(min_length=2)
    ramp_style: Literal["light", "pooler", "pooler-relu"]
    pooling: Literal["mean", "first"]
    head_style: Literal["light", "pooler", "pooler-relu"]
    head_pooling: Literal["mean", "first"]
    ramps: tuple[int, ...]
    num_blocks: int = Field(gt=0)
    max_length: int = Field(gt=0)
    provenance: dict[str, Any]


def read_card(folder: Path) -> ModelCard:
    """Read and check `model.json`; raises ModelFolderError saying what is wrong."""
    path = folder / CARD_FILE
    if not path.is_file():
        raise ModelFolderError(f"{folder} is not a model folder: it has no {CARD_FILE}")
    try:
        return ModelCard.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise ModelFolderError(f"{path}: {where}: {first['msg']}") from error


def save_model(model: EarlyExitModel, folder: Path) -> None:
    """Write weights and card; the tokenizer's file is put there by whoever has it."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in model.state_dict().items()}, folder / WEIGHTS_FILE)
    info = asdict(model.info)
    card = ModelCard(**info, backbone=model.backbone.to_config(), ramps=model.ramp_indices, num_blocks=model.num_blocks)
    (folder / CARD_FILE).write_text(card.model_dump_json(indent=2) + "\n", encoding="utf-8")


def load_model(folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None) -> EarlyExitModel:
    """Read a saved model, in inference mode, weights in `dtype` (default: as saved, float32).

    Raises ModelFolderError where the folder does not hold what its card says.
    """
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from earlyexit.checkpoint import assemble
    from earlyexit.families import find_family
    from earlyexit.model import ModelInfo

    card = read_card(folder)
    fields = card.model_dump(exclude={"schema_version", "backbone", "ramps", "num_blocks"})
    try:
        family = find_family(card.family)
        with torch.device("meta" if family.lazy_weights else "cpu"):  # no time spent on random weights
            model = assemble(ModelInfo(**fields), family.build(card.backbone), card.ramps)
    except (KeyError, TypeError) as error:
        raise ModelFolderError(f"{folder / CARD_FILE}: no {card.family} backbone can be built: {error}") from error
    try:
        model.load_state_dict(load_file(folder / WEIGHTS_FILE), assign=True)
    except (FileNotFoundError, RuntimeError, SafetensorError) as error:
        raise ModelFolderError(f"{folder / WEIGHTS_FILE} does not fit {CARD_FILE}: {error}") from error
    model.requires_grad_(False)
    model.to(device)
    if dtype is not None:
        model.backbone.to(dtype)
        model.ramps.to(dtype)
        model.head.to(dtype)
        # Whatever is left of the file's tensors keeps all of it in memory.
        model.temperatures_E = model.temperatures_E.clone()
    return model.eval()
