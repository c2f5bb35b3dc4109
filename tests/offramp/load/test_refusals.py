"""What loads refuse, one case per rule; `python -m tests.offramp.load.test_refusals` writes `refusals.txt` anew."""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offramp.load.arrivals import parse_arrivals, read_counts, read_trace
from offramp.load.data_stream import stream_inputs, stream_texts
from offramp.load.processes import CountReplay, StampReplay
from offramp.load.sustained import Bounds, Search, Sustaining
from tests.offramp.load.drawn import draw
from tests.offramp.load.test_load import config_of
from tests.offramp.load.test_traces import FUNCTIONS, LLM
from tests.refusals import Case, FileCase, Refusals

NAN, INF = float("nan"), float("inf")
BOUNDS = Bounds(low_per_s=1.0, high_per_s=2.0)
SPECS = {
    "process": "posson:9",
    "nothing": "",
    "no rate": "poisson",
    "a word as a rate": "poisson:fast",
    "rate 0": "poisson:0",
    "negative rate": "poisson:-5",
    "a rate that is no number": "uniform:nan",
    "infinite rate": "uniform:inf",
    "key of another process": "poisson:5,cv=2",
    "two rates": "poisson:5,2",
    "no cv": "gamma:5",
    "cv 0": "gamma:5,cv=0",
    "cv too high": "gamma:5,cv=1000",
    "cv twice": "gamma:5,cv=1,cv=2",
    "no length of bursts": "mmpp:5,peak=9,calm_s=1",
    "calm below 0": "mmpp:1000,peak=12000,calm_s=10,burst_s=1",
    "peak below the mean": "mmpp:1000,peak=900,calm_s=10,burst_s=1",
    "no file": "trace:",
    "absent file": "trace:gone.txt",
}
CASES: dict[str, Case] = {
    **{f"arrivals: {name}": partial(parse_arrivals, spec) for name, spec in SPECS.items()},
    **{f"duration: {duration_s}": partial(draw, "poisson:5", duration_s) for duration_s in (0.0, -1.0, NAN, INF)},
    "draw: poisson, too many": lambda: draw("poisson:3e6", 100.0),
    "draw: uniform, too many": lambda: draw("uniform:3e6", 100.0),
    "draw: gamma, too many": lambda: draw("gamma:3e6,cv=2", 100.0),
    "draw: mmpp, too many": lambda: draw("mmpp:3e6,peak=4e6,calm_s=10,burst_s=1", 100.0),
    "draw: too many changes of state": lambda: draw("mmpp:1,peak=2,calm_s=1e-9,burst_s=1e-9", 100.0),
    "trace: counts of 0": lambda: CountReplay(counts_B=np.zeros(3), bin_s=1.0),
    "trace: seconds out of order": lambda: StampReplay(arrivals_s_N=np.array([0.0, 2.0, 1.0])),
    "load: no loop": lambda: config_of(rate_rps=None),
    "load: two loops": lambda: config_of(rate_rps=1.0, concurrency=1),
    "load: a rate and times": lambda: config_of(rate_rps=1.0, send_times_s=[1.0, 2.0, 3.0]),
    "load: few times": lambda: config_of(rate_rps=None, send_times_s=[1.0, 2.0]),
    "load: all at once": lambda: config_of(rate_rps=None, send_times_s=[0.0, 0.0, 0.0]),
    "load: no inputs": lambda: config_of(inputs=[]),
    "load: few labels": lambda: config_of(labels=["a"]),
    "load: few keys": lambda: config_of(keys=["k"]),
    "search: low above high": lambda: Bounds(low_per_s=2.0, high_per_s=1.0),
    "search: no resolution": lambda: Bounds(low_per_s=1.0, high_per_s=2.0, resolution=0.0),
    "search: no probes": lambda: Bounds(low_per_s=1.0, high_per_s=2.0, most_probes=0),
    "search: no SLO": lambda: Sustaining(slo_s=0.0),
    "search: no growth": lambda: Search(start_per_s=1.0, bounds=BOUNDS, growth=1.0),
    "search: starts at 0": lambda: Search(start_per_s=0.0, bounds=BOUNDS),
}


def arriving(process: str, options: str = "", duration_s: float | None = None) -> Callable[[Path], object]:
    """Parses arrivals of a file, and draws them where a duration is given."""

    def read(path: Path) -> object:
        spec = f"{process}:{path}{options}"
        return parse_arrivals(spec) if duration_s is None else draw(spec, duration_s)

    return read


def of_options(files: Mapping[str, tuple[str, str]]) -> dict[str, FileCase]:
    """Traces with options, by the trace and the options."""
    return {f"replay: {name}": (arriving("trace", options), "t", text) for name, (text, options) in files.items()}


def of_traces(files: Mapping[str, str | bytes | None]) -> dict[str, FileCase]:
    return {f"file: {name}": (read_trace, "trace", content) for name, content in files.items()}


def of_texts(files: Mapping[str, tuple[str, bytes | None]]) -> dict[str, FileCase]:
    return {
        f"texts: {case}": (lambda path: list(stream_texts(path, ["text"])), name, content)
        for case, (name, content) in files.items()
    }


def npz(**rows: list[int]) -> bytes:
    file = io.BytesIO()
    arrays: dict[str, Any] = {name: np.array(values) for name, values in rows.items()}
    np.savez(file, **arrays)
    return file.getvalue()


STAMPS = "2023-11-16 18:00:02,1,1\n2023-11-16 18:00:0"
FILES: dict[str, FileCase] = {
    **of_options(
        {
            "rate 0": ("1 2", ",rate=0"),
            "from before 0": ("1 2", ",from=-1"),
            "from no second": ("1 2", ",from=nan"),
            "from beyond counts": ("1 2", ",from=2"),
            "from beyond seconds": ("0.5\n1.5", ",from=1.6"),
            "from a gap at the end": ("1 2 3" + " 0" * 60, ",from=30"),
            "unknown key": ("1 2", ",to=2"),
            "unit of a trace": ("1 2", ",unit=ms"),
            "gaps": ("1 2", ",gaps=1"),
            "gaps of seconds": ("0.5\n1.5", ",gaps=keep"),
            "gaps of minutes": ("f,minute_1\na,3", ",gaps=cut"),
            "dates": ("1700000000.0\n1700000001.5\n", ""),
        }
    ),
    "replay: unknown unit": (arriving("times", ",unit=m"), "t", "0\n1000\n"),
    "replay: too many of counts": (arriving("trace", duration_s=1e9), "t", "2 4"),
    "replay: too many of scaled counts": (arriving("trace", ",rate=3e8", 1.0), "t", "2 4"),
    "replay: too many of seconds": (arriving("trace", duration_s=1e9), "t", "0.5\n1.5"),
    "replay: too many of scaled seconds": (arriving("trace", ",rate=3e8", 1.0), "t", "0.5\n1.5"),
    "replay: silent counts": (arriving("trace", duration_s=1.0), "t", "0 5"),
    "replay: silent scaled counts": (arriving("trace", ",rate=9", 1.0), "t", "0 5"),
    "replay: silent seconds": (arriving("trace", duration_s=1.0), "t", "5.0\n6.0"),
    "replay: silent scaled seconds": (arriving("trace", ",rate=0.1", 1.0), "t", "5.0\n6.0"),
    **of_traces(
        {
            "absent": None,
            "not UTF-8": b"1\n\xff",
            "damaged gzip": gzip.compress(b"1 2 3", mtime=0)[:-4],
            "empty": " \n",
            "zeros": "0 0 0",
            "negative count": "3\n4 -1",
            "half a request": "3\n\n4 1.5",
            "a count that is no number": "3 4 nan",
            "a word": "3\nmany",
            "negative second": "0.5\n-0.1",
            "a second that is no number": "0.5\nnan",
            "infinite second": "0.5\n\ninf",
            "seconds out of order": "0.5\n2.5\n2.4",
            "one instant": "0.5\n0.5",
            "other columns": "a,b\n1,2",
            "rows of numbers": "1,2\n3,4",
            "no function": FUNCTIONS,
            "short row": FUNCTIONS + "f,a,1,2\nf,a,1",
            "negative minute": FUNCTIONS + "f,a,1,-2",
            "a word in a minute": FUNCTIONS + "f,a,1,x",
            "no stamps": LLM,
            "no time": LLM + "noon,1,1",
            "stamps before the first": LLM + STAMPS + "1,1,1",
            "stamps out of order": LLM + STAMPS + "4,1,1\n2023-11-16 18:00:03,1,1",
        }
    ),
    "file: a folder": (lambda path: read_trace(path.parent), "t", None),
    "file: seconds for counts": (read_counts, "t", "0.5\n1.5"),
    "file: minutes for times": (lambda path: read_trace(path, "times"), "t", FUNCTIONS + "f,a,60,0\n"),
    "file: stamps for counts": (read_counts, "t", LLM + STAMPS + "4,1,1"),
    **of_texts(
        {
            "absent": ("t.csv", None),
            "no column": ("t.csv", b"id,body\n1,a\n"),
            "short row": ("t.csv", b"text,label\na,x\nb\n"),
            "a number": ("t.jsonl", b'{"text": "a"}\n{"text": 5}\n'),
            "csv, not UTF-8": ("t.csv", b"text\na\n\xff\n"),
            "not JSON": ("t.jsonl", b'{"text": "a"}\n{"te'),
            "txt, not UTF-8": ("t.txt", b"a\n\xff\n"),
            "ending": ("t.xml", b""),
        }
    ),
    "arrays: of unequal lengths": (lambda path: stream_inputs(path, {"a": "a"}), "x.npz", npz(a=[1], b=[1, 2])),
    "arrays: of other names": (lambda path: stream_inputs(path, {"a": "a"}), "x.npz", npz(b=[1])),
    "texts: pairs in lines": (lambda path: stream_texts(path, ["a", "b"]), "t.txt", ""),
}
REFUSALS = Refusals(module=Path(__file__), name=__name__, cases=CASES, files=FILES)


@pytest.mark.parametrize("case", REFUSALS.names)
def test_what_is_refused_is_told_in_the_recorded_words(case: str, tmp_path: Path) -> None:
    assert REFUSALS.said(case, tmp_path) == REFUSALS.recorded()[case]


def test_no_other_case_is_recorded() -> None:
    REFUSALS.check_recorded()


if __name__ == "__main__":
    REFUSALS.write()
