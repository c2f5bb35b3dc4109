"""Versions, and two of them side by side, as tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table


def index_table(rows: Sequence[Mapping[str, str]]) -> Table:
    """The repository index."""
    table = Table("model", "version", "state", "reason")
    for row in rows:
        table.add_row(row["name"], row["version"], row["state"], row["reason"])
    return table


def side_by_side_table(seen: Mapping[str, Any]) -> Table:
    """Default and canary in two columns."""
    names = list(seen["versions"])
    canary = seen["canary"]
    title = f"{seen['model']}: version {seen['default']}"
    if canary is not None:
        title += f", and {canary['version']} for {canary['share']:.1%} of the requests"
    table = Table("", *(f"version {name}" for name in names), title=title, caption=_compared(seen["compared"]))
    sides = [seen["versions"][name] for name in names]
    table.add_row("requests", *(str(side["requests"]) for side in sides))
    table.add_row("errors", *(_counts(side["errors"]) for side in sides))
    table.add_row("p50", *(_ms(side["p50_s"]) for side in sides))
    table.add_row("p99", *(_ms(side["p99_s"]) for side in sides))
    table.add_row("left after block", *(_counts(side["exits"]) for side in sides))
    table.add_row("agreement with its full model", *(_percent(side["agreement"]) for side in sides))
    return table


def _compared(compared: Mapping[str, Any]) -> str | None:
    if compared["agreement"] is None:
        return None
    return f"asked the same {compared['inputs']} inputs, they agree on {compared['agreement']:.2%}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name}: {count}" for name, count in counts.items()) or "-"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.2%}"
