"""Words that are pruned where inputs cross from one network of a chain to the next (Tabi, section 4.2)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from earlyexit.codecs.chain import ChainCodec, ChainEncoded, CutRow
from earlyexit.wire import WirePiece
from optimizer.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """What is known of inputs at a crossing, of which some may lose words."""

    before: int
    """The network that they come from."""
    alpha: float | None
    """None: nobody loses words here, but texts that lost some before go on without them."""
    importance: Mapping[str, npt.NDArray[np.floating[Any]]]
    """By sample id, of every token that the network before was given; nothing of inputs that came without."""

    def cut(self, codec: ChainCodec, given: ChainEncoded, sample_id: str, network: int) -> None:
        """Make of an input what the next network is given of it, where that is not the row as it came."""
        if network in given.cut:
            return
        earlier = given.cut.get(self.before)
        row = given.row if earlier is None else earlier.row
        importance_N = self.importance.get(sample_id)
        if self.alpha is not None and importance_N is not None:
            found = codec.pruned_for(network, self.before, row, importance_N, self.alpha)
            # Who loses nothing is remembered too, or he would be looked at again; as the row that he came with.
            given.cut[network] = CutRow(row, found.encoded) if found.row == row else found
        elif earlier is not None and earlier.row is not given.row:
            given.cut[network] = codec.cut_row(network, row)


def cuts_of(going_on: WirePiece | None, plan: Plan) -> Cuts | None:
    """Of inputs at a crossing under a plan; None of new ones, and where there are no networks to cross between.

    Who left a network inside, because a plan skips it now, has not met all its attention, and loses no words.
    """
    if going_on is None or not plan.networks:
        return None
    at_an_end = going_on.next_block in plan.networks
    before = bisect_right(plan.networks, going_on.next_block - 1)
    alpha = plan.prune.get(going_on.next_block - 1) if at_an_end else None
    carried = going_on.tensors if at_an_end and alpha is not None else ()
    if not carried:
        return Cuts(before=before, alpha=None, importance={})
    ends = np.cumsum(going_on.lengths_B)[:-1]
    by_input = np.split(carried[-1].astype(np.float64), ends)
    return Cuts(before=before, alpha=alpha, importance=dict(zip(going_on.sample_ids, by_input, strict=True)))


def is_measured(plan: Plan, network: int) -> bool:
    """Whether inputs that enter a network are to bring what attention their tokens receive in it."""
    return bool(plan.networks) and plan.networks[network] - 1 in plan.prune
