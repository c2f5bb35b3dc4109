"""The pre-norm transformer decoder that Llama, SmolLM2 and their relatives share; it keeps keys and values.

An input is a run of tokens of one sequence: a prompt, a part of one, or the newest token alone. It brings its
sequence's number and how many of its tokens came before. So a packed batch holds runs of any kind beside each other,
and its blocks are cut, fused and left early as those of encoders are. Weights and results equal those of
`transformers`; the tests compare.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import is_
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, FinalHead, JsonDict, Pretrained, names_in_blocks, put_together
from earlyexit.named import Fill
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.piece import Layout, Tensors
from earlyexit.ramps import RampStyle
from earlyexit.sequences.kv import TRIAL, KvIndex, KvShape, KvStore, Run
from earlyexit.sequences.kv_memory import KvMemory, PendingTokens, SkippedTokens, concatenate
from earlyexit.sequences.sequence import PAGE_TOKENS, RUN, sequence_of


class Block(nn.Module, ABC):
    """One block of a decoder's chain."""

    @abstractmethod
    def forward(self, index: int, hidden_ND: Tensor, where: Any, kv: KvStore) -> Tensor:
        """Runs (N, D) to (N, D); writes the rows' keys and values to the store first, then attends to them.

        `where`: the result of the backbone's own `where` for these rows.
        """

    @abstractmethod
    def keep(self, index: int, hidden_ND: Tensor, where: Any, kv: KvStore) -> None:
        """Writes keys and values only, of states that the block is not run on."""

    def forward_beside(
        self, index: int, hidden_ND: Tensor, where: Any, copies: tuple[Tensor, Any], kv: KvStore
    ) -> Tensor:
        """Runs `keep` on the rows `copies`, then `forward` on the others."""
        self.keep(index, *copies, kv)
        after_ND: Tensor = self(index, hidden_ND, where, kv)
        return after_ND


class Rows:
    """The rows of one call of `run_blocks`: every run's own rows and, before them, rows of its tokens that left early.

    Tokens that left before some block are *behind*: the block has not seen them yet.
    """

    def __init__(self, backbone: DecoderBackbone, runs: Sequence[Run], came: Sequence[int], hidden_ND: Tensor) -> None:
        """`came`: how many of each run's first rows came along from another replica."""
        self.runs = runs
        self._backbone = backbone
        self._copied: list[SkippedTokens | None] = [None] * len(runs)
        self._came: list[Tensor | None] = [None] * len(runs)
        """Rows that came along and are passed on unchanged."""
        self._rows_MD = hidden_ND
        if backbone.fill == "copy" and any(came):  # their states are copied, not computed
            rows = torch.split(hidden_ND, [run.length for run in runs])
            self._copied = [
                SkippedTokens(run.start, rows_nD[:count]) if count else None
                for run, rows_nD, count in zip(runs, rows, came, strict=True)
            ]
            self._came = [None if each is None else each.hidden_nD for each in self._copied]
            self._rows_MD = torch.cat([rows_nD[count:] for rows_nD, count in zip(rows, came, strict=True)])
            self.runs = [
                replace(run, start=run.start + count, length=run.length - count)
                for run, count in zip(runs, came, strict=True)
            ]
        self._spans = list(self.runs)
        self._is_indexed = False

    def join(self, block: int) -> None:
        """Add the rows that wait before a block."""
        pending = self._backbone.memory.pending
        starts = [(older or run).start for older, run in zip(self._copied, self._spans, strict=True)]
        found = [pending.older(run.sequence, block, start) for run, start in zip(self.runs, starts, strict=True)]
        if not any(found):
            return
        if self._backbone.fill == "copy":
            self._copied = [
                old if new is None else concatenate(new, old) for new, old in zip(found, self._copied, strict=True)
            ]
        else:
            behind = (None if older is None else older.hidden_nD for older in found)
            pairs = zip(behind, self._split(), strict=True)
            self._rows_MD = torch.cat([each for pair in pairs for each in pair if each is not None])
            self._spans = [
                run if older is None else replace(run, start=older.start, length=run.end - older.start)
                for older, run in zip(found, self._spans, strict=True)
            ]
        self._is_indexed = False

    def run(self, first: int, end: int) -> None:
        """Run blocks `first` to `end` - 1."""
        kv = self._backbone.memory.kv
        if not self._is_indexed:
            self._index()
        for index in range(first, end):
            block = self._backbone.blocks[index]
            assert isinstance(block, Block)
            if self._copies is None:
                self._rows_MD = block(index, self._rows_MD, self._where, kv)
            else:
                self._rows_MD = block.forward_beside(index, self._rows_MD, self._where, self._copies, kv)

    def settle(self, first: int, end: int) -> Tensor:
        """Note which rows wait before block `end`: the rows behind, and the own rows, which may leave at an exit there.

        Returns the rows of the call's own inputs, packed (N, D).
        """
        pending, is_last = self._backbone.memory.pending, end == self._backbone.num_blocks
        rows = self._split()
        for run, span, rows_nD, copied in zip(self.runs, self._spans, rows, self._copied, strict=True):
            if is_last:
                pending.through(run.sequence, first, run.end)
            elif run.sequence != TRIAL:
                waiting = SkippedTokens(span.start, rows_nD)
                pending.moved(run.sequence, first, end, waiting if copied is None else concatenate(copied, waiting))
        if not any(came is not None for came in self._came) and all(map(is_, self._spans, self.runs)):
            return self._rows_MD
        own = (rows_nD[-run.length :] for run, rows_nD in zip(self.runs, rows, strict=True))
        parts = zip(self._came, own, strict=True)
        return torch.cat([each for pair in parts for each in pair if each is not None])

    def _split(self) -> tuple[Tensor, ...]:
        return torch.split(self._rows_MD, [span.length for span in self._spans])

    def _index(self) -> None:
        self._is_indexed = True
        self._where = self._backbone.where(self._spans)
        self._copies: tuple[Tensor, Any] | None = None
        copied = [(each, run) for each, run in zip(self._copied, self.runs, strict=True) if each is not None]
        if copied:
            runs = [replace(run, start=each.start, length=len(each.hidden_nD)) for each, run in copied]
            self._copies = torch.cat([each.hidden_nD for each, _ in copied]), self._backbone.where(runs)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes of a decoder; the defaults are SmolLM2-135M's."""

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
    """Whether the full model's head has the embedding's weights."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelFolderError(f"{self.num_heads} heads cannot share {self.num_kv_heads} keys evenly")
        if self.head_size % 2:
            raise ModelFolderError(f"rotary positions turn pairs of numbers; a head has {self.head_size}")

    @property
    def kv(self) -> KvShape:
        """The keys and values of one token."""
        return KvShape(num_blocks=self.num_blocks, num_heads=self.num_kv_heads, head_size=self.head_size)


@dataclass(frozen=True, slots=True)
class Where:
    """The places of rows in the store, and the rotation of their queries and keys."""

    places: KvIndex
    rotary: Tensors


class DecoderBlock(Block):
    """Attention and a gated feed-forward, each behind its norm."""

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

    def forward(self, index: int, hidden_ND: Tensor, where: Where, kv: KvStore) -> Tensor:
        queries_NHd, keys_NKd, values_NKd = self._queries_keys_values(hidden_ND, where.rotary)
        kv.write(index, where.places.write_N, keys_NKd, values_NKd)
        return self._attended(index, hidden_ND, queries_NHd, where, kv)

    def forward_beside(
        self, index: int, hidden_ND: Tensor, where: Where, copies: tuple[Tensor, Where], kv: KvStore
    ) -> Tensor:
        # In one product, so that its weights are read once; the queries of what is copied are of no use.
        copied_MD, there = copies
        rotary = tuple(map(torch.cat, zip(there.rotary, where.rotary, strict=True)))
        queries, keys, values = self._queries_keys_values(torch.cat([copied_MD, hidden_ND]), rotary)
        kv.write(index, torch.cat([there.places.write_N, where.places.write_N]), keys, values)
        return self._attended(index, hidden_ND, queries[len(copied_MD) :], where, kv)

    def _attended(self, index: int, hidden_ND: Tensor, queries_NHd: Tensor, where: Where, kv: KvStore) -> Tensor:
        """Returns the block's output for rows whose keys and values are in the store."""
        context_NHd = kv.attend(index, where.places, queries_NHd)
        hidden_ND = hidden_ND + self.attention_out(context_NHd.flatten(1))
        gate_NF, up_NF = self.gate_up(self.feed_forward_norm(hidden_ND)).chunk(2, dim=-1)
        result: Tensor = hidden_ND + self.down(F.silu(gate_NF) * up_NF)
        return result

    def keep(self, index: int, hidden_ND: Tensor, where: Where, kv: KvStore) -> None:
        _, keys_NKd, values_NKd = self._queries_keys_values(hidden_ND, where.rotary)
        kv.write(index, where.places.write_N, keys_NKd, values_NKd)

    def _queries_keys_values(self, hidden_ND: Tensor, rotary: Tensors) -> tuple[Tensor, ...]:
        """Returns queries, keys and values; queries and keys are rotated by their places."""
        queries, keys, values = self.heads
        qkv_NAd = self.qkv(self.attention_norm(hidden_ND)).unflatten(-1, (queries + keys + values, self.head_size))
        seen_NAd = turned(qkv_NAd[:, : queries + keys], rotary)
        return seen_NAd[:, :queries], seen_NAd[:, queries:], qkv_NAd[:, queries + keys :]


def turned(values_NHd: Tensor, rotary: Tensors) -> Tensor:
    """Applies rotary positions (Su et al. 2021): pairs are number i of a head's first half and of its second half."""
    cos_N1d, signed_sin_N1d = rotary
    return values_NHd * cos_N1d + values_NHd.roll(values_NHd.shape[-1] // 2, -1) * signed_sin_N1d


class DecoderBackbone(Backbone):
    """Embeddings and a chain of decoder blocks over a store of keys and values."""

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
        """The norm behind the last block, in front of its exit."""
        self.fill: Fill = "compute"
        """How blocks that a token has skipped get its keys and values."""
        self._memory: KvMemory | None = None

    def new_block(self) -> Block:
        """Returns a block with random weights."""
        return DecoderBlock(self.config)

    def new_norm(self) -> nn.Module:
        """Returns the norm behind the last block."""
        return nn.RMSNorm(self.config.hidden_size, self.config.norm_eps)

    @property
    def memory(self) -> KvMemory:
        """What it keeps of sequences; raises ModelFolderError before `open_store`."""
        if self._memory is None:
            raise ModelFolderError("a decoder needs a store of keys and values: see `open_store`")
        return self._memory

    @property
    def kept_bytes(self) -> int:
        return self.config.kv.bytes_per_token(self.word.weight.element_size())

    def open_store(self, num_pages: int, **options: int) -> KvMemory:
        """Makes, and uses from now on, a store of `num_pages` pages on the weights' device and in their type."""
        weight = self.word.weight
        kv = KvStore(self.config.kv, num_pages, device=weight.device, dtype=weight.dtype, **options)
        self._memory = KvMemory(kv, PendingTokens())
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
        """Runs blocks, also on tokens of the same sequences that left before one of them: see `PendingTokens`."""
        hidden_ND, run_B5, behind_B = hidden
        behind = behind_B.tolist()
        runs = self.runs(run_B5, behind, layout)
        for run in runs:  # sequences of a replica have entered already; those of offline runs enter here
            self.memory.kv.enter(run.sequence, run.limit)
        rows = Rows(self, runs, behind, hidden_ND)
        stops = sorted({first, *(block for run in runs for block in self.memory.pending.blocks(run, first, end))})
        for at, until in zip(stops, [*stops[1:], end], strict=True):
            rows.join(at)
            rows.run(at, until)
        after_ND = rows.settle(first, end)
        return self.norm(after_ND) if end == self.num_blocks else after_ND, run_B5, behind_B

    def runs(self, run_B5: Tensor, behind: Sequence[int], layout: Layout) -> list[Run]:
        """Returns the run of every input; `behind`: how many of its rows came along from another replica."""
        numbers = zip(run_B5.tolist(), behind, layout.lengths_B.tolist(), strict=True)
        return [
            self.run_of(sequence_of(high, low), start - came_along, length, limit, prompt)
            for (high, low, start, limit, prompt), came_along, length in numbers
        ]

    def run_of(self, sequence: int, start: int, length: int, limit: int, prompt: int) -> Run:
        """Returns the run of rows of a sequence whose first `prompt` tokens are its prompt."""
        return Run(sequence=sequence, start=start, length=length, limit=limit)

    def where(self, runs: Sequence[Run]) -> Any:
        """Returns what blocks must know of the rows of these runs."""
        places = self.memory.kv.places(runs)
        return Where(places, self.rotary(places.position_N))

    def rotary(self, position_N: Tensor) -> Tensors:
        """Returns cosine and sine of the rotation of tokens at these positions, (N, 1, d) each.

        The sine is negative for the first half of a head, which turns the other way.
        """
        size = self.config.head_size
        exponent = torch.arange(0, size, 2, dtype=torch.float32, device=position_N.device) / size
        angle_Nh = position_N[:, None].float() * self.config.rotary_base**-exponent
        cos_Nh, sin_Nh = angle_Nh.cos(), angle_Nh.sin()
        dtype = self.word.weight.dtype
        cos_N1d, sin_N1d = (torch.cat(each, dim=-1)[:, None] for each in ([cos_Nh, cos_Nh], [-sin_Nh, sin_Nh]))
        return cos_N1d.to(dtype), sin_N1d.to(dtype)

    def to_config(self) -> JsonDict:
        return asdict(self.config)


_RUN = TensorSpec(name=RUN, shape=(5,), dtype="int32", below=1)
"""One row per input: see `run_of`. Zeros, as warm-ups have them, stand for no sequence."""
_BEHIND = TensorSpec(name="behind", shape=(), dtype="int32", below=1)
"""One number per input: how many of its first rows came along from another replica, for tokens that left there."""


def pretrained(
    backbone: DecoderBackbone, state: Mapping[str, Tensor], head_VD: Tensor, bias_V: Tensor | None = None
) -> Pretrained:
    """Returns the backbone, filled with weights by their names, and the head over its vocabulary."""
    backbone.load_state_dict(dict(state))
    head = {"classifier.weight": head_VD} | ({} if bias_V is None else {"bias_V": bias_V})
    style: RampStyle = "vocabulary" if bias_V is None else "vocabulary-bias"
    final = FinalHead(style=style, pooling="last", num_outputs=len(head_VD), weights=head)
    return Pretrained(backbone=backbone, head=final, label_names=None)


class Llama(Family):
    """Decoders of `transformers`' type `llama`, with unscaled rotary positions."""

    name = "llama"

    def build(self, config: JsonDict, folder: Path | None = None) -> DecoderBackbone:
        return DecoderBackbone(DecoderConfig(**config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        """Raises ModelFolderError for variants that are not supported: scaled positions, biases."""
        config, weights = hf_model.config, hf_model.state_dict()
        rotary = config.rope_parameters
        if rotary["rope_type"] != "default":
            raise ModelFolderError(f"rotary positions of type {rotary['rope_type']!r} are not served; only the default")
        if config.hidden_act != "silu" or config.attention_bias or config.mlp_bias:
            raise ModelFolderError("a Llama with biases, or another activation than silu, is not served")
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
            tied=config.tie_word_embeddings,
        )
        whole = {"word.weight": ("model.embed_tokens.weight",), "norm.weight": ("model.norm.weight",)}
        names = names_in_blocks("blocks.{}", "model.layers.{}", sizes.num_blocks, LLAMA_PARTS) | whole
        vocabulary_VD = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
        return pretrained(DecoderBackbone(sizes), put_together(weights, names), vocabulary_VD)


LLAMA_PARTS = {
    "attention_norm": ("input_layernorm",),
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "attention_out": ("self_attn.o_proj",),
    "feed_forward_norm": ("post_attention_layernorm",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
