"""Several networks in a row as one `Network`; each runs its own segments, and no segment crosses to the next network.

An input that goes on at the end of a network returns to the ingress, which encodes its row for the next network. This
file also opens networks, and the memory that a replica reserves for sequences.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from earlyexit.backends import BackendName, open_segments
from earlyexit.engine.device import Memory
from earlyexit.engine.queue import Attention
from earlyexit.errors import ModelFolderError
from earlyexit.named import Fill
from earlyexit.network.boundary import Boundary, Budget, Segment
from earlyexit.network.chain import Chain, join_chains
from earlyexit.network.model import EarlyExitModel, SegmentRunner
from earlyexit.network.piece import Piece, Tensors, halved
from earlyexit.network.store import CARD_FILE, load_model, read_card
from earlyexit.sequences.sequence import PAGE_TOKENS
from earlyexit.tasks import find_task


class ChainNetwork:
    """A `Network` of several networks, with blocks and ramps numbered consecutively.

    The end of every network but the last is a ramp: its head is computed where that ramp is active or looks. Only
    tensors beside the network's own cross such an end: `importance`, in half precision.
    """

    def __init__(self, members: Sequence[EarlyExitModel], runners: Sequence[SegmentRunner] | None = None) -> None:
        """Raises ModelFolderError unless the networks have one device, one float type and the same answers.

        It marks all but the last as parts of a chain, whose ends are ramps. `runners`: what computes the segments of
        each network; None for the networks themselves.
        """
        first, last = members[0], members[-1]
        for member in members:
            if member.backbone.kept_bytes:
                raise ModelFolderError(f"{member.info.name} keeps something of sequences: it cannot be part of a chain")
            if member.task.spec() != last.task.spec():
                raise ModelFolderError(f"{member.info.name} and {last.info.name} give different answers: no chain")
            if (member.dtype, member.device) != (first.dtype, first.device):
                raise ModelFolderError(f"{member.info.name} and {first.info.name} differ in float type or device")
            member.is_last = member is last
        self.members = tuple(members)
        self.runners: tuple[SegmentRunner, ...] = tuple(members if runners is None else runners)
        self.chain = join_chains([member.chain for member in members])
        self.num_blocks = self.chain.num_blocks
        self.ramp_indices = self.chain.ramps
        self.task = last.task
        self.max_length = min(member.max_length for member in members)
        """The longest input that every member takes."""
        self.device, self.dtype = first.device, first.dtype

    def boundary(self, block: int) -> Boundary:
        if block in self.chain.end_ramps:
            return ()
        network, local = self.chain.locate(max(0, block))
        return self.members[network].boundary(local if block >= 0 else -1)

    def takes(self, block: int) -> Boundary:
        network, local = self.chain.locate(block)
        return self.members[network].takes(local)

    def run(self, segment: Segment, piece: Piece) -> tuple[Tensors, Tensor | None]:
        network, own = locate(self.chain, segment)
        member, (tensors, outputs_BC) = self.members[network], self.runners[network].run(own, piece)
        if own.end == member.num_blocks and network < len(self.members) - 1:
            tensors = tuple(map(halved, tensors[len(member.boundary(own.end - 1)) :]))
        return tensors, outputs_BC

    def is_ready(self, segment: Segment) -> bool:
        network, own = locate(self.chain, segment)
        return self.runners[network].is_ready(own)

    def prepare(self, segments: Mapping[Segment, Budget]) -> None:
        located = [(*locate(self.chain, segment), budget) for segment, budget in segments.items()]
        for place, runner in enumerate(self.runners):
            runner.prepare({own: budget for network, own, budget in located if network == place})


AnyNetwork = EarlyExitModel | ChainNetwork
"""The networks that a model folder may hold."""


def locate(chain: Chain, segment: Segment) -> tuple[int, Segment]:
    """Returns the network of a segment, and the segment in that network's numbering."""
    network, first = chain.locate(segment.first)
    start = segment.first - first
    assert segment.end - start <= chain.lengths[network], f"{segment} runs over a crossing"
    ramp = None if segment.ramp is None else segment.ramp - start
    return network, replace(segment, first=first, end=segment.end - start, ramp=ramp)


def load_network(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None, attention: Attention = "auto"
) -> AnyNetwork:
    """Returns a model folder's network or chain of networks, in inference mode; see `load_model`.

    Raises ModelFolderError, also where a chain's models, or their labels, no longer fit its card.
    """
    card = read_card(folder)
    members = [load_model(path, device=device, dtype=dtype) for path in card.members(folder)]
    for member in members:
        member.attention = attention
    if card.chain.is_one:
        return members[0]
    network = ChainNetwork(members)
    if network.chain != card.chain:
        raise ModelFolderError(
            f"{folder / CARD_FILE}: its models have ramps {list(network.ramp_indices)}, the chain says "
            f"{list(card.ramps)}; `offramp chain` makes it anew"
        )
    if network.task.spec() != find_task(card.task).spec():  # answers would get wrong names
        raise ModelFolderError(
            f"{folder / CARD_FILE}: its models have other labels, or in another order, than the chain says; "
            "`offramp chain` makes it anew"
        )
    return network


def open_network(backend: BackendName, network: AnyNetwork, folder: Path, num_threads: int) -> SegmentRunner:
    """Returns the runner of a network, or of a chain, that no longer changes; see `open_segments`."""
    folders = read_card(folder).members(folder)
    members = network.members if isinstance(network, ChainNetwork) else (network,)
    runners = [open_segments(backend, member, path, num_threads) for member, path in zip(members, folders, strict=True)]
    if not isinstance(network, ChainNetwork):
        return runners[0]
    same = all(runner is member for runner, member in zip(runners, members, strict=True))
    return network if same else ChainNetwork(members, runners)


logger = logging.getLogger(__name__)

CPU_SHARE, GPU_SHARE = 0.25, 0.8
"""Share of the memory free after loading the weights that a replica takes by default. The rest of a GPU's memory is for
batches (vLLM leaves a tenth of all); the replicas of a machine share its memory."""
MOST_BYTES = 4 << 30
"""Most bytes of a machine's own memory that a replica takes by default: a hundred thousand tokens of a model of 135
million parameters, more than a few cores can serve."""
MOST_SEQUENCES = 256
"""Most sequences of the longest length for which memory is taken by default: small models need no more."""


def keeps_sequences(network: AnyNetwork) -> bool:
    """Whether a network keeps anything of sequences between their inputs."""
    return not isinstance(network, ChainNetwork) and network.backbone.kept_bytes > 0


def open_memory(network: AnyNetwork, tokens: int | None, fill: Fill, free_bytes: int) -> Memory[Piece] | None:
    """Returns memory for `tokens` tokens of sequences, None: by what is free. None for networks that keep nothing."""
    if isinstance(network, ChainNetwork) or not network.backbone.kept_bytes:
        return None
    if tokens is None:
        on_gpu = network.device.type == "cuda"
        tokens = tokens_that_fit(free_bytes, network.backbone.kept_bytes, network.max_length, on_gpu=on_gpu)
    memory = network.backbone.open_memory(tokens, fill)
    use = memory.use()
    held = use.num_pages * use.page_tokens
    logger.info("keys and values of %d tokens, %.0f MB", held, held * network.backbone.kept_bytes / 1e6)
    return memory


def tokens_that_fit(free_bytes: int, token_bytes: int, max_length: int, *, on_gpu: bool) -> int:
    """Returns how many tokens a replica keeps by default: what fits into free memory, and no more than is needed."""
    most_bytes = free_bytes * GPU_SHARE if on_gpu else min(free_bytes * CPU_SHARE, MOST_BYTES)
    return max(PAGE_TOKENS, min(int(most_bytes) // token_bytes, MOST_SEQUENCES * max_length))
