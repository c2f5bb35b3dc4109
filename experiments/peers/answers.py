"""Whether what was answered is right: against true labels, and against what the exits are known to say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from experiments.peers.workloads import Workload


class Checked(BaseModel):
    """Shares of the answers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_inputs: int
    accuracy: float | None
    """Against true labels; None where there are none."""
    as_recorded: float | None
    """Of recorded exits: the recorded label and exit; None where exits are computed."""


def check_answers(workload: Workload, drawn: Sequence[tuple[int, ...]], answers: Path) -> Checked:
    """Of a client's file of answers to these requests."""
    pairs = list(_pairs(drawn, answers))
    right = _share([row["label"] == workload.labels[index] for index, row in pairs] if workload.labels else [])
    expected = _recorded(workload)
    recorded = _share([(row["label"], row.get("exit")) == expected[index] for index, row in pairs] if expected else [])
    return Checked(num_inputs=len(pairs), accuracy=right, as_recorded=recorded)


def _pairs(drawn: Sequence[tuple[int, ...]], answers: Path) -> list[tuple[int, dict[str, Any]]]:
    pairs = []
    with answers.open(encoding="utf-8") as file:
        for line in file:
            answer = json.loads(line)
            pairs += list(zip(drawn[answer["body"]], answer["predictions"], strict=True))
    return pairs


def _recorded(workload: Workload) -> list[tuple[str, int]]:
    from earlyexit.store import read_card

    if workload.keys is None:
        return []
    names = read_card(workload.folder).label_names
    outcome = workload.records.outcome(workload.thresholds)
    assert outcome.answers_N is not None
    return [
        (names[label], exit_block)
        for label, exit_block in zip(outcome.answers_N.tolist(), outcome.exits_N.tolist(), strict=True)
    ]


def _share(rights: Sequence[bool]) -> float | None:
    return sum(rights) / len(rights) if rights else None
