"""What a file of exit records holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from earlyexit.source_file import StrictDocument
from profiles.scores import Score

SCHEMA = 2
_SHARED = {"sample_ids": "U", "scores": "f", "times_s": "f", "tokens": "iu", "sequences": "iu"}
KINDS = {
    2: {
        **_SHARED,
        "losses": "f",
        "answers": "iufbU",
        "true_losses": "f",
        "tallies": "iu",
        "end_losses": "f",
        "end_true_losses": "f",
    },
    1: {**_SHARED, "labels": "iu", "final_labels": "iu", "true_labels": "iu"},
}
"""By schema, the arrays of a file and what numpy calls their kinds: text, fractions, whole numbers."""
OPTIONAL = (
    *("answers", "true_losses", "true_labels", "tallies"),
    *("times_s", "tokens", "sequences", "end_losses", "end_true_losses"),
)


class RecordsHeader(StrictDocument):
    """What a file holds of exit records but their arrays."""

    schema_version: Literal[1, 2]
    score: Score
    zero_one: bool = True
    num_blocks: int = Field(ge=1)
    ramps: list[int]
    confidences: dict[Annotated[int, Field(strict=False)], float] | None = None
    provenance: dict[str, Any]
