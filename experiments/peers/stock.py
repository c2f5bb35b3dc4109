"""The parts that all peers' servers share: settings, bodies of `POST /predict`, and the full model without ramps.

Settings and computation are the same for all peers, so that only the server differs. Bodies and answers have the form
of Offramp's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from earlyexit.backends.onnx import OnnxSegments
from earlyexit.codecs import find_codec
from earlyexit.codecs.base import Codec
from earlyexit.errors import InputError, ModelFolderError
from earlyexit.network.boundary import Budget, Encoded, Segment, entry_piece
from earlyexit.network.layers import reorder_linears
from earlyexit.network.model import EarlyExitModel
from earlyexit.network.piece import Piece
from earlyexit.network.store import load_model
from earlyexit.tasks.label import LabelTask
from earlyexit.training.ramps import pack

Dtype = Literal["float32", "bfloat16"]
Kernel = Literal["packed", "onnx"]
"""The code that runs the full model: Offramp's modules, which compute no padding, on torch or (in float32) on ONNX
Runtime."""
VARIABLE = "OFFRAMP_PEER_OPTIONS"
"""Environment variable with the options; workers read it."""


class ServerOptions(BaseModel):
    """The settings of one peer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    """Model folder of `offramp train`: weights, tokenizer, label names."""
    dtype: Dtype = "float32"
    kernel: Kernel = "packed"
    workers: int = Field(default=1, ge=1)
    """Number of processes, or replicas, that each hold the model."""
    threads: int = Field(default=1, ge=1)
    """Intra-op threads of each worker."""
    batch: int = Field(default=16, ge=1)
    """Largest number of requests in a batch."""
    wait_s: float = Field(default=0.0, ge=0)
    """Seconds that a batch waits to be filled."""
    max_queued: int = Field(default=2000, ge=1)
    """Number of waiting requests above which more are refused, if the server can refuse."""
    port: int = Field(default=8100, ge=1, le=65535)

    @classmethod
    def from_environment(cls) -> ServerOptions:
        """Returns the options with which this process was started."""
        return cls.model_validate_json(os.environ[VARIABLE])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The full model's answer to one text."""

    label: str
    score: float
    """Softmax probability of the label."""
    exit: int
    """Index of the last block, because no input leaves early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """The texts of one request."""

    texts: tuple[str, ...]
    alone: bool
    """Whether the body has one text instead of a list of texts."""


def parse_body(document: object) -> Texts:
    """Returns the texts of a parsed body and ignores other fields; raises InputError for a body without texts."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    if isinstance(inputs, str):
        return Texts(texts=(inputs,), alone=True)
    if not isinstance(inputs, list) or not inputs or not all(isinstance(text, str) for text in inputs):
        raise InputError('the body must be {"inputs": "text"} or {"inputs": ["text", ...]}')
    return Texts(texts=tuple(inputs), alone=False)


def answer(predict: Callable[[Sequence[str]], list[Prediction]], requests: Sequence[Texts]) -> list[dict[str, Any]]:
    """Returns the JSON replies to several requests, whose texts run as one batch."""
    predictions = iter(predict([text for request in requests for text in request.texts]))
    outputs = [[asdict(next(predictions)) for _ in request.texts] for request in requests]
    return [each[0] if request.alone else {"outputs": each} for request, each in zip(requests, outputs, strict=True)]


Logits = Callable[[Sequence[Encoded]], Tensor]
"""A function that returns the logits (B, C), float32, of a batch."""


class StockModel:
    """A model and its codec. Texts that are too long are cut."""

    def __init__(self, codec: Codec[str], logits: Logits, label_names: Sequence[str], last: int) -> None:
        self._codec = codec
        self._logits = logits
        self._label_names = label_names
        self._last = last

    @classmethod
    def load(cls, options: ServerOptions) -> StockModel:
        """Loads the model and sets this process's threads; raises ModelFolderError if it cannot be served."""
        torch.set_num_threads(options.threads)
        model = load_model(options.model, dtype=getattr(torch, options.dtype))
        if options.kernel == "packed":
            reorder_linears(model)
            logits = packed_logits(model)
        else:
            logits = onnx_logits(model, options.model)
        codec = find_codec(model.info.codec, options.model)
        return cls(codec, logits, label_task(model).label_names, model.num_blocks - 1)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """Returns one prediction per text; all texts run as one batch."""
        return self.predict_encoded(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Returns the encoded texts, for `predict_encoded`."""
        return self._codec.encode(texts, truncate=True)

    @torch.inference_mode()
    def predict_encoded(self, encoded: Sequence[Encoded]) -> list[Prediction]:
        """Returns the predictions of encoded texts."""
        score_B, label_B = self._logits(encoded).softmax(-1).max(-1)
        return [
            Prediction(label=self._label_names[label], score=score, exit=self._last)
            for label, score in zip(label_B.tolist(), score_B.tolist(), strict=True)
        ]


def label_task(model: EarlyExitModel) -> LabelTask:
    """Returns the model's task; raises ModelFolderError if its answers are not labels."""
    if not isinstance(model.task, LabelTask):
        raise ModelFolderError(f"{model.info.name} is not a classifier")
    return model.task


def packed_logits(model: EarlyExitModel) -> Logits:
    """Returns a function that runs Offramp's modules without an engine: without padding, with prepacked weights."""
    last = model.num_blocks

    def logits(encoded: Sequence[Encoded]) -> Tensor:
        values, layout = pack(encoded, model.device)
        return model.exit_outputs(last - 1, model.run_blocks(0, last, values, layout), layout)

    return logits


def onnx_logits(model: EarlyExitModel, folder: Path) -> Logits:
    """Returns a function that runs the modules as one graph on ONNX Runtime, which pads only in attention."""
    segments = OnnxSegments(model, folder)
    whole = Segment(first=0, end=model.num_blocks, ramp=None)
    segments.prepare({whole: Budget(inputs=1)})

    def logits(encoded: Sequence[Encoded]) -> Tensor:
        wire = entry_piece([""] * len(encoded), encoded)
        piece = Piece(
            sample_ids=wire.sample_ids,
            next_block=0,
            lengths_B=wire.lengths_B,
            tensors=tuple(map(torch.from_numpy, wire.tensors)),
            state_BS=torch.empty(len(encoded), 0),
        )
        _, logits_BC = segments.run(whole, piece)
        assert logits_BC is not None, "the last block has an exit"
        return logits_BC

    return logits
