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
    avoid_hidden_tiles(given, tmp_path / "missing")
    assert given == environ


def test_a_thread_waited_for_processors_as_its_own_last_window_that_ended_says(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    contention = Contention(schedstat)

    def share(windows: float, line: str) -> float:
        schedstat.write_text(f"{line} 7\n", encoding="ascii")
        return contention.share(10.0 + windows * WINDOW_S)

    assert Contention(tmp_path / "missing").share(1.0) == 0.0
    # Nanoseconds run, nanoseconds waited, times it was run.
    assert share(0, "4000 9000") == 0.0, "of the thread's whole life says nothing"
    assert share(0.5, "4000 9900") == 0.0
    assert share(1, "4300 9100") == pytest.approx(0.25)
    assert share(1.4, "4300 9900") == pytest.approx(0.25)
    assert share(2, "4800 9100") == 0.0
    assert share(3, "4800 9100") == 0.0, "it wanted none"
    with ThreadPoolExecutor(1) as other:
        assert other.submit(share, 3, "50 900").result() == 0.0
        assert other.submit(share, 4, "100 950").result() == pytest.approx(0.5)
