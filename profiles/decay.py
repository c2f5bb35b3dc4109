"""Exit records of tokens whose scores are of thresholds that fall along an answer (`earlyexit.policies.threshold`)."""

from __future__ import annotations

from earlyexit.errors import DataError
from profiles.records import ExitRecords

DECAY = "decay"
"""In the provenance of such records."""


def decay_of(records: ExitRecords) -> float | None:
    """By which their scores were made comparable over places; None: scores are as ramps gave them."""
    found = (records.provenance or {}).get(DECAY)
    return None if found is None else float(found)


def check_decay_of(records: ExitRecords, decay: float | None, name: str) -> None:
    """Raise DataError for records of another decay than a policy's, or a calibration's."""
    held = decay_of(records)
    if held != decay:
        raise DataError(f"{name} holds scores of {_said(held)}, not of {_said(decay)}")


def _said(decay: float | None) -> str:
    return "no decay" if decay is None else f"decay {decay:g}"
