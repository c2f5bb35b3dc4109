"""Whether what was answered is right: against true labels, and against what the exits are known to say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from earlyexit.store import read_card
from experiments.peers.workloads import Workload


def check_answers(workload: Workload, drawn: Sequence[int], answers: Path) -> dict[str, float | None]:
    """Of a client's file of answers to these texts: how many, and the shares that are right.

    `accuracy` is against true labels, `as_recorded` against the recorded label and exit; None where there are none.
    """
    rows = [json.loads(line) for line in answers.read_text(encoding="utf-8").splitlines()]
    pairs = [(drawn[row["input"]], (row["label"], row["exit"])) for row in rows]
    labels, expected = workload.labels, _recorded(workload)
    return {
        "num_inputs": len(pairs),
        "accuracy": _share([answer[0] == labels[index] for index, answer in pairs] if labels else []),
        "as_recorded": _share([answer == expected[index] for index, answer in pairs] if expected else []),
    }


def _recorded(workload: Workload) -> list[tuple[str, int]]:
    """Label and exit of each text; none where exits are computed."""
    if workload.keys is None:
        return []
    names = read_card(workload.folder).label_names
    outcome = workload.records.outcome(workload.thresholds)
    assert outcome.answers_N is not None
    recorded = zip(outcome.answers_N.tolist(), outcome.exits_N.tolist(), strict=True)
    return [(names[label], exit_block) for label, exit_block in recorded]


def _share(rights: Sequence[bool]) -> float | None:
    return sum(rights) / len(rights) if rights else None
