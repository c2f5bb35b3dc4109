"""What comparisons found, as Markdown: `python -m experiments.peers.table` prints every result in runs/peers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from experiments.peers.workloads import FOLDER

OURS = ("offramp", "early-exit", "stock")
MIB = 2**20


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
    peer = best_peer(result)
    yield (
        "| side | goodput, inputs/s | (range) | x best peer | x own early-exit | of compute limit "
        "| p50 / p99 at light load, ms | MiB | accuracy | as recorded |"
    )
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for side, spread in result["goodput"]["goodput_per_s"].items():
        inputs = result["inputs_per_request"]
        cells = [
            f"**{side}**" if side == "offramp" else side,
            _number(_median(spread) * inputs),
            "-" if spread is None else f"{spread['low'] * inputs:.0f}-{spread['high'] * inputs:.0f}",
            _times(ratio(result, side, peer)),
            _times(ratio(result, side, "early-exit")),
            _percent(_of_limit(result, side)),
            _light(result, side),
            _memory(result, side),
            _percent(_answered(result, side, "accuracy")),
            _percent(_answered(result, side, "as_recorded")),
        ]
        yield f"| {' | '.join(cells)} |"


def _costs(result: Mapping[str, Any]) -> Iterator[str]:
    costs = result.get("costs", {})
    parts = sorted({part for side, of_side in costs.items() if side != "steps_s" for part in of_side})
    yield f"| processor time per input, us | {' | '.join(parts)} |"
    yield f"|---|{'---|' * len(parts)}"
    for side, of_side in costs.items():
        if side != "steps_s":
            cells = [f"{of_side[part] * 1e6:.0f}" if part in of_side else "" for part in parts]
            yield f"| {side} | {' | '.join(cells)} |"
    steps = ", ".join(f"{name} {seconds * 1e6:.0f}" for name, seconds in costs.get("steps_s", {}).items())
    yield ""
    yield f"Of the ingress, each step alone, us per request: {steps}."


def _of_limit(result: Mapping[str, Any], side: str) -> float | None:
    limit = result["limit_per_s"].get(side)
    spread = result["goodput"]["goodput_per_s"].get(side)
    return None if limit is None or spread is None else spread["median"] * result["inputs_per_request"] / limit


def _light(result: Mapping[str, Any], side: str) -> str:
    latency = result.get("light_load", {}).get("latency", {}).get(side, {})
    found = [latency.get(name) for name in ("p50_s", "p99_s")]
    return " / ".join("-" if each is None else f"{each['median'] * 1e3:.1f}" for each in found)


def _memory(result: Mapping[str, Any], side: str) -> str:
    held = result["memory_bytes"].get(side)
    return "" if held is None else f"{held / MIB:.0f}"


def _answered(result: Mapping[str, Any], side: str, name: str) -> float | None:
    share = result.get("answers", {}).get(side, {}).get(name)
    return None if share is None else float(share)


def _median(spread: Mapping[str, float] | None) -> float:
    return 0.0 if spread is None else spread["median"]


def _number(value: float) -> str:
    return f"{value:.0f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    main()
