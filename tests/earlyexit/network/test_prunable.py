"""Which chains can prune words is known from their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earlyexit.errors import PlanError
from earlyexit.families import FAMILIES, GENERATES, MEASURES_IMPORTANCE, find_family
from earlyexit.network.store import CARD_FILE, check_prunable
from tests.earlyexit.network.models import SMALL
from tests.model_cards import a_card


def write_card(folder: Path, **facts: Any) -> Path:
    folder.mkdir()
    (folder / CARD_FILE).write_text(a_card(**facts).model_dump_json(), encoding="utf-8")
    return folder


def chain_of(tmp_path: Path, **first: Any) -> Path:
    """Two networks of two blocks each."""
    write_card(tmp_path / "small", name="small", **first)
    write_card(tmp_path / "large", name="large")
    backbone = {"models": ["../small", "../large"], "names": ["small", "large"], "blocks": [2, 2]}
    return write_card(
        tmp_path / "chain", name="large", family="chain", backbone=backbone, num_blocks=4, ramps=(0, 1, 2)
    )


def test_texts_before_a_network_that_measures_attention_can(tmp_path: Path) -> None:
    folder = chain_of(tmp_path)
    check_prunable(folder, {1: 0.7})
    check_prunable(folder / "nowhere", {})


def test_a_network_that_does_not_tell_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"small: words are pruned by the attention .* 'resnet' do not tell; bert, "):
        check_prunable(chain_of(tmp_path, family="resnet"), {1: 0.7})


def test_what_is_no_text_is_refused_in_one_line(tmp_path: Path) -> None:
    codec = {"name": "image", "height": 8, "width": 8}
    with pytest.raises(PlanError, match="small: words are pruned of texts, and its inputs are encoded by 'image'"):
        check_prunable(chain_of(tmp_path, codec=codec), {1: 0.7})


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"exported", "onnx"}))
def test_the_lists_of_families_are_those_of_their_backbones(family: str) -> None:
    sizes = {name: value for name, value in SMALL.items() if family in MEASURES_IMPORTANCE}
    backbone = find_family(family).build(sizes)
    assert backbone.measures_importance == (family in MEASURES_IMPORTANCE)
    assert (backbone.kept_bytes > 0) == (family in GENERATES)
