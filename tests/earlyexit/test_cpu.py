from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from earlyexit.engine.cpu import ISA, WINDOW_S, Contention, avoid_hidden_tiles

CPUINFO = """processor\t: 0
cpuid level\t: {level}
flags\t\t: fpu avx512f{flags}

processor\t: 1
cpuid level\t: 99
flags\t\t: none
"""


@pytest.mark.parametrize(
    ("level", "flags", "given", "environ"),
    [
        pytest.param("28", " amx_bf16 amx_tile", {}, {ISA: "AVX10_1_512"}, id="AMX without the leaf of its tiles"),
        pytest.param("29", " amx_bf16 amx_tile", {}, {}, id="AMX with it"),
        pytest.param("28", "", {}, {}, id="no AMX"),
        pytest.param("", " amx_tile", {}, {}, id="no level told"),
        pytest.param("28", " amx_tile", {ISA: "DEFAULT"}, {ISA: "DEFAULT"}, id="the user decided"),
    ],
)
def test_onednn_is_kept_from_tiles_whose_size_the_machine_hides(
    level: str, flags: str, given: dict[str, str], environ: dict[str, str], tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(CPUINFO.format(level=level, flags=flags), encoding="utf-8")
    avoid_hidden_tiles(given, cpuinfo)
    assert given == environ


def test_a_machine_without_cpuinfo_is_left_alone(tmp_path: Path) -> None:
    environ: dict[str, str] = {}
    avoid_hidden_tiles(environ, tmp_path / "missing")
    assert environ == {}


def test_a_thread_waited_for_processors_as_the_last_window_that_ended_says(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    contention = Contention(schedstat)

    def share(now_s: float, line: str) -> float:
        schedstat.write_text(f"{line} 7\n", encoding="ascii")
        return contention.share(now_s)

    # Nanoseconds run, nanoseconds waited, times it was run.
    assert share(10.0, "4000 9000") == 0.0, "of the thread's whole life says nothing"
    assert share(10.0 + WINDOW_S / 2, "4000 9900") == 0.0
    assert share(10.0 + WINDOW_S, "4300 9100") == pytest.approx(0.25)
    assert share(10.1 + WINDOW_S, "4300 9900") == pytest.approx(0.25)
    assert share(10.0 + 2 * WINDOW_S, "4800 9100") == 0.0
    assert share(10.0 + 3 * WINDOW_S, "4800 9100") == 0.0, "it wanted none"


def test_every_thread_is_compared_with_itself(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    contention = Contention(schedstat)

    def share(now_s: float, line: str) -> float:
        schedstat.write_text(f"{line} 7\n", encoding="ascii")
        return contention.share(now_s)

    assert share(10.0, "1000 1000") == 0.0
    with ThreadPoolExecutor(1) as other:
        assert other.submit(share, 10.0 + WINDOW_S, "50 900").result() == 0.0
        assert other.submit(share, 10.0 + 2 * WINDOW_S, "100 950").result() == pytest.approx(0.5)
    assert share(10.0 + 3 * WINDOW_S, "1800 1200") == pytest.approx(0.2)


def test_where_the_system_does_not_tell_nobody_waits_for_processors(tmp_path: Path) -> None:
    assert Contention(tmp_path / "missing").share(1.0) == 0.0
