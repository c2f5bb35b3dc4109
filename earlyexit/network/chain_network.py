"""A chain of networks as one `Network`, and functions that load networks and open their memory for sequences.

Each network runs its own segments. A survivor at the end of a network returns to the ingress, which encodes the
original input again for the next network.
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
    """A `Network` of several networks, with consecutively numbered blocks and ramps.

    The end of every network but the last is a ramp. Its head is computed if that ramp is active or observed. No hidden
    state passes such an end, only `importance` does, in float16.
    """

    def __init__(self, members: Sequence[EarlyExitModel], runners: Sequence[SegmentRunner] | None = None) -> None:
        """Raises ModelFolderError unless the networks have the same device, float type and task.

        All networks but the last are marked as parts of a chain, whose ends are ramps. `runners`: what computes the
        segments of each network; None for the networks themselves.
        """
        first, last = members[0], members[-1]
        for member in members:
            if member.backbone.kept_bytes:
                raise ModelFolderError(f"{member.info.name} keeps memory of sequences, so it cannot be part of a chain")
            if member.task.spec() != last.task.spec():
                raise ModelFolderError(f"{member.info.name} and {last.info.name} have different tasks: no chain")
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
        """The longest input that all networks accept, in tokens."""
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
        for index, runner in enumerate(self.runners):
            runner.prepare({own: budget for network, own, budget in located if network == index})


AnyNetwork = EarlyExitModel | ChainNetwork
"""The networks that a model folder may hold."""


def locate(chain: Chain, segment: Segment) -> tuple[int, Segment]:
    """Returns the index of a segment's network, and the segment in that network's numbering."""
    network, first = chain.locate(segment.first)
    start = segment.first - first
    assert segment.end - start <= chain.lengths[network], f"{segment} is in two networks"
    ramp = None if segment.ramp is None else segment.ramp - start
    return network, replace(segment, first=first, end=segment.end - start, ramp=ramp)


def load_network(
    folder: Path, *, device: str = "cpu", dtype: torch.dtype | None = None, attention: Attention = "auto"
) -> AnyNetwork:
    """Loads the network, or chain of networks, of a model folder, in inference mode: see `load_model`.

    Raises ModelFolderError for an unusable folder, and if the models of a chain no longer match its card.
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
            f"{folder / CARD_FILE}: its models have the ramps {list(network.ramp_indices)}, the chain has "
            f"{list(card.ramps)}; run `offramp chain` again"
        )
    if network.task.spec() != find_task(card.task).spec():  # answers would get wrong names
        raise ModelFolderError(
            f"{folder / CARD_FILE}: its models have other labels than the chain, or in another order; run "
            "`offramp chain` again"
        )
    return network


def open_network(backend: BackendName, network: AnyNetwork, folder: Path, num_threads: int) -> SegmentRunner:
    """Opens a backend for a network or chain whose weights are final: see `open_segments`."""
    folders = read_card(folder).members(folder)
    members = network.members if isinstance(network, ChainNetwork) else (network,)
    runners = [open_segments(backend, member, path, num_threads) for member, path in zip(members, folders, strict=True)]
    if not isinstance(network, ChainNetwork):
        return runners[0]
    run_themselves = all(runner is member for runner, member in zip(runners, members, strict=True))
    return network if run_themselves else ChainNetwork(members, runners)


logger = logging.getLogger(__name__)

CPU_SHARE, GPU_SHARE = 0.25, 0.8
"""The default share of free memory, after loading the weights, for keys and values. The rest of a GPU's memory is for
batches (vLLM leaves a tenth of all memory). On CPUs, the replicas of a machine share its memory."""
MOST_BYTES = 4 << 30
"""The default limit in host memory, in bytes. It holds a hundred thousand tokens of a model with 135 million
parameters, which is more than a few cores can serve."""
MOST_SEQUENCES = 256
"""The default limit, in sequences of the longest length. Small models need no more memory."""


def keeps_sequences(network: AnyNetwork) -> bool:
    """Whether a network keeps memory of sequences between their inputs."""
    return not isinstance(network, ChainNetwork) and network.backbone.kept_bytes > 0


def open_memory(network: AnyNetwork, tokens: int | None, fill: Fill, free_bytes: int) -> Memory[Piece] | None:
    """Returns memory for `tokens` tokens of sequences, by default a share of `free_bytes`; None if it is not needed."""
    if isinstance(network, ChainNetwork) or not network.backbone.kept_bytes:
        return None
    if tokens is None:
        on_gpu = network.device.type == "cuda"
        tokens = tokens_that_fit(free_bytes, network.backbone.kept_bytes, network.max_length, on_gpu=on_gpu)
    memory = network.backbone.open_memory(tokens, fill)
    capacity = memory.use().num_pages * memory.use().page_tokens
    megabytes = capacity * network.backbone.kept_bytes / 1e6
    logger.info("reserved keys and values of %d tokens, %.0f MB", capacity, megabytes)
    return memory


def tokens_that_fit(free_bytes: int, token_bytes: int, max_length: int, *, on_gpu: bool) -> int:
    """Returns the default capacity in tokens: the share of free memory, within the limits above."""
    most_bytes = free_bytes * GPU_SHARE if on_gpu else min(free_bytes * CPU_SHARE, MOST_BYTES)
    return max(PAGE_TOKENS, min(int(most_bytes) // token_bytes, MOST_SEQUENCES * max_length))
