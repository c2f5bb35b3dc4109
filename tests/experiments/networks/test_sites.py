from __future__ import annotations

import pytest

from experiments.networks.sites import COLUMNS, located, main, row


def test_a_row_per_model_says_what_hides_its_sites(capsys: pytest.CaptureFixture[str]) -> None:
    path = located("squeezenet")
    if path is None:
        pytest.skip("onnx is not installed")
    assert row("squeezenet", str(path)) == ("squeezenet", 66, 34, 17, 34, 34)
    main([str(path)])
    assert all(column in capsys.readouterr().out for column in COLUMNS[:1])
