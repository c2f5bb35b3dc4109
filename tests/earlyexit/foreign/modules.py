"""Ordinary torch modules that do not depend on Offramp, each with its `module:function`."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.foreign.torch_module import TorchModel, read_torch

SIDE = 8
VOCABULARY = 40
Given = tuple[nn.Module, dict[str, Tensor]]


@cache
def traced(name: str) -> TorchModel:
    """Returns one of the modules below. It is traced once per process, because that takes seconds."""
    torch.manual_seed(0)
    return read_torch(f"{__name__}:{name}")


class Residual(nn.Module):
    """Writes in place, like many modules."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm2d(after)
        self.shortcut = nn.Conv2d(before, after, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.convolution(x))
        y += self.shortcut(x)
        written: Tensor = F.relu(y, inplace=True)
        return written


class Pictures(nn.Module):
    """Takes bytes (B, H, W, 3)."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.stages = nn.Sequential(Residual(4, 6), Residual(6, 8), Residual(8, 8))
        self.classifier = nn.Linear(8, classes)

    def forward(self, image: Tensor) -> Tensor:
        x = F.relu(self.stem(image.permute(0, 3, 1, 2).float() / 128 - 1))
        answer: Tensor = self.classifier(self.stages(x).mean((2, 3)))
        return answer


class Ending(Pictures):
    """Returns a function of the logits."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.end = end

    def forward(self, image: Tensor) -> Any:
        return self.end(super().forward(image))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        after: Tensor = self.norm(x + self.out(y.transpose(1, 2).flatten(2)))
        return after


class Texts(nn.Module):
    """Its classifier reads the mean of the tokens, and its embedding is tied to its last layer."""

    def __init__(self, classes: int = 3, width: int = 16) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(24, width)
        self.layers = nn.ModuleList(Attention(width, 2) for _ in range(3))
        self.again = nn.Linear(width, VOCABULARY, bias=False)
        self.again.weight = self.tokens.weight
        self.classifier = nn.Linear(VOCABULARY, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.tokens(input_ids) + self.positions(places)
        mask = attention_mask[:, None, None, :].bool()
        for layer in self.layers:
            x = layer(x, mask)
        weight = attention_mask[..., None].to(x.dtype)
        pooled = (x * weight).sum(1) / weight.sum(1)
        answer: Tensor = self.classifier(torch.tanh(self.again(pooled)))
        return answer


class Doubled(nn.Module):
    """Computes in float64, which cannot cross."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network.double()

    def forward(self, image: Tensor) -> Tensor:
        x = self.network.stem(image.permute(0, 3, 1, 2).double() / 128 - 1)  # type: ignore[operator]
        answer: Tensor = self.network.classifier(self.network.stages(x).mean((2, 3)))  # type: ignore[operator]
        return answer


class Alone(nn.Module):
    """Has one layer, and so no site."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.Linear(SIDE * SIDE * 3, 3)

    def forward(self, image: Tensor) -> Tensor:
        answer: Tensor = self.classifier(image.float().flatten(1))
        return answer


class Masked(Pictures):
    """Every stage is wide inside, and reads a whole number of the pixels beside the previous stage's output."""

    def __init__(self) -> None:
        super().__init__()
        pairs = [(nn.Conv2d(4, 16, 3, padding=1), nn.Conv2d(16, 4, 3, padding=1)) for _ in range(3)]
        self.stages = nn.Sequential(*(nn.Sequential(*pair) for pair in pairs))
        self.classifier = nn.Linear(4, 3)

    def forward(self, image: Tensor) -> Tensor:
        pixels = image.permute(0, 3, 1, 2).float() / 128 - 1
        mask = image.long().amax((1, 2, 3))[:, None, None, None]
        x = F.relu(self.stem(pixels))
        for stage in self.stages:
            x = torch.tanh(stage(x) * mask / 128)
        answer: Tensor = self.classifier(x.mean((2, 3)))
        return answer


class Stubborn(Pictures):
    """Returns the same answer for all inputs."""

    def __init__(self) -> None:
        super().__init__()
        nn.init.zeros_(self.classifier.weight)


class Broken(Pictures):
    """Fails for dark pixels."""

    def forward(self, image: Tensor) -> Tensor:
        bright = image.float().mean((1, 2, 3)) > 60
        return super().forward(image / bright[:, None, None, None])


def _seeded(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = make().eval()
        for module in network.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.running_mean = torch.rand(module.num_features) - 0.5
                module.running_var = torch.rand(module.num_features) + 0.5
        if isinstance(network, Pictures) and not isinstance(network, Stubborn):
            _balance(network, Masked.forward if isinstance(network, Masked) else Pictures.forward)
    return network


@torch.no_grad()
def _balance(network: Pictures, forward: Callable[..., Tensor]) -> None:
    """Makes every class the answer to pictures of some colours."""
    colours_NC = torch.randint(0, 256, (64, 3)).to(torch.uint8)
    pictures_NHWC = colours_NC[:, None, None, :].expand(-1, SIDE, SIDE, -1)
    network.classifier.bias.sub_(forward(network, pictures_NHWC).mean(0))


def images(batch: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {"image": torch.randint(0, 256, (batch, SIDE, SIDE, 3), generator=generator).to(torch.uint8)}


def _of_images(make: Callable[[], nn.Module]) -> Given:
    return _seeded(make), images()


pictures = partial(_of_images, Pictures)
probable = partial(_of_images, partial(Ending, lambda logits: logits.softmax(-1)))
separate = partial(_of_images, partial(Ending, torch.sigmoid))  # a probability per class; they do not sum to 1
two_answers = partial(_of_images, partial(Ending, lambda logits: (logits, logits + 1)))
masked = partial(_of_images, Masked)
no_sites = partial(_of_images, Alone)
stubborn = partial(_of_images, Stubborn)
broken = partial(_of_images, Broken)
undefined = partial(_of_images, partial(Ending, lambda logits: logits * float("nan")))


def doubled() -> Given:
    return Doubled(_seeded(Pictures)), images()


def texts() -> Given:
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0, 0]])
    return _seeded(Texts), {
        "input_ids": torch.randint(1, VOCABULARY, (2, 7), generator=generator),
        "attention_mask": mask,
    }


class Placed(Texts):
    """Takes the position and the type of every token."""

    def __init__(self) -> None:
        super().__init__()
        self.types, self.layers = nn.Embedding(2, 16), self.layers[:1]

    def forward(  # type: ignore[override]
        self, token_type_ids: Tensor, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor
    ) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids) + self.types(token_type_ids)
        for layer in self.layers:
            x = layer(x, attention_mask[:, None, None, :].bool())
        answer: Tensor = self.classifier(torch.tanh(self.again(x[:, 0])))
        return answer


def placed(**others: Tensor) -> Given:
    """Returns a module with these examples in place of the ones that follow from the lengths 7 and 3."""
    ids, mask = texts()[1].values()
    given = {"input_ids": ids, "attention_mask": mask.float(), "position_ids": torch.arange(7).repeat(2, 1)}
    return _seeded(Placed), given | {"token_type_ids": torch.zeros_like(ids)} | others


placed_from_2 = partial(placed, position_ids=torch.arange(2, 9).repeat(2, 1))
placed_second_texts = partial(placed, token_type_ids=torch.ones(2, 7, dtype=torch.int64))
placed_left = partial(placed, attention_mask=torch.tensor([[1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]]))


class Indexed(nn.Module):
    """Looks up tokens by indexing, and has a weight of a type that numpy does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(VOCABULARY, 16))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=torch.bfloat16))
        self.classifier = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        weight = attention_mask[..., None].float()
        pooled = (self.table[input_ids] * weight).sum(1) / weight.sum(1)
        answer: Tensor = self.classifier(pooled * self.scale.float())
        return answer


def indexed() -> Given:
    return _seeded(Indexed), texts()[1]


class Categories(Indexed):
    """Looks up each feature in its part of the table, so that no bound is known."""

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        answer: Tensor = self.classifier(self.table[codes[:, 0]] + self.table[codes[:, 1] + 20] + numbers)
        return answer


def categories() -> Given:
    return _seeded(Categories), {"codes": torch.tensor([[1, 2], [3, 4]]), "numbers": torch.tensor([[True], [False]])}


class Positive(Categories):
    """Takes logarithms, and looks up numbers with a fraction."""

    def forward(self, codes: Tensor, numbers: Tensor) -> Tensor:
        return super().forward(codes.long(), numbers.log())


def positive() -> Given:
    return _seeded(Positive), {"codes": torch.ones(2, 2), "numbers": torch.ones(2, 1)}


class Plain(nn.Module):
    """Convolutions, with a part that writes in place and a part that splits a tensor."""

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


class Applied(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, values: Tensor, *others: Tensor) -> Any:
        return self.function(values, *others)


def _of_rows(function: Callable[..., Tensor], *rows: Tensor) -> tuple[nn.Module, tuple[Tensor, ...]]:
    return Applied(function), rows or (torch.randn(2, 3),)


windows = partial(_of_rows, lambda ids: ids.float() * (3 if ids.shape[1] % 4 else 2), torch.ones(2, 7).int())
recurrent = partial(_of_rows, nn.LSTM(3, 4, batch_first=True), torch.randn(2, 5, 3))
empty_examples = partial(tuple, (nn.Linear(3, 2), None))
added = partial(_of_rows, torch.add, torch.randn(2, 3), torch.randn(2, 3))
by_sizes = partial(_of_rows, lambda values: values * 2 if values.shape[0] > 4 else values)
random = partial(_of_rows, lambda values: F.dropout(values))
fixed = partial(_of_rows, lambda values: values.reshape(2, -1) * 2)  # takes only batches of two
mixes = partial(_of_rows, lambda values: values - values.mean(0))  # mixes the inputs of a batch
branches = partial(_of_rows, lambda values: torch.cond(values.sum() > 0, torch.sin, torch.cos, (values,)))


def small_bert() -> tuple[nn.Module, dict[str, Tensor]]:
    """Returns a model of `transformers` with random weights; inputs are named."""
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

        self.backbone = ResNetBackbone(cifar_layout(8))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.backbone.stem(images)
        for block in self.backbone.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden.mean((2, 3)))
        return logits


def resnet8() -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return WholeResNet(), (torch.rand(2, 32, 32, 3) * 255,)


def alone() -> tuple[nn.Module, tuple[Tensor, ...]]:
    return nn.Linear(3, 2), (torch.randn(1, 3),)


def fails() -> tuple[nn.Module, tuple[Tensor, ...]]:
    raise RuntimeError("no weights\nhere")
