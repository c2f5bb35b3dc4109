"""Networks that are not ours, made here as a user would make them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.own import PaddedBackbone, check_own
from earlyexit.network.checkpoint import RampOptions, add_ramps, load_pretrained
from earlyexit.network.layers import ReorderedLinear, reorder_linears
from earlyexit.network.piece import Layout
from earlyexit.network.store import load_model, save_model
from earlyexit.policies.threshold import ConfidencePolicy
from earlyexit.tasks.label import LabelTask
from tests.earlyexit.network.cuts import answers_alone, answers_in_cuts, assert_same
from tests.earlyexit.network.tokens import of_tokens

HERE = __name__
WIDTH = 4


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(10, WIDTH)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, token_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
        vectors: Tensor = self.words(token_ids_BT) * self.scale
        return vectors


class Mean(nn.Module):
    """Adds the mean of an input's tokens to each of them."""

    def __init__(self, *, masked: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.masked = masked

    def forward(self, hidden_BTD: Tensor, mask_BT: Tensor) -> Tensor:
        mask_BT1 = (mask_BT if self.masked else torch.ones_like(mask_BT))[:, :, None].to(hidden_BTD.dtype)
        mean_B1D = (hidden_BTD * mask_BT1).sum(1, keepdim=True) / mask_BT1.sum(1, keepdim=True)
        result: Tensor = self.linear(hidden_BTD) + mean_B1D
        return result


def build(depth: int = 2) -> PaddedBackbone:
    return padded(*(Mean() for _ in range(depth)))


def leaky() -> PaddedBackbone:
    return padded(Mean(), Mean(masked=False))


def padded(*blocks: nn.Module) -> PaddedBackbone:
    return PaddedBackbone(embed=Embedding(), blocks=blocks, max_length=9, config={"depth": len(blocks)})


def text() -> str:
    return "no network"


def run(backbone: PaddedBackbone, token_ids: list[int], lengths: list[int]) -> Tensor:
    layout = Layout(np.array(lengths, dtype=np.int32))
    hidden = backbone.embed((torch.tensor(token_ids, dtype=torch.int32),), layout)
    for block in range(backbone.num_blocks):
        hidden = backbone.run_block(block, hidden, layout)
    (hidden_ND,) = hidden
    return hidden_ND


def test_a_network_that_lets_padding_through_is_refused_by_its_block() -> None:
    with pytest.raises(ModelFolderError, match=r"block 1 gives one of 3 inputs other values than alone"):
        check_own(leaky())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no_such_module:build", "network 'no_such_module:build' cannot be imported: .*PYTHONPATH"),
        (f"{HERE}:gone", "has no attribute 'gone'"),
        (f"{HERE}:text", "gave str; a Backbone is needed"),
    ],
)
def test_what_is_no_network_is_refused(name: str, message: str) -> None:
    with pytest.raises(ModelFolderError, match=message):
        load_pretrained(name)


def test_an_own_model_is_saved_loaded_cut_and_reordered_only_where_it_may_be(tmp_path: Path) -> None:
    assert __name__ in sys.modules
    torch.manual_seed(0)
    pretrained, family = load_pretrained(f"{HERE}:build")
    model = add_ramps(
        pretrained,
        name="own",
        family=family,
        codec={"name": "text", "max_length": 9},
        task=LabelTask(("a", "b")),
        ramps=RampOptions(),
    )
    save_model(model, tmp_path)
    loaded = load_model(tmp_path)
    assert loaded.info.family == f"{HERE}:build"
    assert float(loaded.backbone.get_buffer("embedding.scale")) == 2.0, "what is not saved is made anew"
    reorder_linears(loaded)
    assert not any(isinstance(each, ReorderedLinear) for each in loaded.backbone.modules())
    assert any(isinstance(each, ReorderedLinear) for each in loaded.head.modules())
    policy, encoded = ConfidencePolicy(1.1), [of_tokens([1, 2]), of_tokens([3, 4, 5])]  # no input leaves
    assert_same(answers_in_cuts(loaded, policy, encoded, (0, 1, 2)), answers_alone(model, policy, encoded))


def test_a_backbone_that_sets_an_earlier_name_is_told_the_present_one() -> None:
    with pytest.raises(ModelFolderError, match="Old: packs_linears is called reorders_linears"):
        type("Old", (PaddedBackbone,), {"packs_linears": False})
