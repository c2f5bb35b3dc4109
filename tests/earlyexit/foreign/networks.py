"""Torch modules that were not prepared, each by a function as `read_torch` takes it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Plain(nn.Module):
    """Convolutions with a part that writes in place, and one that takes a tensor apart."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.body = nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(inplace=True))
        self.head = nn.Linear(4, 2)

    def forward(self, images: Tensor) -> Tensor:
        first, second = self.body(self.stem(images)).chunk(2, 1)
        joined = torch.cat([first.sigmoid(), second], 1)
        joined += 1
        logits: Tensor = self.head(F.adaptive_avg_pool2d(joined, 1).flatten(1))
        return logits


def plain() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Plain(), (torch.randn(2, 3, 8, 8),)


class Decides(nn.Module):
    """It looks at values in Python, which `torch.export` cannot follow, unless asked about the module's own state."""

    def forward(self, values: Tensor) -> Tensor:
        return values + 1 if values.sum() > 0 else values - 1


def decides() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Decides(), (torch.randn(2, 3),)


class Fixed(nn.Module):
    """It takes batches of two only."""

    def forward(self, values: Tensor) -> Tensor:
        return values.reshape(2, -1) * 2


def fixed() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Fixed(), (torch.randn(2, 3),)


class Mixes(nn.Module):
    """It lets inputs of a batch see each other."""

    def forward(self, values: Tensor) -> Tensor:
        return values - values.mean(0)


def mixes() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Mixes(), (torch.randn(2, 3),)


class Branches(nn.Module):
    """It runs one graph or another."""

    def forward(self, values: Tensor) -> Tensor:
        chosen: Tensor = torch.cond(values.sum() > 0, lambda x: x.sin(), lambda x: x.cos(), (values,))
        return chosen


def branches() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Branches(), (torch.randn(2, 3),)


def small_bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """Of `transformers`, with weights drawn at random; inputs by name."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    network = BertForSequenceClassification(BertConfig(vocab_size=100, **sizes))
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    return network, {"input_ids": torch.randint(0, 100, (2, 7)), "attention_mask": mask}


class WholeResNet(nn.Module):
    """Offramp's own residual network as one module, from pixels to logits."""

    def __init__(self) -> None:
        super().__init__()
        from earlyexit.families.resnet import ResNetBackbone, cifar_layout

        self.backbone = ResNetBackbone(cifar_layout(14))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.backbone.stem(images)
        for block in self.backbone.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


def resnet14() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return WholeResNet(), (torch.rand(2, 32, 32, 3) * 255,)


def alone() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Linear(3, 2), (torch.randn(1, 3),)


def no_examples() -> nn.Module:
    return nn.Linear(3, 2)


def no_module() -> tuple[int, tuple[Tensor, ...]]:
    return 3, (torch.randn(2, 3),)


def empty_examples() -> tuple[nn.Module, None]:
    return nn.Linear(3, 2), None


def fails() -> tuple[nn.Module, tuple[Tensor, ...]]:
    raise RuntimeError("no weights\nhere")
