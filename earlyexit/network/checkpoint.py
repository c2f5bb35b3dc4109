"""Builds an early-exit model with untrained ramps from a checkpoint or a configuration."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import init
from torch.overrides import TorchFunctionMode

from earlyexit.codecs.prompt import copy_chat_files, write_chat_files
from earlyexit.codecs.text import TOKENIZER_FILE, read_tokenizer
from earlyexit.errors import ModelFolderError, first_line
from earlyexit.families import GENERATES, find_family
from earlyexit.families.base import Backbone, FinalHead, JsonDict, Pretrained
from earlyexit.named import NamedSpec, in_one_line, is_own
from earlyexit.network.boundary import why_no_exit
from earlyexit.network.model import EarlyExitModel, ModelInfo, bridge_of, init_bridges
from earlyexit.ramps import BRIDGE, RampStyle, build_ramp
from earlyexit.ramps.heads import BridgeRamp, Ramp
from earlyexit.ramps.pooling import Pooling
from earlyexit.tasks.base import Task
from earlyexit.tasks.label import LabelTask
from earlyexit.tasks.regression import RegressionTask
from earlyexit.tasks.token import TokenTask

logger = logging.getLogger(__name__)

STATE_FILES = (".th", ".pt", ".pth")
CONFIG, CONFIG_SUFFIX = "config.json", ".json"
GGUF_SUFFIX = ".gguf"
GIT_LFS = b"version https://git-lfs"
"""The first bytes of a file that Git LFS has not fetched."""
NOT_FOUND = "neither a checkpoint folder nor a hub name that can be reached"


@dataclass(frozen=True, slots=True, kw_only=True)
class RampOptions:
    """Options for the ramps of a new model."""

    style: RampStyle = "light"
    head_style: RampStyle | None = None
    """The style of the full model's head if the checkpoint has none. None: the ramps' style. For bridges None means
    `light`, or `maps` for tasks with maps."""
    pooling: Pooling = "mean"
    at: tuple[int, ...] | None = None
    """The blocks that get a ramp. None: all but the last."""

    def __post_init__(self) -> None:
        if self.head_style == BRIDGE:
            raise ModelFolderError("a bridge leads to the full model's head; that head needs another style")


def load_pretrained(source: str, *, pairs: bool = False) -> tuple[Pretrained, str]:
    """Returns the network of a checkpoint and the name of its family.

    `source` is a local folder, a hub name, a decoder's .gguf file (which needs the packages `gguf` and `accelerate`), a
    state dict (.th, .pt, .pth) that `families/images.py` supports, `module:function`, or a .json file with a `family`
    and the configuration of an untrained network. `pairs`: the inputs are pairs of texts.

    Raises ModelFolderError for other sources, unknown families, and weights that do not fit.
    """
    if is_own(source):
        from earlyexit.families.own import OwnFamily

        return OwnFamily(source).pretrained(), source
    if source.endswith(CONFIG_SUFFIX):
        return _untrained(Path(source))
    if source.endswith(STATE_FILES):
        from earlyexit.families.images import load_state_file

        return load_state_file(Path(source))
    import transformers

    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()  # a refusal has one line
    location, file = _location(source)
    _check_hub(source)
    what = "not a checkpoint that can be read" if file or Path(source).is_dir() else NOT_FOUND
    with in_one_line(f"{source!r} is {what}"):
        # Without the argument, transformers would ask whether to run code of the checkpoint.
        config = transformers.AutoConfig.from_pretrained(location, trust_remote_code=False, **file)
    family = find_family(config.model_type)
    if file:
        _check_gguf(location, file["gguf_file"])
    else:
        _check_files(Path(source))
    loaders = {
        "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
        "ForCausalLM": transformers.AutoModelForCausalLM,
        "ForConditionalGeneration": transformers.AutoModelForSeq2SeqLM,
        "MarianMTModel": transformers.AutoModelForSeq2SeqLM,
    }
    names = " ".join(map(str, config.architectures or (("ForCausalLM",) if file else ())))
    loader = next((each for suffix, each in loaders.items() if suffix in names), transformers.AutoModel)
    with in_one_line(f"the weights of {source!r} cannot be loaded"):
        hf_model, report = loader.from_pretrained(
            location, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True, **file
        )
    # Weights that are missing or have another shape would be random. Encoders are used without their poolers.
    absent = {*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])}
    if lacking := sorted(name for name in absent if not name.startswith("pooler.")):
        longer = [name for name in report["unexpected_keys"] if name.endswith(f".{lacking[0]}")]
        advice = f"; they have {longer[0]}: save the module inside DataParallel or torch.compile" if longer else ""
        raise ModelFolderError(f"the weights of {source!r} lack {lacking[0]} in the shape of its configuration{advice}")
    if broken := [name for name, weights in hf_model.named_parameters() if not weights.isfinite().all()]:
        raise ModelFolderError(f"the weights of {source!r} have NaN or infinite numbers in {broken[0]}")
    with in_one_line(f"{source!r} has a configuration that is not supported"):
        return family.from_transformers(hf_model.eval(), pairs=pairs), config.model_type


def _check_hub(source: str) -> None:
    """Raises ModelFolderError if a hub name is not cached and the hub cannot be reached.

    Without this check, `transformers` would retry for half a minute and log every attempt.
    """
    import huggingface_hub

    if source.endswith(GGUF_SUFFIX) or Path(source).is_dir() or huggingface_hub.constants.HF_HUB_OFFLINE:
        return
    with in_one_line(f"{source!r} is {NOT_FOUND}"):
        if not isinstance(huggingface_hub.try_to_load_from_cache(source, CONFIG), str):
            huggingface_hub.get_session().head(huggingface_hub.hf_hub_url(source, CONFIG))


def _location(source: str) -> tuple[str, dict[str, str]]:
    """Returns the folder or hub name for `from_pretrained`, and its arguments that select a file there."""
    path = Path(source)
    return (str(path.parent), {"gguf_file": path.name}) if source.endswith(GGUF_SUFFIX) else (source, {})


def _check_files(folder: Path) -> None:
    """Raises ModelFolderError that names the file if a checkpoint's weights cannot be read.

    The messages of torch would advise to load pickled objects, which can run code.
    """
    from earlyexit.families.images import read_pickle

    for path in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("pytorch_model*.bin")):
        with path.open("rb") as file:
            if file.read(len(GIT_LFS)) == GIT_LFS:
                raise ModelFolderError(f"{path} is only a pointer to the weights; run in its folder: git lfs pull")
        if path.suffix == ".bin":
            read_pickle(path, "meta")


def _check_gguf(location: str, name: str) -> None:
    """Raises ModelFolderError for scaled positions and biases in a .gguf file, which `transformers` would ignore."""
    from gguf import GGUFReader
    from transformers.utils import cached_file

    reader = GGUFReader(cached_file(location, name))
    names = [*reader.fields, *(tensor.name for tensor in reader.tensors)]
    ignored = [name for name in names if name.endswith(("rope.scaling.factor", "rope_freqs.weight", ".bias"))]
    if ignored:
        raise ModelFolderError(f"{name} has {ignored[0]}: scaled positions and biases are not supported")


def _untrained(path: Path) -> tuple[Pretrained, str]:
    """Builds the network of a configuration file, with random weights."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        family = config.pop("family")
        backbone = find_family(family).build(config)
    except KeyError as error:
        raise ModelFolderError(f"{path}: `family` is missing; see docs/models.md#parts-of-a-model") from error
    except (OSError, AttributeError, TypeError, ValueError, RuntimeError, ModelFolderError) as error:
        raise ModelFolderError(f"{path}: a JSON object with `family` and its sizes is needed: {error}") from error
    return Pretrained(backbone=backbone, head=None, label_names=None), family


def copy_tokenizer(source: str, folder: Path) -> None:
    """Copies the fast tokenizer of a checkpoint or file, and its chat template if it has one, to a model folder.

    Raises ModelFolderError if there is no fast tokenizer, or it cannot be read.
    """
    from transformers import AutoTokenizer

    local = Path(source) if source.endswith(".json") else Path(source) / TOKENIZER_FILE
    if local.is_file():
        tokenizer = read_tokenizer(local)  # an error names this file rather than the copy
        config = local.parent / CONFIG
        with in_one_line(f"the tokenizer of {source!r} cannot be loaded"):
            # Encoders' classes follow their own rules and tokenizer_config.json rather than tokenizer.json.
            if config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") not in GENERATES:
                tokenizer = AutoTokenizer.from_pretrained(local.parent, trust_remote_code=False).backend_tokenizer
        tokenizer.save(str(folder / TOKENIZER_FILE))
        copy_chat_files(local.parent, folder)
        return
    _check_hub(source)
    with in_one_line(f"{source!r} has no {TOKENIZER_FILE} or source of one"):
        location, file = _location(source)
        loaded = AutoTokenizer.from_pretrained(location, use_fast=True, trust_remote_code=False, **file)
        tokenizer = loaded.backend_tokenizer
    # Without files, it is built from the configuration alone: special tokens, and in T5's case a space.
    if tokenizer.get_vocab_size() <= len(loaded.all_special_tokens) + 1:
        raise ModelFolderError(f"no fast tokenizer can be loaded from {source!r}: it has no vocabulary")
    tokenizer.save(str(folder / TOKENIZER_FILE))
    write_chat_files(loaded, folder)


def end_ids(source: str) -> tuple[int, ...]:
    """Returns the end-of-sequence tokens of a decoder's checkpoint, from its configurations and its tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, GenerationConfig

    location, file = _location(source)
    token_ids: set[int | None] = set()
    for loader in (AutoConfig, AutoTokenizer, *(() if file else (GenerationConfig,))):
        try:
            tokens = loader.from_pretrained(location, trust_remote_code=False, **file).eos_token_id
            token_ids.update(tokens if isinstance(tokens, list) else [tokens])
        except Exception as error:
            # A checkpoint may lack one of them, or have another tokenizer than its family's class builds.
            logger.info("%s: no %s: %s", source, loader.__name__, first_line(error))
    return tuple(sorted(token for token in token_ids if token is not None))


def add_ramps(
    pretrained: Pretrained,
    *,
    name: str,
    family: str,
    codec: NamedSpec,
    task: Task,
    ramps: RampOptions,
    provenance: JsonDict | None = None,
) -> EarlyExitModel:
    """Returns a model with untrained ramps around a backbone, and with the checkpoint's head if it fits the task.

    The labels then have the order of that head's outputs.
    """
    task, head = _with_head(pretrained, task)
    after_bridges = "light" if len(task.output_shape) == 1 else "maps"
    new_head_style = ramps.head_style or (after_bridges if ramps.style == BRIDGE else ramps.style)
    info = ModelInfo(
        name=name,
        family=family,
        codec=codec,
        task=task,
        ramp_style=ramps.style,
        pooling=ramps.pooling,
        head_style=new_head_style if head is None else head.style,
        head_pooling=ramps.pooling if head is None else head.pooling,
        provenance=(provenance or {}) | ({} if head is None else {"head": "checkpoint"}),
    )
    model = assemble(info, pretrained.backbone, ramps.at)
    if head is not None:
        model.head.load_state_dict(dict(head.weights))
    init_bridges(model)
    return model


DRAWS = (Tensor.normal_, Tensor.uniform_, init.normal_, init.uniform_, init.kaiming_uniform_)


class SkipMetaInit(TorchFunctionMode):
    """A mode in which tensors on the meta device are not initialized. Torch would load its compiler to do so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Skips random initialization on the meta device. On other devices a network may need its random weights."""
        kwargs = kwargs or {}
        if func not in DRAWS:
            return func(*args, **kwargs)
        tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
        return tensor if tensor.is_meta else func(*args, **kwargs)


def assemble(info: ModelInfo, backbone: Backbone, ramps_at: Sequence[int] | None) -> EarlyExitModel:
    """Builds a model of a backbone, ramps and a head. Ramps and head are untrained.

    Raises ModelFolderError for blocks that cannot have a ramp, and if the images of the task, the codec and the network
    differ in size.
    """
    from earlyexit.codecs.image import ImageCodec

    last = backbone.num_blocks - 1
    if last < 0:
        raise ModelFolderError(f"{info.name}: the network has no blocks; at least one is needed")
    at = range(last) if ramps_at is None else ramps_at
    if any(not 0 <= block < last for block in at):
        raise ModelFolderError(f"ramps can be after blocks 0 to {last - 1}, not {sorted(at)}")
    for block in sorted(at):
        if (reason := why_no_exit(backbone.boundary(block))) is not None:
            raise ModelFolderError(f"no ramp can be after block {block}: {reason}")
    longest = info.codec.get("max_length", 1)
    if longest > backbone.max_length:
        raise ModelFolderError(f"max_length {longest} is more than the backbone's {backbone.max_length} positions")

    sides = info.task.image_sides
    if sides is not None and info.codec["name"] == ImageCodec.name:
        codec_sides = (info.codec.get("height"), info.codec.get("width"))
        for owner, sizes in (("codec", codec_sides), ("network", backbone.inputs[0].shape[:2])):
            if sizes != sides:
                raise ModelFolderError(
                    f"the task {info.task.name} answers for images of {sides[1]} x {sides[0]} pixels (width x height); "
                    f"the {owner}'s images are {' x '.join(map(str, reversed(sizes)))}"
                )

    def exit_head(block: int, style: RampStyle, pooling: Pooling) -> Ramp:
        return build_ramp(style, backbone.boundary(block)[0].shape, info.task.output_shape, pooling)

    def ramp(block: int) -> Ramp:
        if info.ramp_style != BRIDGE:
            return exit_head(block, info.ramp_style, info.pooling)
        return BridgeRamp(bridge_of(backbone, block), exit_head(last, info.head_style, info.head_pooling))

    ramps = {block: ramp(block) for block in at}
    head = exit_head(last, info.head_style, info.head_pooling)
    model = EarlyExitModel(info, backbone, ramps, head).eval()
    model.tie()
    return model


def _with_head(pretrained: Pretrained, task: Task) -> tuple[Task, FinalHead | None]:
    """Returns the task with labels in the order of the checkpoint's head, and the head; None if it does not fit."""
    head, names = pretrained.head, pretrained.label_names
    if head is None:
        return task, None
    if isinstance(task, RegressionTask) and head.num_outputs == 1 and head.style != "given":
        # The task has two outputs: the number in units of its scale, and its expected error, which begins at zero.
        weight_1D, bias_1 = head.weights["classifier.weight"], head.weights["classifier.bias"]
        scaled = {
            "classifier.weight": torch.cat([weight_1D / task.scale, torch.zeros_like(weight_1D)]),
            "classifier.bias": torch.cat([(bias_1 - task.offset) / task.scale, torch.zeros_like(bias_1)]),
        }
        return task, replace(head, num_outputs=task.num_outputs, weights={**head.weights, **scaled})
    if isinstance(task, LabelTask) and names is not None and sorted(names) == sorted(task.label_names):
        return LabelTask(names), head
    if isinstance(task, LabelTask | TokenTask) and names is None and head.num_outputs == task.num_outputs:
        return task, head
    return task, None


def random_model(
    config: JsonDict,
    *,
    family: str = "bert",
    name: str = "random",
    codec: NamedSpec | None = None,
    task: Task | None = None,
    ramps: RampOptions | None = None,
    seed: int = 0,
) -> EarlyExitModel:
    """Returns a model with random weights, for timing and tests.

    `config`: overrides of the family's default sizes. `codec`: None: texts up to the family's maximum length. `task`:
    None: the labels `no` and `yes`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        backbone = find_family(family).build(config)
        pretrained = Pretrained(backbone=backbone, head=None, label_names=None)
        return add_ramps(
            pretrained,
            name=name,
            family=family,
            codec=codec or {"name": "text", "max_length": backbone.max_length},
            task=task or LabelTask(("no", "yes")),
            ramps=ramps or RampOptions(),
            provenance={"weights": "random", "seed": seed},
        )
