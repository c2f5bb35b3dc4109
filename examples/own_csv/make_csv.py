"""Writes a small CSV of invented requests with labels, as an example of your own file.

python examples/own_csv/make_csv.py runs/mine.csv
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import offramp
from earlyexit.data.rows import read_labelled, write_labelled


def main(path: Path, rows_per_label: int = 120, num_labels: int = 12) -> None:
    """Writes rows of every label, in random order, to the columns text and label."""
    texts = read_labelled(Path(offramp.__file__).with_name("demo") / "texts.csv")
    rows_of = {label: [row for row, each in enumerate(texts.labels) if each == label] for label in texts.label_names}
    kept = sorted(row for label in texts.label_names[:num_labels] for row in rows_of[label][:rows_per_label])
    random.Random(0).shuffle(kept)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_labelled(texts.select(kept), path.parent, path.stem)
    print(f"{len(kept)} rows, {num_labels} labels: {path}")  # noqa: T201 - it is a command


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:3]))
