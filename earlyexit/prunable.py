"""Whether the words of a model's inputs can be pruned: known from its folder, before anything is loaded."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from earlyexit.codecs import make_codec
from earlyexit.errors import PlanError
from earlyexit.families import MEASURES_IMPORTANCE
from earlyexit.store import read_card


def check_prunable(folder: Path, ends: Collection[int]) -> None:
    """Raise PlanError where the words of what goes on after these blocks, ends of a chain's networks, cannot be pruned.

    The network before must tell how much attention tokens receive, and its inputs must be texts.
    """
    if not ends:
        return
    card = read_card(folder)
    members = card.members(folder)
    for block in sorted(ends):
        network = read_card(members[card.chain.network_of(block)])
        if network.family not in MEASURES_IMPORTANCE:
            raise PlanError(
                f"{network.name}: words are pruned by the attention that they receive, which networks of the family "
                f"{network.family!r} do not tell; {', '.join(MEASURES_IMPORTANCE)} do"
            )
        codec = make_codec(network.codec)
        if not codec.prunes:
            raise PlanError(f"{network.name}: words are pruned of texts, and its inputs are encoded by {codec.name!r}")
