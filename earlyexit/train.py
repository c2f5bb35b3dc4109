"""What exits give on known inputs, and their training: on a frozen backbone, or jointly with the whole model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.layout import Layout
from earlyexit.model import EarlyExitModel
from earlyexit.piece import Tensors
from earlyexit.ramps.heads import Ramp
from earlyexit.ramps.pooling import Pooling, pool, pooled_size
from earlyexit.signature import Encoded
from earlyexit.tasks.base import Task, ValueArray
from earlyexit.wire import entering

Progress = Callable[[str, int, int], None]
"""(what is done, how much, of how much)."""
Loss = Callable[[Tensor, Tensor], Tensor]
"""Of an exit's outputs (B, C) for the inputs at the given positions (B,)."""


def no_progress(what: str, done: int, total: int) -> None:
    """Say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """How long and how fast to learn."""

    epochs: int = 40
    batch: int = 256
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    label_smoothing: float = 0.0
    imitate: bool = False
    """Whether ramps learn of the full model's outputs, not of the labels; of ramps on a frozen backbone."""
    seed: int = 0
    progress: Progress = field(default=no_progress)


# The whole model learns slower, in smaller steps, than heads on a frozen backbone (PAME section 5.2 fine-tunes).
JOINT_OPTIONS = TrainOptions(epochs=3, batch=32, learning_rate=3e-5, weight_decay=0.01)


def batches_by_length(encoded: Sequence[Encoded], batch: int) -> Iterator[list[int]]:
    """Positions in batches of similar length, longest first, so that the largest memory is asked for at once."""
    order = sorted(range(len(encoded)), key=lambda k: -encoded[k].length)
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def pack(encoded: Sequence[Encoded], device: torch.device) -> tuple[Tensors, Layout]:
    """Several inputs as the network takes them, with their layout."""
    piece = entering([""] * len(encoded), encoded)
    return tuple(torch.from_numpy(values).to(device) for values in piece.tensors), Layout(piece.lengths_B, device)


def after_every_block(
    model: EarlyExitModel, encoded: Sequence[Encoded], batch: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[list[int], int, Tensors, Layout]]:
    """Positions of a batch's inputs, a block, and what crosses after it; `progress` is told how many are done."""
    done = 0
    for rows in batches_by_length(encoded, batch):
        hidden, layout = pack([encoded[row] for row in rows], model.device)
        for block in range(model.num_blocks):
            hidden = model.run_blocks(block, block + 1, hidden, layout)
            yield rows, block, hidden, layout
        done += len(rows)
        progress(done, len(encoded))


@torch.inference_mode()
def exit_outputs(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Temperature-scaled outputs (N, C), float32, of every ramp and of the full model's head, by block."""
    exits = [*model.ramp_indices, model.num_blocks - 1]
    outputs = {block: torch.empty(len(encoded), model.task.num_outputs) for block in exits}
    for rows, block, hidden, layout in after_every_block(model, encoded, batch, lambda *n: progress("records", *n)):
        if block in outputs:
            outputs[block][rows] = model.exit_outputs(block, hidden, layout).cpu()
    return outputs


@torch.inference_mode()
def pooled_features(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> dict[tuple[int, Pooling], Tensor]:
    """The pooled hidden state (N, D) after every block that has an exit, in each pooling that exits there use.

    One pass over the backbone; float32 on the host, N * D * 4 bytes per exit.
    """
    wanted = _exits_and_poolings(model)
    features = {
        (at, pooling): torch.empty(len(encoded), pooled_size(model.boundary(at)[0].shape, pooling))
        for at, pooling in wanted
    }
    for rows, block, hidden, layout in after_every_block(model, encoded, batch, lambda *n: progress("features", *n)):
        for at, pooling in wanted:
            if at == block:
                features[at, pooling][rows] = pool(hidden[0], layout, pooling).float().cpu()
    return {key: feature.clone() for key, feature in features.items()}


def train_ramps(
    model: EarlyExitModel, encoded: Sequence[Encoded], targets: ValueArray, options: TrainOptions | None = None
) -> None:
    """Train all ramps, and the full model's head unless a checkpoint brought it, on the frozen backbone.

    Every input trains every ramp, so that ramps do not depend on which others are active (Apparate section 3.1).
    """
    options = options or TrainOptions()
    features = pooled_features(model, encoded, progress=options.progress)
    last = model.num_blocks - 1
    ramps = {block: model.exit_head(block) for block in model.ramp_indices}
    head = {} if "head" in model.info.provenance else {last: model.head}
    if not options.imitate:
        _train_heads(model, ramps | head, features, _by_answers(model.task, targets, options), options)
        return
    if head:
        _train_heads(model, head, features, _by_answers(model.task, targets, options), options)
    with torch.inference_mode():
        full_NC = model.head.classify(features[last, model.head.pooling].to(model.device)).cpu()
    _train_heads(model, ramps, features, _by_outputs(model.task, full_NC), options)


def _train_heads(
    model: EarlyExitModel,
    heads: Mapping[int, Ramp],
    features: Mapping[tuple[int, Pooling], Tensor],
    loss_of: Loss,
    options: TrainOptions,
) -> None:
    inputs = {block: features[block, head.pooling] for block, head in heads.items()}
    device = model.device

    def loss(rows: Tensor) -> Tensor:
        losses = [loss_of(head.classify(inputs[at][rows].to(device)), rows) for at, head in heads.items()]
        return torch.stack(losses).mean()

    parameters = [parameter for head in heads.values() for parameter in head.parameters()]
    for head in heads.values():
        head.train()
    _descend(parameters, loss, len(next(iter(inputs.values()))), options)
    model.eval()


def _by_answers(task: Task, targets: ValueArray, options: TrainOptions) -> Loss:
    targets_N = torch.from_numpy(targets)
    return lambda outputs_BC, rows: task.training_loss(
        outputs_BC, targets_N[rows].to(outputs_BC.device), label_smoothing=options.label_smoothing
    )


def _by_outputs(task: Task, full_NC: Tensor) -> Loss:
    return lambda outputs_BC, rows: task.imitation_loss(outputs_BC, full_NC[rows].to(outputs_BC.device))


def train_jointly(
    model: EarlyExitModel, encoded: Sequence[Encoded], targets: ValueArray, options: TrainOptions = JOINT_OPTIONS
) -> None:
    """Train backbone, ramps and head together on the average of all heads' losses, equal weights (PAME section 5.2).

    Raises ModelFolderError for a backbone without weights to train.
    """
    if next(model.backbone.parameters(), None) is None:
        raise ModelFolderError(f"a backbone of the family {model.info.family} stays as it is: train its ramps alone")
    loss_of = _by_answers(model.task, targets, options)

    def loss(rows: Tensor) -> Tensor:
        values, layout = pack([encoded[row] for row in rows.tolist()], model.device)
        losses = []
        for block in range(model.num_blocks):
            values = model.run_blocks(block, block + 1, values, layout)
            if block in model.ramp_indices or block == model.num_blocks - 1:
                losses.append(loss_of(model.exit_head(block)(values[0], layout), rows))
        return torch.stack(losses).mean()

    model.requires_grad_(True)
    model.train()
    _descend(list(model.parameters()), loss, len(targets), options)
    model.requires_grad_(False)
    model.eval()


def _exits_and_poolings(model: EarlyExitModel) -> list[tuple[int, Pooling]]:
    exits = [*model.ramp_indices, model.num_blocks - 1]
    return [(block, model.exit_head(block).pooling) for block in exits]


def _descend(
    parameters: list[torch.nn.Parameter], loss: Callable[[Tensor], Tensor], num_inputs: int, options: TrainOptions
) -> None:
    generator = torch.Generator().manual_seed(options.seed)
    for parameter in parameters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate, weight_decay=options.weight_decay)
    steps = options.epochs * math.ceil(num_inputs / options.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=options.learning_rate, total_steps=steps, pct_start=0.1
    )
    for epoch in range(options.epochs):
        for rows in torch.split(torch.randperm(num_inputs, generator=generator), options.batch):
            optimizer.zero_grad(set_to_none=True)
            loss(rows).backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            optimizer.step()
            schedule.step()
        options.progress("epochs", epoch + 1, options.epochs)
    for parameter in parameters:
        parameter.requires_grad_(False)
