"""The outputs of exits for known inputs, the training of ramps on a frozen backbone, and the attention of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Encoded, entry_piece
from earlyexit.network.model import EarlyExitModel, init_bridges
from earlyexit.network.piece import Layout, Tensors
from earlyexit.ramps.heads import BridgeRamp, Ramp
from earlyexit.tasks.base import ValueArray

Parameters = Sequence[torch.nn.Parameter]
Groups = list[dict[str, Any]]
"""Groups of parameters, each with its own learning rate."""
RISING = 0.1
"""Share of all steps in which the learning rate rises before it falls (Smith and Topin 2018)."""


Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of units done, and their total."""


def no_progress(what: str, done: int, total: int) -> None:
    """The default of `progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """Length, learning rate and other options of training."""

    epochs: int = 40
    batch: int = 256
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    imitate: bool = False
    """Whether ramps on a frozen backbone learn from the full model's outputs rather than from labels."""
    seed: int = 0
    progress: Progress = field(default=no_progress)


OPTIMIZERS: Mapping[str, Callable[[Groups, TrainOptions], Optimizer]] = {
    "adamw": lambda parameters, options: AdamW(parameters, lr=options.learning_rate, weight_decay=options.weight_decay),
    "sgd": lambda parameters, options: SGD(
        parameters, lr=options.learning_rate, momentum=0.9, nesterov=True, weight_decay=options.weight_decay
    ),
}


class Descent:
    """The steps of a training run, epoch by epoch. Its state can be saved and restored."""

    def __init__(
        self,
        parameters: Parameters,
        num_inputs: int,
        options: TrainOptions,
        *,
        optimizer: str = "adamw",
        least_batch: int = 1,
        slower: Parameters = (),
        pace: float = 1.0,
    ) -> None:
        """Parameters take gradients from now on, until `done`. `pace`: factor on the learning rate of `slower` ones.

        If the last batch of an epoch has fewer than `least_batch` inputs, it is joined with the batch before it.
        """
        self.parameters = [*parameters, *slower]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.num_inputs = num_inputs
        self.options = options
        full, rest = divmod(num_inputs, options.batch)
        self.sizes = [options.batch] * full + [rest] * (rest > 0)
        """The sizes of an epoch's batches."""
        if full and 0 < rest < least_batch:
            self.sizes[-2:] = [options.batch + rest]
        groups = [{"params": list(each)} for each in (parameters, slower) if each]
        largest = [options.learning_rate, options.learning_rate * pace][-len(groups) :] if slower else None
        self.optimizer = OPTIMIZERS[optimizer](groups, options)
        self.generator = torch.Generator().manual_seed(options.seed)
        steps = max(3, options.epochs * len(self.sizes))  # two rise, one falls: with fewer, torch divides by 0
        self.schedule = OneCycleLR(
            self.optimizer, max_lr=largest or options.learning_rate, total_steps=steps, pct_start=max(RISING, 2 / steps)
        )

    def epoch(self, loss: Callable[[Tensor], Tensor]) -> float:
        """Train one epoch in random batches; returns the mean loss. `loss`: of the inputs at the given positions."""
        total = 0.0
        for rows in torch.split(torch.randperm(self.num_inputs, generator=self.generator), self.sizes):
            self.optimizer.zero_grad(set_to_none=True)
            value = loss(rows)
            value.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            self.optimizer.step()
            self.schedule.step()
            total += float(value.detach()) * len(rows)
        return total / self.num_inputs

    def run(self, loss: Callable[[Tensor], Tensor], what: str = "epochs") -> None:
        """Train all epochs, telling `progress` about each as `what`; then parameters take no gradients any more."""
        for epoch in range(self.options.epochs):
            self.epoch(loss)
            self.options.progress(what, epoch + 1, self.options.epochs)
        self.done()

    def done(self) -> None:
        """Stop gradients of the parameters."""
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """Returns all that the next epoch depends on, except the parameters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self.generator.get_state(),
        }

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an equal run."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["generator"])


Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (B, C) of an exit, positions (B,) of the inputs) -> loss."""


def batches_by_length(encoded: Sequence[Encoded], batch: int) -> Iterator[list[int]]:
    """Yields the positions of inputs in batches of similar length, longest first, so that memory peaks at the start."""
    order = sorted(range(len(encoded)), key=lambda k: -encoded[k].length)
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def pack(encoded: Sequence[Encoded], device: torch.device) -> tuple[Tensors, Layout]:
    """Several inputs as the network takes them, with their layout."""
    piece = entry_piece([""] * len(encoded), encoded)
    return tuple(torch.from_numpy(values).to(device) for values in piece.tensors), Layout(piece.lengths_B, device)


def after_every_exit(
    model: EarlyExitModel, encoded: Sequence[Encoded], batch: int, progress: Callable[[int, int], None]
) -> Iterator[tuple[list[int], int, Tensors, Layout]]:
    """Yields the positions of a batch's inputs, an exit's block, and the tensors after it; `progress` counts inputs."""
    done, exits = 0, {*model.ramp_indices, model.num_blocks - 1}
    for rows in batches_by_length(encoded, batch):
        hidden, layout = pack([encoded[row] for row in rows], model.device)
        for block in range(model.num_blocks):
            hidden = model.run_blocks(block, block + 1, hidden, layout)
            if block in exits:
                yield rows, block, hidden, layout
        done += len(rows)
        progress(done, len(encoded))


@torch.inference_mode()
def exit_outputs(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Returns temperature-scaled outputs (N, *output_shape), float32, of every ramp and of the full model, by block."""
    exits = [*model.ramp_indices, model.num_blocks - 1]
    outputs = {block: torch.empty(len(encoded), *model.task.output_shape) for block in exits}
    for rows, block, hidden, layout in after_every_exit(model, encoded, batch, partial(progress, "records")):
        outputs[block][rows] = model.exit_outputs(block, hidden, layout).cpu()
    return outputs


def outputs_by_batch(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> Iterator[tuple[list[int], dict[int, Tensor]]]:
    """Yields the positions of a batch's inputs, and their `exit_outputs` on the model's device."""
    outputs: dict[int, Tensor] = {}
    with torch.inference_mode():
        for rows, block, hidden, layout in after_every_exit(model, encoded, batch, partial(progress, "records")):
            outputs[block] = model.exit_outputs(block, hidden, layout)
            if block == model.num_blocks - 1:
                yield rows, outputs
                outputs = {}


@torch.inference_mode()
def exit_features(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Returns the inputs of every exit's head, (N, ...), mostly pooled hidden states, by block.

    They are float32 in host memory, N * D * 4 bytes per exit, from one pass over the backbone.
    """
    features: dict[int, Tensor] = {}
    for rows, block, hidden, layout in after_every_exit(model, encoded, batch, partial(progress, "features")):
        found = model.exit_head(block).gather(hidden[0], layout).float().cpu()
        features.setdefault(block, torch.empty(len(encoded), *found.shape[1:]))[rows] = found
    return {key: feature.clone() for key, feature in features.items()}


def train_ramps(
    model: EarlyExitModel,
    encoded: Sequence[Encoded],
    targets: ValueArray,
    options: TrainOptions | None = None,
    *,
    features: Mapping[int, Tensor] | None = None,
) -> None:
    """Train all ramps, and the full model's head unless it came from a checkpoint, on the frozen backbone.

    Every input trains every ramp. Ramps do not influence each other, neither by gradients nor by random numbers, so a
    ramp trained alone is equal to the ramp trained among others (Apparate section 3.1). Bridges are initialised from
    the backbone's blocks, and their heads from the full model's (PAME section 5.2). `features`: of `exit_features`, if
    they are known already.
    """
    options = options or TrainOptions()
    features = features or exit_features(model, encoded, progress=options.progress)
    last = model.num_blocks - 1
    ramps = {block: model.exit_head(block) for block in model.ramp_indices}
    head = {} if "head" in model.info.provenance else {last: model.head}
    targets_N = torch.from_numpy(targets)

    def by_answers(outputs_BC: Tensor, rows: Tensor) -> Tensor:
        return model.task.training_loss(outputs_BC, targets_N[rows].to(outputs_BC.device))

    _train_heads(model, head if options.imitate else ramps | head, features, by_answers, options)
    if not options.imitate:
        return
    with torch.inference_mode():
        full_NC = model.head.classify(features[last].to(model.device)).cpu()

    def loss(outputs_BC: Tensor, rows: Tensor) -> Tensor:
        return model.task.imitation_loss(outputs_BC, full_NC[rows].to(outputs_BC.device))

    _train_heads(model, ramps, features, loss, options)


def _train_heads(
    model: EarlyExitModel,
    heads: Mapping[int, Ramp],
    features: Mapping[int, Tensor],
    loss_of: Loss,
    options: TrainOptions,
) -> None:
    if not heads:
        return
    device, steps = model.device, count()
    dropping = {at for at, head in heads.items() if any(isinstance(part, nn.Dropout) for part in head.modules())}

    def loss(rows: Tensor) -> Tensor:
        step = next(steps)
        losses = []
        for at, head in heads.items():
            if at in dropping:  # dropout does not depend on other heads
                torch.manual_seed(draw(options.seed, at, step))
            losses.append(loss_of(head.classify(features[at][rows].to(device)), rows))
        return torch.stack(losses).sum()  # not the mean: a head's gradient is then that of its own loss

    for at, head in heads.items():
        if not isinstance(head, BridgeRamp):
            draw_anew(head, draw(options.seed, at))
        head.train()
    init_bridges(model)
    parameters = [parameter for head in heads.values() for parameter in head.parameters()]
    descent = Descent(parameters, len(next(iter(features.values()))), options)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        descent.run(loss)
    model.eval()


def draw_anew(head: nn.Module, seed: int) -> None:
    """Initialise a module's weights and the statistics of its norms again, with the given seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in head.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def draw(*numbers: int) -> int:
    """Returns a seed derived from the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


TIMED_INPUTS, TIMED_BATCH = 32, 8
"""Inputs that are timed, few so that calibration stays short, and their batch size, similar to a replica's."""
ROUNDS = 5


@torch.inference_mode()
def importance_of(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> list[npt.NDArray[np.float32]]:
    """Returns the attention of every input's tokens, (N,), summed over blocks, heads and queries.

    Raises PlanError for networks that do not measure it.
    """
    if not model.backbone.measures_importance:
        raise PlanError(
            f"{model.info.name}: words are pruned by the attention that they receive, which networks of the family "
            f"{model.info.family!r} do not tell"
        )
    found: list[npt.NDArray[np.float32]] = [np.zeros(0, dtype=np.float32)] * len(encoded)
    for rows in batches_by_length(encoded, batch):
        inputs, layout = pack([encoded[row] for row in rows], model.device)
        begun = (*inputs, torch.zeros(layout.num_tokens, device=model.device))
        importance_N = model.run_blocks(0, model.num_blocks, begun, layout)[-1]
        for row, own in zip(rows, torch.split(importance_N, layout.lengths_B.tolist()), strict=True):
            found[row] = own.cpu().numpy()
        progress("attention", sum(len(each) > 0 for each in found), len(encoded))
    return found


@torch.inference_mode()
def times_measured(model: EarlyExitModel, encoded: Sequence[Encoded]) -> float:
    """Returns the factor by which measuring attention increases a network's processor time; at least 1.

    It is the median over rounds that alternate with and without the measurement, on inputs of all lengths.
    """
    step = max(1, len(encoded) // TIMED_INPUTS)
    some = sorted(encoded, key=lambda each: each.length)[::step][-TIMED_INPUTS:]
    packed = [pack(some[first : first + TIMED_BATCH], model.device) for first in range(0, len(some), TIMED_BATCH)]

    def took_s(*, measured: bool) -> float:
        began_s = time.process_time()
        for inputs, layout in packed:
            more = (torch.zeros(layout.num_tokens, device=model.device),) if measured else ()
            model.run_blocks(0, model.num_blocks, (*inputs, *more), layout)
        return time.process_time() - began_s

    took_s(measured=True)  # the first one warms up
    return max(1.0, median(took_s(measured=True) / took_s(measured=False) for _ in range(ROUNDS)))
