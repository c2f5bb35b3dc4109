"""What a check says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from offramp.doctor.machine import Machine

Verdict = Literal["ok", "warning", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line of the table."""

    verdict: Verdict
    found: str
    advice: str | None = None
    """What to do; None where nothing needs to be done."""


Check = Callable[[Machine], Iterable[Finding]]


def ok(found: str) -> Finding:
    """Nothing needs to be done."""
    return Finding(verdict="ok", found=found)


def warning(found: str, advice: str) -> Finding:
    """It will run, but not well, or not for all users."""
    return Finding(verdict="warning", found=found, advice=advice)


def failed(found: str, advice: str) -> Finding:
    """It will not run."""
    return Finding(verdict="failed", found=found, advice=advice)


def size(num_bytes: int) -> str:
    """In words."""
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
