"""Networks as torchvision builds them, with its names, written anew and plainly; of any width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

RESNETS = {
    18: ("basic", (2, 2, 2, 2)),
    34: ("basic", (3, 4, 6, 3)),
    50: ("bottleneck", (3, 4, 6, 3)),
    101: ("bottleneck", (3, 4, 23, 3)),
    152: ("bottleneck", (3, 8, 36, 3)),
}
VGGS = {
    11: "64 M 128 M 256 256 M 512 512 M 512 512 M",
    13: "64 64 M 128 128 M 256 256 M 512 512 M 512 512 M",
    16: "64 64 M 128 128 M 256 256 256 M 512 512 512 M 512 512 512 M",
    19: "64 64 M 128 128 M 256 256 256 256 M 512 512 512 512 M 512 512 512 512 M",
}
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(1, 3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(1, 3, 1, 1)


class Block(nn.Module):
    def __init__(self, inplanes: int, planes: int, stride: int, dilation: int, bottleneck: bool) -> None:
        super().__init__()
        outplanes = planes * 4 if bottleneck else planes
        if bottleneck:
            self.conv1 = nn.Conv2d(inplanes, planes, 1, bias=False)
            self.conv2 = nn.Conv2d(planes, planes, 3, stride, dilation, dilation, bias=False)
            self.conv3: nn.Module = nn.Conv2d(planes, outplanes, 1, bias=False)
            self.bn3: nn.Module = nn.BatchNorm2d(outplanes)
        else:
            self.conv1 = nn.Conv2d(inplanes, planes, 3, stride, 1, bias=False)
            self.conv2 = nn.Conv2d(planes, planes, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.bn2 = nn.BatchNorm2d(planes)
        self.bottleneck = bottleneck
        self.downsample: nn.Module | None = None
        if stride != 1 or inplanes != outplanes:
            self.downsample = nn.Sequential(
                nn.Conv2d(inplanes, outplanes, 1, stride, bias=False), nn.BatchNorm2d(outplanes)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.conv2(torch.relu(self.bn1(self.conv1(x))))
        out = self.bn3(self.conv3(torch.relu(self.bn2(out)))) if self.bottleneck else self.bn2(out)
        return torch.relu(out + identity)


class PublishedResNet(nn.Module):
    """`dilated`: the last so many of its four layers, as torchvision's networks for segmentation have."""

    def __init__(self, depth: int, *, width: int = 64, classes: int = 1000, dilated: int = 0) -> None:
        super().__init__()
        kind, numbers = RESNETS[depth]
        bottleneck = kind == "bottleneck"
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        inplanes, dilation = width, 1
        for layer, number in enumerate(numbers):
            planes, stride, before = width * 2**layer, 2 if layer else 1, dilation
            if layer >= 4 - dilated:
                dilation, stride = dilation * stride, 1
            blocks = []
            for index in range(number):
                first = index == 0
                blocks.append(
                    Block(inplanes, planes, stride if first else 1, before if first else dilation, bottleneck)
                )
                inplanes = planes * 4 if bottleneck else planes
            setattr(self, f"layer{layer + 1}", nn.Sequential(*blocks))
        self.fc = nn.Linear(inplanes, classes)

    def features(self, images_BHWC: Tensor) -> Tensor:
        x: Tensor = self.maxpool(torch.relu(self.bn1(self.conv1(normalised(images_BHWC)))))
        for layer in range(1, 5):
            x = self.get_submodule(f"layer{layer}")(x)
        return x

    def forward(self, images_BHWC: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(images_BHWC).mean((2, 3)))
        return logits


class PublishedVgg(nn.Module):
    """`shrunk`: by how much channels are divided; `hidden`: of the linear layers."""

    def __init__(self, depth: int, *, norms: bool, shrunk: int = 1, hidden: int = 4096, classes: int = 1000) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for part in VGGS[depth].split():
            if part == "M":
                layers.append(nn.MaxPool2d(2, 2))
                continue
            after = int(part) // shrunk
            layers.append(nn.Conv2d(before, after, 3, padding=1))
            layers += [nn.BatchNorm2d(after)] if norms else []
            layers.append(nn.ReLU())
            before = after
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(before * 49, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )

    def forward(self, images_BHWC: Tensor) -> Tensor:
        logits: Tensor = self.classifier(self.avgpool(self.features(normalised(images_BHWC))).flatten(1))
        return logits


def normalised(images_BHWC: Tensor) -> Tensor:
    """Normalizes pixels as torchvision's transforms do: to 0 to 1, less the mean, divided by the deviation."""
    return (images_BHWC.permute(0, 3, 1, 2).float() / 255 - MEAN) / STD


def as_if_trained(network: nn.Module, seed: int = 0) -> nn.Module:
    """Weights and statistics that no layer can be left out of unseen; in inference mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight, generator=generator)
            elif isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                module.weight.uniform_(0.5, 1.5, generator=generator)
                module.running_mean.normal_(0, 0.2, generator=generator)
                module.running_var.uniform_(0.5, 1.5, generator=generator)
            bias = getattr(module, "bias", None)
            if isinstance(bias, Tensor):
                bias.normal_(0, 0.2, generator=generator)
    return network.eval()
