"""Refusals of the load generator, one case per rule; `python -m tests.refusals offramp.load` writes `refusals.txt`."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from offramp.commands.predict import InputRow, stream_inputs
from offramp.load.arrivals import parse_arrivals, read_trace
from tests.offramp.load.scripted_server import draw
from tests.offramp.load.test_replay import FUNCTIONS
from tests.refusals import Case, FileCase, Refusals

NAN, INF = float("nan"), float("inf")
GOLDEN = yaml.safe_load(Path(__file__).with_name("refusals.yaml").read_text(encoding="utf-8"))
CASES: dict[str, Case] = {
    **{f"arrivals: {name}": partial(parse_arrivals, spec) for name, spec in GOLDEN["arrivals"].items()},
    **{name: partial(draw, *given) for name, given in GOLDEN["draws"].items()},
}


def arriving(spec: str, duration_s: float | None = None) -> Callable[[Path], object]:
    """Parses the arrivals of a file, and draws them if a duration is given."""

    def read(path: Path) -> object:
        given = spec.format(path)
        return parse_arrivals(given) if duration_s is None else draw(given, duration_s)

    return read


def texts(path: Path) -> list[InputRow]:
    return list(stream_inputs(path, {"text": "text"}))


def npz(**rows: list[int]) -> bytes:
    file = io.BytesIO()
    arrays: dict[str, Any] = {name: np.array(values) for name, values in rows.items()}
    np.savez(file, **arrays)
    return file.getvalue()


FILES: dict[str, FileCase] = {
    **{name: (arriving(*given), "t", text) for name, (text, *given) in GOLDEN["replays"].items()},
    **{name: (read_trace, "trace", content) for name, content in GOLDEN["traces"].items()},
    "file: not UTF-8": (read_trace, "trace", b"1\n\xff"),
    "file: damaged gzip": (read_trace, "trace", gzip.compress(b"1 2 3", mtime=0)[:-4]),
    "file: a folder": (lambda path: read_trace(path.parent), "t", None),
    "file: seconds for counts": (lambda path: read_trace(path, "counts"), "t", "0.5\n1.5"),
    "file: minutes for times": (lambda path: read_trace(path, "times"), "t", FUNCTIONS + "f,a,60,0\n"),
    **{name: (texts, *given) for name, given in GOLDEN["texts"].items()},
    "texts: csv, not UTF-8": (texts, "t.csv", b"text\na\n\xff\n"),
    "texts: txt, not UTF-8": (texts, "t.txt", b"a\n\xff\n"),
    "arrays: of unequal lengths": (lambda path: list(stream_inputs(path, {"a": "a"})), "x.npz", npz(a=[1], b=[1, 2])),
    "arrays: of other names": (lambda path: list(stream_inputs(path, {"a": "a"})), "x.npz", npz(b=[1])),
    "arrays: a part": (lambda path: list(stream_inputs(path, {"a": "a"}, part="train")), "x.npz", npz(a=[1])),
    "texts: pairs in lines": (lambda path: list(stream_inputs(path, {"a": "a", "b": "b"})), "t.txt", ""),
}
REFUSALS = Refusals(module=Path(__file__), name=__name__, cases=CASES, files=FILES)
test_what_is_refused_is_told_in_the_recorded_words, test_no_other_case_is_recorded = REFUSALS.tests()
