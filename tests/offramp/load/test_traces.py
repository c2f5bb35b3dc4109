from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from offramp.load.arrivals import gaps, in_gaps, read_counts, read_trace
from offramp.load.processes import CountReplay, StampReplay
from tests.data import data_folder

FUNCTIONS = "HashFunction,HashApp,minute_1,minute_2\n"
LLM = "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8", newline="")
    return path


def counts(folder: Path, text: str) -> tuple[list[float], float]:
    trace = read_trace(write(folder, text))
    assert isinstance(trace, CountReplay)
    return trace.counts_B.tolist(), trace.bin_s


def seconds(folder: Path, text: str) -> list[float]:
    trace = read_trace(write(folder, text))
    assert isinstance(trace, StampReplay)
    return list(trace.arrivals_s_N)


def real(name: str) -> Path:
    folder = data_folder()
    if folder is None or not (folder / "traces" / name).is_file():
        pytest.skip(f"traces/{name} is not in OFFRAMP_DATA")
    return folder / "traces" / name


@pytest.mark.parametrize("text", ["3 0 12 1", "3\n0\n12\n1\n", "\ufeff3 0\n\n 12\t1 \n", "3.0 0 12 1"])
def test_whole_numbers_are_requests_per_second(tmp_path: Path, text: str) -> None:
    assert counts(tmp_path, text) == ([3.0, 0.0, 12.0, 1.0], 1.0)


def test_one_number_with_a_point_makes_all_seconds_unless_the_caller_says(tmp_path: Path) -> None:
    assert seconds(tmp_path, "0.25\n1\n1\n\n3e0\n") == [0.25, 1.0, 1.0, 3.0]
    path = write(tmp_path, "0\n3\n12\n")
    timed, counted = read_trace(path, "times"), read_trace(path, "counts")
    assert isinstance(timed, StampReplay)
    assert isinstance(counted, CountReplay)
    assert timed.arrivals_s_N.tolist() == counted.counts_B.tolist() == [0.0, 3.0, 12.0]
    path = tmp_path / "no_ending"
    path.write_bytes(gzip.compress(b"1 2 3"))
    assert read_counts(path).counts_B.tolist() == [1.0, 2.0, 3.0]


def test_functions_are_added_by_the_minute_and_stamps_become_seconds_since_the_first(tmp_path: Path) -> None:
    assert counts(tmp_path, FUNCTIONS + "f,a,60,0\n\ng,a,1,2\n") == ([61.0, 2.0], 60.0)
    assert counts(tmp_path, "HashFunction,1,2\nf,60,0\n") == ([60.0, 0.0], 60.0)  # the columns as first published
    rows = "2023-11-16 23:59:59.5000000,4808,10\r\n2023-11-17 00:00:00.7500001,1,8\r\n2023-11-17 00:01:00,1,1"
    assert seconds(tmp_path, LLM + rows) == [0.0, 1.25, 60.5]  # to the microsecond
    assert seconds(tmp_path, "TIMESTAMP\n2024-05-10 00:00:00+00:00\n2024-05-10 00:00:01+00:00") == [0.0, 1.0]


def test_sixty_zeros_are_a_gap_and_fifty_nine_are_quiet() -> None:
    per_second_S = np.ones(300)
    per_second_S[:60] = 0
    per_second_S[100:159] = 0
    per_second_S[230:] = 0
    assert gaps(per_second_S).tolist() == [[0, 60], [230, 300]]
    assert np.flatnonzero(~in_gaps(per_second_S)).tolist() == list(range(60, 230))
    assert gaps(np.ones(3)).tolist() == []


def test_the_twitter_trace_is_the_one_described() -> None:
    per_second_S = read_counts(real("twitter_per_second_infadapter.txt.gz")).counts_B
    found = gaps(per_second_S)
    assert (len(per_second_S), len(found)) == (1_899_061, 22)
    assert found[0].tolist() == [84_661, 86_400]
    assert (per_second_S.mean(), per_second_S.max()) == (pytest.approx(63.6, abs=0.05), 388)
    assert per_second_S[1_436_400:1_440_000].mean() == pytest.approx(59.9, abs=0.05)
