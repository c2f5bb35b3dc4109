"""Prints every comparison in runs/peers as Markdown: `python -m experiments.peers.table`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from experiments.kit import Spread, spread
from experiments.peers.compare import OURS, SERVICE
from experiments.peers.processes import PARTS, REST
from experiments.peers.sides import sustained
from experiments.peers.workloads import FOLDER

MIB = 2**20
COLUMNS = (
    "side",
    "CPU ms per answer",
    "x best peer",
    "the same at light load",
    "sustained, requests/s",
    "x best peer",
    "x early-exit",
    "of the plan's rate",
    "p50 / p99 ms at light load",
    "MiB",
    "cores when idle",
    "accuracy",
)
OF_US = (*(name for _, name in PARTS), REST)
Of = Callable[[Mapping[str, Any]], float | None]
"""A function that returns a figure of a side's turn."""


def main() -> None:
    """Prints every result."""
    paths = sorted(FOLDER.glob("*.json"))
    if not paths:
        raise SystemExit(f"{FOLDER} holds no result yet; run python -m experiments.peers clinc150")
    for path in paths:
        print(render(json.loads(path.read_text(encoding="utf-8"))) + "\n")


def render(result: Mapping[str, Any]) -> str:
    """Returns one comparison as Markdown: a table of the sides, and the processor time of Offramp's parts."""
    return "\n".join([*_head(result), "", *_sides(result), "", *_parts(result)])


def spent_s(turn: Mapping[str, Any], load: str = "heavy") -> float | None:
    """Returns processor seconds per answer at the heavy or the light rate."""
    return sum(turn[load]["cpu_s"].values()) if turn[load]["num_answered"] else None


def best_peer(result: Mapping[str, Any], of: Of, *, least: bool = False) -> str | None:
    """Returns the peer with the highest median, or with the least; None without peers."""
    found = {side: spread(_each(result, side, of).values()) for side in _names(result) if side not in OURS}
    known = {side: each.median for side, each in found.items() if each is not None}
    return (min if least else max)(known, key=lambda side: known[side], default=None)


def ratio(result: Mapping[str, Any], side: str, to: str | None, of: Of) -> Spread | None:
    """Returns the ratio of one side's figure to another's, over the rounds."""
    own, other = _each(result, side, of), {} if to is None else _each(result, to, of)
    return spread(value / other[index] for index, value in own.items() if index in other)


def _each(result: Mapping[str, Any], side: str, of: Of) -> dict[int, float]:
    """Returns a side's figure by round, for the rounds that have it."""
    turns = {index: each["sides"][side] for index, each in enumerate(result["rounds"]) if side in each["sides"]}
    return {index: value for index, turn in turns.items() if (value := of(turn)) is not None}


def _names(result: Mapping[str, Any]) -> list[str]:
    found = dict.fromkeys(side for each in result["rounds"] for side in each["sides"])
    return [*(side for side in OURS if side in found), *(side for side in found if side not in OURS)]


def _head(result: Mapping[str, Any]) -> Iterator[str]:
    machine, inputs = result["machine"], result["inputs_per_request"]
    requests = "one text a request" if inputs == 1 else f"{inputs} texts a request"
    turn = next(iter(result["rounds"][0]["sides"].values()))
    rates = [turn[load]["num_counted"] / turn[load]["duration_s"] for load in ("light", "heavy")]
    yield f"**{result['workload']}, {result['dtype']}, {requests}**"
    yield ""
    yield (
        f"{machine['workers']} processes of {machine['threads']} thread, batches up to {machine['batch_limit']}; "
        f"one text alone takes {result['stock_s'] * 1e3:.1f} ms, SLO {result['slo_s'] * 1e3:.0f} ms; light load is "
        f"{rates[0]:.0f} requests/s, processor time is that of {rates[1]:.0f}/s; medians of {len(result['rounds'])} "
        f"rounds, commit {str(result['provenance'].get('commit'))[:7]}."
    )


def _sides(result: Mapping[str, Any]) -> Iterator[str]:
    cheapest, fastest = best_peer(result, spent_s, least=True), best_peer(result, sustained)
    yield _row(COLUMNS)
    yield f"|{'---|' * len(COLUMNS)}"
    for side in _names(result):
        limit, own = result["predicted_per_s"].get(side), spread(_each(result, side, sustained).values())
        server = SERVICE if side in OURS else side
        held = [each["servers"][server] for each in result["rounds"] if server in each["servers"]]
        reached = own and limit and own.median * result["inputs_per_request"] / limit
        yield _row(
            (
                f"**{side}**" if side == SERVICE else side,
                _range(spread(_each(result, side, spent_s).values()), 1e3, ".2f"),
                _range(ratio(result, side, cheapest, spent_s), 1, ".2f"),
                _range(spread(_each(result, side, partial(spent_s, load="light")).values()), 1e3, ".2f"),
                _range(own, 1, ".0f"),
                _range(ratio(result, side, fastest, sustained), 1, ".2f"),
                _range(ratio(result, side, "early-exit", sustained), 1, ".2f"),
                _median(reached, ".0%"),
                " / ".join(_median(_median_of(result, side, _light(name)), ".1f", 1e3) for name in ("p50_s", "p99_s")),
                _median(spread(each["memory_bytes"] for each in held), ".0f", 1 / MIB),
                _median(spread(each["idle_cores"] for each in held), ".2f"),
                _median(_median_of(result, side, lambda turn: turn["answers"]["accuracy"]), ".1%"),
            )
        )


def _parts(result: Mapping[str, Any]) -> Iterator[str]:
    yield _row(("CPU ms per answer", *OF_US))
    yield f"|{'---|' * (1 + len(OF_US))}"
    for side in (side for side in _names(result) if side in OURS):
        medians = [_median_of(result, side, _part(part)) for part in OF_US]
        yield _row((side, *(_median(each, ".2f", 1e3) for each in medians)))


def _part(part: str) -> Of:
    return lambda turn: turn["heavy"]["cpu_s"].get(part, 0.0)


def _light(name: str) -> Of:
    return lambda turn: turn["light"][name]


def _median_of(result: Mapping[str, Any], side: str, of: Of) -> Spread | None:
    return spread(_each(result, side, of).values())


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _median(value: Spread | float | None, form: str, times: float = 1.0) -> str:
    """Formats a median, or nothing."""
    if value is None:
        return ""
    return format((value.median if isinstance(value, Spread) else value) * times, form)


def _range(value: Spread | None, times: float, form: str) -> str:
    """Formats a median, with its range if there were several rounds."""
    if value is None:
        return ""
    median, low, high = (format(each * times, form) for each in value)
    return median if low == high else f"{median} ({low} to {high})"


if __name__ == "__main__":
    main()
