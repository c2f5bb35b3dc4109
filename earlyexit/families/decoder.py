"""The pre-norm transformer decoder of Llama, SmolLM2 and similar models, with a paged cache of keys and values.

An input is a run: consecutive tokens of one sequence, such as a prompt, a part of a prompt, or the newest token. It has
the sequence's number and the number of earlier tokens. Thus a packed batch can have runs of all kinds, and batches are
split, fused and left early like those of encoders. Tests verify that weights and results equal those of `transformers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, FinalHead, Pretrained, names_in_blocks, renamed
from earlyexit.named import Fill
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.piece import Layout, Tensors
from earlyexit.ramps import RampStyle
from earlyexit.sequences.kv import TRIAL, KvIndex, KvMemory, KvStore, Run, SkippedTokens, concatenate
from earlyexit.sequences.sequence import PAGE_TOKENS, RUN, sequence_of


class Block(nn.Module, ABC):
    """Base class of a decoder's blocks."""

    @abstractmethod
    def write(self, index: int, hidden_ND: Tensor, where: Any, kv: KvStore) -> Tensor:
        """Writes the rows' keys and values to the store, and returns the decoder's queries, (M, H, d).

        `where`: the result of the backbone's `where` for these rows.
        """

    @abstractmethod
    def attended(self, index: int, hidden_ND: Tensor, queries_MHd: Tensor, where: Any, kv: KvStore) -> Tensor:
        """Returns the hidden state after the block, (N, D), for rows whose keys and values are in the store."""


class Rows:
    """The rows of one call of `run_blocks`: for each run, rows of skipped tokens, and then the run's own rows.

    Skipped tokens are earlier tokens of the sequence that left before a block, which has not processed them yet.
    """

    def __init__(self, backbone: DecoderBackbone, runs: Sequence[Run], sent: Sequence[int], hidden_ND: Tensor) -> None:
        """`sent`: for each run, the number of its first rows that another replica sent, for tokens that left there."""
        self.runs = runs
        self._backbone = backbone
        self._spans = list(runs)
        """The runs, each with its tokens that are in `_rows_MD`."""
        self._rows_MD, self._num_rows = hidden_ND, len(hidden_ND)
        self._copied: list[SkippedTokens | None] = [None] * len(runs)
        """For each run, tokens of which only keys and values are computed, with fill "copy"."""
        if backbone.fill == "copy" and any(sent):
            rows = self._tokens()
            self._copied = [each.part(each.start, each.start + n) for each, n in zip(rows, sent, strict=True)]
            self._rows_MD = torch.cat([each.hidden_nD[n:] for each, n in zip(rows, sent, strict=True)])
            self._spans = [
                replace(run, start=run.start + n, length=run.length - n) for run, n in zip(runs, sent, strict=True)
            ]

    def join(self, block: int) -> None:
        """Adds the rows of skipped tokens that left just before a block."""
        memory = self._backbone.memory
        starts = [(copied or span).start for copied, span in zip(self._copied, self._spans, strict=True)]
        found = [memory.older(run.sequence, block, start) for run, start in zip(self.runs, starts, strict=True)]
        if not any(found):
            return
        if self._backbone.fill == "copy":
            self._copied = [
                copied if skipped is None else concatenate(skipped, copied)
                for skipped, copied in zip(found, self._copied, strict=True)
            ]
        else:
            rows = [concatenate(skipped, own) for skipped, own in zip(found, self._tokens(), strict=True)]
            self._rows_MD = torch.cat([each.hidden_nD for each in rows])
            self._spans = [
                replace(span, start=each.start, length=span.end - each.start)
                for span, each in zip(self._spans, rows, strict=True)
            ]

    def run(self, first: int, end: int) -> None:
        """Runs blocks `first` to `end` - 1."""
        backbone, kv = self._backbone, self._backbone.memory.kv
        where = written = backbone.where(self._spans)
        copied = [(skipped, run) for skipped, run in zip(self._copied, self.runs, strict=True) if skipped is not None]
        if copied:
            runs = [replace(run, start=skipped.start, length=len(skipped.hidden_nD)) for skipped, run in copied]
            written = backbone.where([*runs, *self._spans])
        for index in range(first, end):
            block = backbone.blocks[index]
            assert isinstance(block, Block)
            # One product for all rows, so that the weights are read once. The queries of copied rows are not used.
            rows_ND = torch.cat([*(each.hidden_nD for each, _ in copied), self._rows_MD]) if copied else self._rows_MD
            queries_MHd = block.write(index, rows_ND, written, kv)[-len(where.own.write_N) :]
            self._rows_MD = block.attended(index, self._rows_MD, queries_MHd, where, kv)

    def settle(self, first: int, end: int) -> Tensor:
        """Records all rows as pending before block `end`, because their tokens may leave at an exit there.

        Returns the rows of the call's own inputs, packed (N, D).
        """
        memory, is_last = self._backbone.memory, end == self._backbone.num_blocks
        rows = [concatenate(copied, own) for copied, own in zip(self._copied, self._tokens(), strict=True)]
        for run, tokens in zip(self.runs, rows, strict=True):
            if is_last:
                memory.mark_seen(run.sequence, first, run.end)
            elif run.sequence != TRIAL:
                memory.advance(run.sequence, first, end, tokens)
        if len(self._rows_MD) == self._num_rows:
            return self._rows_MD
        return torch.cat([tokens.hidden_nD[-run.length :] for run, tokens in zip(self.runs, rows, strict=True)])

    def _tokens(self) -> list[SkippedTokens]:
        """Returns the rows of each span."""
        rows = torch.split(self._rows_MD, [span.length for span in self._spans])
        return [SkippedTokens(span.start, rows_nD) for span, rows_nD in zip(self._spans, rows, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder. The defaults are SmolLM2-135M's."""

    vocab_size: int = 49152
    hidden_size: int = 576
    num_blocks: int = 30
    num_heads: int = 9
    num_kv_heads: int = 3
    head_size: int = 64
    intermediate_size: int = 1536
    max_length: int = 8192
    rotary_base: float = 100000.0
    norm_eps: float = 1e-5
    tied: bool = False
    """Whether the full model's head shares the embedding's weights."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFolderError(f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}")
        if self.head_size % 2:
            raise ModelFolderError(f"head_size must be even for rotary positions, not {self.head_size}")

    @property
    def kv(self) -> tuple[int, int, int]:
        """The shape of one token's keys: blocks, heads, and size of a head. Its values have the same shape."""
        return self.num_blocks, self.num_kv_heads, self.head_size


@dataclass(frozen=True, slots=True)
class Where:
    """The places of rows in the store, and cosines and sines for the rotation of their queries and keys."""

    own: KvIndex
    rotary: Tensors


class DecoderBlock(Block):
    """Attention and a gated feed-forward, each after its norm."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        size, wide = config.hidden_size, config.intermediate_size
        self.heads = config.num_heads, config.num_kv_heads, config.num_kv_heads
        self.head_size = config.head_size
        self.attention_norm = nn.RMSNorm(size, config.norm_eps)
        self.qkv = nn.Linear(size, sum(self.heads) * config.head_size, bias=False)
        self.attention_out = nn.Linear(config.num_heads * config.head_size, size, bias=False)
        self.feed_forward_norm = nn.RMSNorm(size, config.norm_eps)
        self.gate_up = nn.Linear(size, 2 * wide, bias=False)
        self.down = nn.Linear(wide, size, bias=False)

    def write(self, index: int, hidden_ND: Tensor, where: Where, kv: KvStore) -> Tensor:
        queries, keys, values = self.heads
        qkv_NAd = self.qkv(self.attention_norm(hidden_ND)).unflatten(-1, (queries + keys + values, self.head_size))
        rotated_NAd = apply_rotary(qkv_NAd[:, : queries + keys], where.rotary)
        kv.write(index, where.own.write_N, rotated_NAd[:, queries:], qkv_NAd[:, queries + keys :])
        return rotated_NAd[:, :queries]

    def attended(self, index: int, hidden_ND: Tensor, queries_MHd: Tensor, where: Where, kv: KvStore) -> Tensor:
        hidden_ND = hidden_ND + self.attention_out(kv.attend(index, where.own, queries_MHd).flatten(1))
        gate_NF, up_NF = self.gate_up(self.feed_forward_norm(hidden_ND)).chunk(2, dim=-1)
        result: Tensor = hidden_ND + self.down(F.silu(gate_NF) * up_NF)
        return result


def apply_rotary(values_NHd: Tensor, rotary: Tensors) -> Tensor:
    """Applies rotary positions (Su et al. 2021). Element i of a head's first half forms a pair with i of the second."""
    cos_N1d, signed_sin_N1d = rotary
    return values_NHd * cos_N1d + values_NHd.roll(values_NHd.shape[-1] // 2, -1) * signed_sin_N1d


class DecoderBackbone(Backbone):
    """Embeddings and decoder blocks, with a store of keys and values."""

    config: DecoderConfig
    reorders_linears = True

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        self.num_blocks = config.num_blocks
        self.max_length = config.max_length
        self.vocabulary = "word.weight" if config.tied else None
        ids = TensorSpec(name="token_ids", shape=(), dtype="int32", per_token=True, below=config.vocab_size)
        self.inputs = (ids, _RUN)
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList(self.new_block() for _ in range(config.num_blocks))
        self.norm = self.new_norm()
        """The norm after the last block."""
        self.fill: Fill = "compute"
        """How blocks that a token skipped get its keys and values."""
        self._memory: KvMemory | None = None

    def new_block(self) -> Block:
        """Returns a block with random weights."""
        return DecoderBlock(self.config)

    def new_norm(self) -> nn.Module:
        """Returns the norm after the last block, with initial weights."""
        return nn.RMSNorm(self.config.hidden_size, self.config.norm_eps)

    @property
    def memory(self) -> KvMemory:
        """The keys and values of sequences; raises ModelFolderError before `open_store`."""
        if self._memory is None:
            raise ModelFolderError("a decoder needs a store of keys and values: see `open_store`")
        return self._memory

    @property
    def kept_bytes(self) -> int:
        return 2 * prod(self.config.kv) * self.word.weight.element_size()

    def open_store(self, num_pages: int, **options: int) -> KvMemory:
        """Allocates and returns a store of `num_pages` pages on the weights' device, in the weights' dtype."""
        weight = self.word.weight
        kv = KvStore(self.config.kv, num_pages, device=weight.device, dtype=weight.dtype, **options)
        self._memory = KvMemory(kv)
        return self._memory

    def open_memory(self, tokens: int, fill: Fill = "compute") -> KvMemory:
        self.fill = fill
        return self.open_store(tokens // PAGE_TOKENS)

    def boundary(self, block: int) -> Boundary:
        return (TensorSpec(name="hidden", shape=(self.config.hidden_size,), per_token=True), _RUN, _BEHIND)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        token_ids_N, run_B5 = inputs
        return self.word(token_ids_N), run_B5, run_B5.new_zeros(len(run_B5))

    def run_blocks(self, first: int, end: int, hidden: Tensors, layout: Layout) -> Tensors:
        """Runs blocks, also on skipped tokens of the same sequences; see `KvMemory`."""
        hidden_ND, run_B5, behind_B = hidden
        behind = behind_B.tolist()
        runs = self.runs(run_B5, behind, layout)
        for run in runs:  # has no effect in a replica, where sequences have entered the store already
            self.memory.kv.enter(run.sequence, run.limit)
        rows = Rows(self, runs, behind, hidden_ND)
        stops = sorted({first, *(block for run in runs for block in self.memory.pending_blocks(run, first, end))})
        for start, stop in pairwise([*stops, end]):
            rows.join(start)
            rows.run(start, stop)
        after_ND = rows.settle(first, end)
        return self.norm(after_ND) if end == self.num_blocks else after_ND, run_B5, behind_B

    def runs(self, run_B5: Tensor, behind: Sequence[int], layout: Layout) -> list[Run]:
        """Returns the run of every input. `behind`: how many of its rows came from another replica."""
        inputs = zip(run_B5.tolist(), behind, layout.lengths_B.tolist(), strict=True)
        return [
            self.run_of(sequence_of(high, low), start - num_behind, length, limit, prompt)
            for (high, low, start, limit, prompt), num_behind, length in inputs
        ]

    def run_of(self, sequence: int, start: int, length: int, limit: int, prompt: int) -> Run:
        """Returns a run of a sequence. `prompt`: the number of tokens of the sequence's prompt."""
        return Run(sequence=sequence, start=start, length=length, limit=limit)

    def where(self, runs: Sequence[Run]) -> Any:
        """Returns the places and positions of the runs' rows, in the form that the blocks need."""
        places = self.memory.kv.places(runs)
        return Where(places, self.rotary(places.position_N))

    def rotary(self, position_N: Tensor) -> Tensors:
        """Returns cosines and signed sines of the rotations at these positions, (N, 1, d) each.

        The sine is negative for the first half of a head; see `apply_rotary`.
        """
        size = self.config.head_size
        exponent = torch.arange(0, size, 2, dtype=torch.float32, device=position_N.device) / size
        angle_Nh = position_N[:, None].float() * self.config.rotary_base**-exponent
        cos_Nh, sin_Nh = angle_Nh.cos(), angle_Nh.sin()
        dtype = self.word.weight.dtype
        cos_N1d = torch.cat([cos_Nh, cos_Nh], dim=-1)[:, None]
        signed_sin_N1d = torch.cat([-sin_Nh, sin_Nh], dim=-1)[:, None]
        return cos_N1d.to(dtype), signed_sin_N1d.to(dtype)


_RUN = TensorSpec(name=RUN, shape=(5,), dtype="int32", below=1)
"""One row per input; see `sequence.run_of`. Zeros, which warm-ups use, stand for no sequence."""
_BEHIND = TensorSpec(name="behind", shape=(), dtype="int32", below=1)
"""One number per input: how many of its first rows came from another replica, for tokens that left there."""


IGNORED = {
    "begin_suppress_tokens": [], "encoder_no_repeat_ngram_size": 0, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "min_length": 0, "min_new_tokens": 0, "no_repeat_ngram_size": 0, "num_beams": 1,
    "repetition_penalty": 1, "sequence_bias": {},
}  # fmt: skip
"""Unsupported settings of `transformers` for greedy answers, with values that, like None, change nothing."""


def pretrained(
    backbone: DecoderBackbone, state: Mapping[str, Tensor], hf_model: Any, head_VD: Tensor, bias_V: Tensor | None = None
) -> Pretrained:
    """Returns the backbone with a state dict loaded, the head over its vocabulary, and settings of `hf_model`.

    Raises ModelFolderError for an encoder-decoder whose answers have no first token.
    """
    backbone.load_state_dict(dict(state))
    config, settings = hf_model.config, hf_model.generation_config
    words = [*(settings.bad_words_ids or ()), *([token] for token in settings.suppress_tokens or ())]
    ignored = [name for name, neutral in IGNORED.items() if getattr(settings, name, None) not in (None, neutral)]
    ignored += ["bad_words_ids"] if any(len(tokens) > 1 for tokens in words) else []
    if never := [tokens[0] for tokens in words if len(tokens) == 1]:  # such as Marian's padding
        bias_V = head_VD.new_zeros(len(head_VD)) if bias_V is None else bias_V
        bias_V = bias_V.index_fill(0, torch.tensor(never), -torch.inf)
    start = settings.decoder_start_token_id
    start = getattr(config, "decoder_start_token_id", None) if start is None else start
    if config.is_encoder_decoder and start is None:
        raise ModelFolderError("an encoder-decoder needs decoder_start_token_id, the first token of answers")
    head = {"classifier.weight": head_VD} | ({} if bias_V is None else {"bias_V": bias_V})
    style: RampStyle = "vocabulary" if bias_V is None else "vocabulary-bias"
    final = FinalHead(style=style, pooling="last", num_outputs=len(head_VD), weights=head)
    return Pretrained(backbone=backbone, head=final, label_names=None, start=start, ignored=tuple(ignored))


class Llama(Family):
    """Decoders of the `transformers` type `llama` with unscaled rotary positions."""

    name = "llama"
    sizes, backbone = DecoderConfig, DecoderBackbone

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Raises ModelFolderError for scaled positions, biases, other activations than SiLU, and without a head."""
        if not hasattr(hf_model, "lm_head"):
            raise ModelFolderError("a Llama without a head over its vocabulary cannot generate")
        config, weights = hf_model.config, hf_model.state_dict()
        words_VD, head_VD = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
        rotary = config.rope_parameters
        if rotary["rope_type"] != "default":
            raise ModelFolderError(f"rope_type must be 'default', not {rotary['rope_type']!r}")
        if config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
            raise ModelFolderError("a Llama with biases, or with an activation other than silu, is not supported")
        sizes = DecoderConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_blocks=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_size=config.head_dim,
            intermediate_size=config.intermediate_size,
            max_length=config.max_position_embeddings,
            rotary_base=float(rotary["rope_theta"]),
            norm_eps=config.rms_norm_eps,
            tied=words_VD.equal(head_VD),  # a checkpoint may have both weights, although its configuration ties them
        )
        whole = {"word.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
        names = names_in_blocks("blocks.{}", "model.layers.{}", sizes.num_blocks, LLAMA_PARTS) | whole
        return pretrained(DecoderBackbone(sizes), renamed(weights, names), hf_model, head_VD)


LLAMA_PARTS = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
