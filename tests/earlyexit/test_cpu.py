from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.cpu import ISA, WINDOW_S, Processors, avoid_hidden_tiles

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


def test_processors_are_as_busy_as_the_last_window_that_ended_says(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    processors = Processors(stat)

    def share(now_s: float, line: str) -> float:
        stat.write_text(f"cpu  {line}\ncpu0 1 1 1 1 1 1 1 1 1 1\n", encoding="ascii")
        return processors.share(now_s)

    # User, nice, system, idle, waiting for disks, interrupts, soft ones, stolen; guests are among users.
    assert share(10.0, "100 0 0 100 0 0 0 0 50 0") == 0.0, "of the machine's whole life says nothing"
    assert share(10.0 + WINDOW_S / 2, "900 0 0 100 0 0 0 0 50 0") == 0.0
    assert share(10.0 + WINDOW_S, "120 3 4 110 10 1 1 1 99 0") == pytest.approx(30 / 50)
    assert share(10.1 + WINDOW_S, "999 3 4 110 10 1 1 1 99 0") == pytest.approx(30 / 50)
    assert share(10.0 + 2 * WINDOW_S, "120 3 4 160 10 1 1 1 99 0") == 0.0


def test_where_the_system_does_not_tell_nobody_waits_for_processors(tmp_path: Path) -> None:
    assert Processors(tmp_path / "missing").share(1.0) == 0.0
