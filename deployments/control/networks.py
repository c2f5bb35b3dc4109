"""What every network of a chain did: answers, the share of what reached it that it returned, crossings to it. Pure."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from deployments.control.intake import Interval
from earlyexit.chain import Chain


def network_figures(chain: Chain, used: Collection[int], seen: Interval | None) -> list[dict[str, Any]]:
    """One row per network, in their order; none where there is but one.

    `used`: the places of those that the plan uses. Shares are of answers that left under the plan in force, and None
    before the first.
    """
    if chain.is_one:
        return []
    seen = seen or Interval(since_s=0.0, at_s=0.0)
    return [_figures(chain, network, network in used, seen) for network in range(len(chain.names))]


def _figures(chain: Chain, network: int, is_used: bool, seen: Interval) -> dict[str, Any]:
    first, end = chain.starts[network], chain.bounds[network]
    answers = sum(count for block, count in seen.exits.items() if first <= block < end)
    reached = sum(count for block, count in seen.exits.items() if block >= first)
    total = sum(seen.exits.values())
    crossings, words = seen.crossings.get(first, 0), seen.words.get(first, 0)
    return {
        "name": chain.names[network],
        "first": first,
        "end": end,
        "used": is_used,
        "answers": answers,
        "share": answers / total if total else None,
        "returned": answers / reached if reached and is_used else None,
        "crossings_per_s": crossings / seen.seconds if seen.seconds else None,
        "crossing_s": seen.crossing_s.get(first, 0.0) / crossings if crossings else None,
        "pruned_words": seen.pruned_words.get(first, 0) / words if words else None,
    }
