"""What every peer's server shares: its settings, the bodies of `POST /predict`, and the full model without ramps.

The settings and the compute are the same for all peers, so that only the server differs. Bodies and answers are those
of Offramp.
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

from earlyexit.backends.onnx import onnx_segments
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
"""How the full model is computed: by Offramp's own modules, which spend nothing on padding, on torch or (in float32) by
ONNX Runtime."""
VARIABLE = "OFFRAMP_PEER_OPTIONS"
"""Of the environment: some servers make their workers without arguments, in processes of their own."""


class ServerOptions(BaseModel):
    """One peer's settings."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Path
    """Model folder, as `offramp train` leaves it: weights, tokenizer, label names."""
    dtype: Dtype = "float32"
    kernel: Kernel = "packed"
    workers: int = Field(default=1, ge=1)
    """Processes, or replicas, that each hold the model."""
    threads: int = Field(default=1, ge=1)
    """Intra-op threads of each."""
    batch: int = Field(default=16, ge=1)
    """Requests in a batch, at most."""
    wait_s: float = Field(default=0.0, ge=0)
    """How long a batch waits to be filled."""
    max_queued: int = Field(default=2000, ge=1)
    """Requests that wait before more are refused, where a server can say so."""
    port: int = Field(default=8100, ge=1, le=65535)

    @classmethod
    def told(cls) -> ServerOptions:
        """What this process was started with."""
        return cls.model_validate_json(os.environ[VARIABLE])


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The full model's answer to one text."""

    label: str
    score: float
    """Softmax probability of the label."""
    exit: int
    """The last block: no input leaves early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The texts of one request."""

    texts: tuple[str, ...]
    alone: bool
    """Whether the body has one text, not a list of texts."""


def parse_body(document: object) -> Asked:
    """Returns the texts of a parsed body, whose other fields do not matter; raises InputError for one without texts."""
    inputs = document.get("inputs") if isinstance(document, dict) else None
    if isinstance(inputs, str):
        return Asked(texts=(inputs,), alone=True)
    if not isinstance(inputs, list) or not inputs or not all(isinstance(text, str) for text in inputs):
        raise InputError('the body must be {"inputs": "text"} or {"inputs": ["text", ...]}')
    return Asked(texts=tuple(inputs), alone=False)


def answer(predict: Callable[[Sequence[str]], list[Prediction]], requests: Sequence[Asked]) -> list[dict[str, Any]]:
    """Returns the JSON replies to several requests, whose texts are one batch."""
    predictions = iter(predict([text for asked in requests for text in asked.texts]))
    outputs = [[asdict(next(predictions)) for _ in asked.texts] for asked in requests]
    return [each[0] if asked.alone else {"outputs": each} for asked, each in zip(requests, outputs, strict=True)]


Logits = Callable[[Sequence[Encoded]], Tensor]
"""Logits (B, C), float32, of a batch."""


class StockModel:
    """A model and its codec. Texts beyond the model's length are cut."""

    def __init__(self, codec: Codec[str], logits: Logits, label_names: Sequence[str], last: int) -> None:
        self._codec = codec
        self._logits = logits
        self._label_names = label_names
        self._last = last

    @classmethod
    def load(cls, options: ServerOptions) -> StockModel:
        """Read the model folder; sets this process' threads. Raises ModelFolderError for what is not to be served."""
        torch.set_num_threads(options.threads)
        model = load_model(options.model, dtype=getattr(torch, options.dtype))
        if options.kernel == "packed":
            reorder_linears(model)
            logits = packed_logits(model)
        else:
            logits = onnx_logits(model, options.model, options.threads)
        codec = find_codec(model.info.codec, options.model)
        return cls(codec, logits, label_task(model).label_names, model.num_blocks - 1)

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        """One prediction per text, all computed as one batch."""
        return self.predict_encoded(self.encode(texts))

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """What the model takes of every text, for `predict_encoded`."""
        return self._codec.encode(texts, truncate=True)

    @torch.inference_mode()
    def predict_encoded(self, encoded: Sequence[Encoded]) -> list[Prediction]:
        """`predict` of texts that were encoded before."""
        score_B, label_B = self._logits(encoded).softmax(-1).max(-1)
        return [
            Prediction(label=self._label_names[label], score=score, exit=self._last)
            for label, score in zip(label_B.tolist(), score_B.tolist(), strict=True)
        ]


def label_task(model: EarlyExitModel) -> LabelTask:
    """The model's task; raises ModelFolderError for one that answers no labels."""
    if not isinstance(model.task, LabelTask):
        raise ModelFolderError(f"{model.info.name} answers no labels")
    return model.task


def packed_logits(model: EarlyExitModel) -> Logits:
    """Offramp's own modules, without an engine: nothing is spent on padding, nor on laying out weights."""
    last = model.num_blocks

    def logits(encoded: Sequence[Encoded]) -> Tensor:
        values, layout = pack(encoded, model.device)
        return model.exit_outputs(last - 1, model.run_blocks(0, last, values, layout), layout)

    return logits


def onnx_logits(model: EarlyExitModel, folder: Path, num_threads: int) -> Logits:
    """The same modules as one graph, with which ONNX Runtime spends nothing on padding either but in attention."""
    segments = onnx_segments(model, folder, num_threads)
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
