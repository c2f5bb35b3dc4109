"""What comparisons found, as Markdown: `python -m experiments.peers.table` prints every result in runs/peers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from statistics import median
from typing import Any

from experiments.peers.workloads import FOLDER

OURS = ("offramp", "early-exit", "stock")
MIB = 2**20
SIDES = (
    "side",
    "goodput, inputs/s",
    "(range)",
    "x best peer",
    "x own early-exit",
    "of compute limit",
    "p50 / p99 at light load, ms",
    "MiB",
    "accuracy",
    "as recorded",
)


def main() -> None:
    """Print every result."""
    paths = sorted(FOLDER.glob("*.json"))
    if not paths:
        raise SystemExit(f"{FOLDER} holds no result yet: python -m experiments.peers bert-base makes one")
    for path in paths:
        print(render(json.loads(path.read_text(encoding="utf-8"))) + "\n")


def render(result: Mapping[str, Any]) -> str:
    """One comparison: a table of the sides, and where the processor time went."""
    return "\n".join([*_head(result), "", *_sides(result), "", *_costs(result)])


def best_peer(result: Mapping[str, Any]) -> str:
    """The peer with the highest median goodput."""
    goodput: Mapping[str, Mapping[str, float] | None] = result["goodput"]["goodput_per_s"]
    return max((side for side in goodput if side not in OURS), key=lambda side: _median(goodput[side]))


def ratio(result: Mapping[str, Any], side: str, to: str) -> float | None:
    """Median over rounds of one side's goodput by another's."""
    reached = {(each["round_index"], each["side"]): each["goodput_per_s"] for each in result["goodput"]["rounds"]}
    pairs = [(value, reached.get((index, to))) for (index, name), value in reached.items() if name == side]
    ratios = [own / other for own, other in pairs if own and other]
    return median(ratios) if ratios else None


def _head(result: Mapping[str, Any]) -> Iterator[str]:
    machine, inputs = result["machine"], result["inputs_per_request"]
    requests = "one text a request" if inputs == 1 else f"{inputs} texts a request"
    rounds = 1 + max((each["round_index"] for each in result["goodput"]["rounds"]), default=0)
    yield f"**{result['workload']}, {result['dtype']}, {requests}**"
    yield ""
    yield (
        f"{machine['workers']} processes of {machine['threads']} thread, batches up to {machine['batch_limit']}; "
        f"one text alone takes {result['stock_s'] * 1e3:.1f} ms, SLO {result['slo_s'] * 1e3:.0f} ms; "
        f"medians of {rounds} rounds, commit {str(result['provenance'].get('commit'))[:7]}."
    )


def _sides(result: Mapping[str, Any]) -> Iterator[str]:
    peer, inputs = best_peer(result), result["inputs_per_request"]
    yield _row(SIDES)
    yield f"|{'---|' * len(SIDES)}"
    for side, spread in result["goodput"]["goodput_per_s"].items():
        limit, answered = result["limit_per_s"].get(side), result.get("answers", {}).get(side, {})
        latency = result.get("light_load", {}).get("latency", {}).get(side, {})
        light = [each and each["median"] * 1e3 for each in map(latency.get, ("p50_s", "p99_s"))]
        held, per_s = result["memory_bytes"].get(side), _median(spread) * inputs
        yield _row(
            (
                f"**{side}**" if side == "offramp" else side,
                _told(per_s, ".0f"),
                "-" if spread is None else f"{spread['low'] * inputs:.0f}-{spread['high'] * inputs:.0f}",
                _told(ratio(result, side, peer), ".2f"),
                _told(ratio(result, side, "early-exit"), ".2f"),
                _told(None if limit is None or spread is None else per_s / limit, ".1%", ""),
                " / ".join(_told(each, ".1f") for each in light),
                _told(held and held / MIB, ".0f", ""),
                _told(answered.get("accuracy"), ".1%", ""),
                _told(answered.get("as_recorded"), ".1%", ""),
            )
        )


def _costs(result: Mapping[str, Any]) -> Iterator[str]:
    costs = dict(result.get("costs", {}))
    steps = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in costs.pop("steps_s", {}).items())
    parts = sorted({part for of_side in costs.values() for part in of_side})
    yield _row(("processor time per input, us", *parts))
    yield f"|---|{'---|' * len(parts)}"
    for side, of_side in costs.items():
        yield _row((side, *(_told(of_side.get(part, 0.0) * 1e6 or None, ".0f", "") for part in parts)))
    yield ""
    yield f"Of the ingress, each step alone, us per request: {steps}."


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _told(value: float | None, form: str, nothing: str = "-") -> str:
    return nothing if value is None else format(value, form)


def _median(spread: Mapping[str, float] | None) -> float:
    return 0.0 if spread is None else spread["median"]


if __name__ == "__main__":
    main()
