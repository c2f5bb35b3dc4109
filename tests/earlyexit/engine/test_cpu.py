from __future__ import annotations

from pathlib import Path

import pytest

from earlyexit.engine.cpu import ISA, avoid_hidden_tiles

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
