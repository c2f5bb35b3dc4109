"""Writes a small CSV of made-up requests with their labels, to stand where your own file goes.

python examples/own_csv/make_csv.py runs/mine.csv
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from earlyexit.data.rows import write_labelled
from offramp.demo.texts import generate


def main(path: Path, rows_per_label: int = 120, num_labels: int = 12) -> None:
    """The columns text and label, in no order, as a file from real life might be."""
    texts = generate(per_intent=rows_per_label)
    labels = texts.label_names[:num_labels]
    kept = [row for row, label in enumerate(texts.labels) if label in labels]
    random.Random(0).shuffle(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_labelled(texts.select(kept), path.parent, path.stem)
    print(f"{len(kept)} rows, {len(labels)} labels: {path}")  # noqa: T201 - it is a command


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
