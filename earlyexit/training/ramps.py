"""Training of ramps on a frozen backbone, and evaluation of all exits and of the attention of tokens on a data set."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from statistics import median
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import OneCycleLR

from earlyexit.errors import DataError, PlanError
from earlyexit.network.boundary import Encoded, check_fit, entry_piece
from earlyexit.network.model import EarlyExitModel, init_bridges
from earlyexit.network.piece import Layout, Tensors, halved, wait_for
from earlyexit.ramps.heads import BridgeRamp, Ramp
from earlyexit.tasks.base import ValueArray

SOFTNESS = 2.0
"""The softness of `Task.imitation_loss`. Of 1, 2, 3 and 4, it gave the fewest mean blocks on CLINC150 (budget 1 %)."""
RISING = 0.1
"""Share of all steps in which the learning rate rises, before it falls (Smith and Topin 2018)."""
Progress = Callable[[str, int, int], None]
"""Called with a description of the work, the number of completed units, and the total number of units."""


def no_progress(what: str, done: int, total: int) -> None:
    """Does nothing: the default `progress`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FitOptions:
    """Options of training."""

    epochs: int = 40
    batch: int = 256
    learning_rate: float = 1e-2
    weight_decay: float = 0.1
    optimizer: Literal["adamw", "sgd"] = "adamw"
    seed: int = 0
    progress: Progress = field(default=no_progress)


class Descent:
    """Optimizer and learning rate schedule of a training run."""

    def __init__(
        self,
        groups: Sequence[tuple[Sequence[nn.Parameter], float]],
        num_inputs: int,
        options: FitOptions,
        *,
        least_batch: int = 1,
    ) -> None:
        """Enables gradients of the parameters until `done`. `groups`: parameters, and a factor on their learning rate.

        If the last batch of an epoch has fewer than `least_batch` inputs, it is merged with the previous batch.
        """
        self.parameters = [parameter for group, _ in groups for parameter in group]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.num_inputs = num_inputs
        self.options = options
        full, rest = divmod(num_inputs, options.batch)
        self.sizes = [options.batch] * full + [rest] * (rest > 0)
        """The sizes of an epoch's batches."""
        if full and 0 < rest < least_batch:
            self.sizes[-2:] = [options.batch + rest]
        params = [{"params": list(group), "weight_decay": options.weight_decay} for group, _ in groups if group]
        self.optimizer = SGD(params, momentum=0.9, nesterov=True) if options.optimizer == "sgd" else AdamW(params)
        self.generator = torch.Generator().manual_seed(options.seed)
        steps = max(3, options.epochs * len(self.sizes))  # OneCycleLR divides by 0 for fewer than 3 steps
        largest = [options.learning_rate * factor for group, factor in groups if group]
        self.schedule = OneCycleLR(self.optimizer, max_lr=largest, total_steps=steps, pct_start=max(RISING, 2 / steps))

    def epoch(self, loss: Callable[[Tensor], Tensor]) -> None:
        """Train one epoch in random batches. `loss` maps positions of inputs to their loss.

        Raises DataError if the last loss is not finite: the weights are then NaN, and stay so.
        """
        for rows in torch.split(torch.randperm(self.num_inputs, generator=self.generator), self.sizes):
            self.optimizer.zero_grad(set_to_none=True)
            value = loss(rows)
            value.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            self.optimizer.step()
            self.schedule.step()
        if not value.isfinite():
            raise DataError(f"training diverged: the loss is {value.item()}; train with a lower --learning-rate")

    def run(self, losses: Callable[[Tensor], Iterable[Tensor]], what: str = "epochs") -> None:
        """Train all epochs, and then disable gradients. `what` describes the work in reports of progress.

        `losses`: the losses of all heads. The sum is trained, so that a head's gradient does not depend on others.
        """
        for epoch in range(self.options.epochs):
            self.epoch(lambda rows: torch.stack(list(losses(rows))).sum())
            self.options.progress(what, epoch + 1, self.options.epochs)
        self.done()

    def done(self) -> None:
        """Disable gradients of the parameters."""
        for parameter in self.parameters:
            parameter.requires_grad_(False)


def batches_by_length(encoded: Sequence[Encoded], batch: int) -> Iterator[list[int]]:
    """Yields the positions of inputs in batches of similar length, longest first, so that memory peaks at the start."""
    order = sorted(range(len(encoded)), key=lambda k: -encoded[k].length)
    for start in range(0, len(order), batch):
        yield order[start : start + batch]


def pack(encoded: Sequence[Encoded], device: torch.device) -> tuple[Tensors, Layout]:
    """Returns several inputs as one packed batch on a device, and its layout."""
    piece = entry_piece([""] * len(encoded), encoded)
    return tuple(torch.from_numpy(values).to(device) for values in piece.tensors), Layout(piece.lengths_B, device)


def after_exits(model: EarlyExitModel, hidden: Tensors, layout: Layout) -> Iterator[tuple[int, Tensors]]:
    """Yields the block of each exit, and the tensors after it. `hidden`: the model's inputs."""
    first = 0
    for block in (*model.ramp_indices, model.num_blocks - 1):
        hidden = model.run_blocks(first, block + 1, hidden, layout)
        first = block + 1
        yield block, hidden


def by_batch(
    model: EarlyExitModel,
    encoded: Sequence[Encoded],
    of_exit: Callable[[int, Tensors, Layout], Tensor],
    what: str,
    *,
    progress: Progress = no_progress,
    batch: int = 64,
) -> Iterator[tuple[list[int], dict[int, Tensor]]]:
    """Yields, for each batch, positions of the inputs, and by block the result of `of_exit` for each exit.

    Raises UnprocessableInputError for an input that does not fit the network.
    """
    check_fit(model.takes(0), encoded)
    done = 0
    for rows in batches_by_length(encoded, batch):
        with torch.inference_mode():
            hidden, layout = pack([encoded[row] for row in rows], model.device)
            results = {block: of_exit(block, after, layout) for block, after in after_exits(model, hidden, layout)}
        yield rows, results
        done += len(rows)
        progress(what, done, len(encoded))


def _together(num_inputs: int, batches: Iterable[tuple[list[int], dict[int, Tensor]]]) -> dict[int, Tensor]:
    results: dict[int, Tensor] = {}
    for rows, by_block in batches:
        for block, of_batch in by_block.items():
            results.setdefault(block, torch.empty(num_inputs, *of_batch.shape[1:]))[rows] = of_batch.float().cpu()
    return results


def exit_outputs(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Returns the temperature-scaled outputs of every exit, float32 (N, *output_shape) in host memory, by block."""
    batches = by_batch(model, encoded, model.exit_outputs, "records", progress=progress, batch=batch)
    return _together(len(encoded), batches)


def exit_features(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, progress: Progress = no_progress
) -> dict[int, Tensor]:
    """Returns the inputs of every exit's head, (N, ...), usually pooled hidden states, by block.

    They are float32 in host memory, N * D * 4 bytes per exit. The backbone runs once for all exits.
    """
    return _together(len(encoded), by_batch(model, encoded, model.gathered, "features", progress=progress))


def train_ramps(
    model: EarlyExitModel,
    encoded: Sequence[Encoded],
    targets: ValueArray,
    options: FitOptions | None = None,
    *,
    features: Mapping[int, Tensor] | None = None,
) -> None:
    """Train the full model's head, unless it came from a checkpoint, and then all ramps on the frozen backbone.

    Ramps learn the full model's outputs. Every input trains every ramp. Ramps do not influence each other by gradients
    or by random numbers, so a ramp that is trained alone gets the same weights (Apparate section 3.1). Bridges are
    initialised from the backbone's blocks, their heads from the full model's head (PAME section 5.2).
    `features`: those of `exit_features`; None to compute them.
    """
    options, last = options or FitOptions(), model.num_blocks - 1
    features = features or exit_features(model, encoded, progress=options.progress)
    ramps = {block: model.exit_head(block) for block in model.ramp_indices}
    if "head" not in model.info.provenance:
        head, targets_N = {last: model.head}, torch.from_numpy(targets)
        _train_heads(model, head, features, model.task.training_loss, targets_N, options, "epochs, head")
    with torch.inference_mode():
        full_NC = model.head.classify(features[last].to(model.device)).cpu()
    loss = partial(model.task.imitation_loss, softness=SOFTNESS)
    _train_heads(model, ramps, features, loss, full_NC, options, "epochs, ramps")


def _train_heads(
    model: EarlyExitModel,
    heads: Mapping[int, Ramp],
    features: Mapping[int, Tensor],
    loss_of: Callable[[Tensor, Tensor], Tensor],
    wanted_N: Tensor,
    options: FitOptions,
    what: str,
) -> None:
    """Trains heads. `loss_of`: maps outputs, (B, C), and the entries of `wanted_N` for these inputs to their loss."""
    if not heads:
        return
    device, steps = model.device, count()
    has_dropout = {
        block for block, head in heads.items() if any(isinstance(module, nn.Dropout) for module in head.modules())
    }

    def losses(rows: Tensor) -> Iterator[Tensor]:
        step = next(steps)
        for block, head in heads.items():
            if block in has_dropout:  # a seed per head, so that heads do not influence each other
                torch.manual_seed(derived_seed(options.seed, block, step))
            yield loss_of(head.classify(features[block][rows].to(device)), wanted_N[rows].to(device))

    for block, head in heads.items():
        if not isinstance(head, BridgeRamp):
            reinitialise(head, derived_seed(options.seed, block))
        head.train()
    init_bridges(model)
    parameters = [parameter for head in heads.values() for parameter in head.parameters()]
    descent = Descent([(parameters, 1.0)], len(next(iter(features.values()))), options)
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        descent.run(losses, what)
    model.eval()


def reinitialise(head: nn.Module, seed: int) -> None:
    """Initialise a module's weights and the statistics of its norms at random, with the given seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for module in head.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()


def derived_seed(*numbers: int) -> int:
    """Returns a seed derived from the numbers."""
    return int(np.random.SeedSequence(numbers).generate_state(1)[0])


TIMED_INPUTS, TIMED_BATCH = 32, 8
"""Number of timed inputs, small so that calibration stays short, and their batch size, similar to a replica's."""
ROUNDS = 5


@torch.inference_mode()
def importance_of(
    model: EarlyExitModel, encoded: Sequence[Encoded], *, batch: int = 64, progress: Progress = no_progress
) -> list[npt.NDArray[np.float16]]:
    """Returns the attention that each token receives, (N,) per input, summed over blocks, heads and queries.

    It is rounded as a network's end in a service rounds it. Raises PlanError for networks that cannot measure it.
    """
    if not model.backbone.measures_importance:
        raise PlanError(
            f"{model.info.name}: words are pruned by the attention that they receive, which networks of the family "
            f"{model.info.family!r} cannot measure"
        )
    importances: dict[int, npt.NDArray[np.float16]] = {}
    for rows in batches_by_length(encoded, batch):
        tensors, layout = pack([encoded[row] for row in rows], model.device)
        tensors = (*tensors, torch.zeros(layout.num_tokens, device=model.device))
        importance_N = halved(model.run_blocks(0, model.num_blocks, tensors, layout)[-1])
        of_inputs = torch.split(importance_N, layout.lengths_B.tolist())
        importances |= {row: each.cpu().numpy() for row, each in zip(rows, of_inputs, strict=True)}
        progress("attention", len(importances), len(encoded))
    return [importances[row] for row in range(len(encoded))]


@torch.inference_mode()
def times_measured(model: EarlyExitModel, encoded: Sequence[Encoded]) -> float:
    """Returns the factor by which measuring attention increases a network's processor time, at least 1.

    It is the median over rounds, each with and without the measurement, on inputs of all lengths.
    """
    step = max(1, len(encoded) // TIMED_INPUTS)
    sample = sorted(encoded, key=lambda one_input: one_input.length)[::step][-TIMED_INPUTS:]
    batches = [pack(sample[k : k + TIMED_BATCH], model.device) for k in range(0, len(sample), TIMED_BATCH)]

    def time_s(*, measured: bool) -> float:
        start_s = time.process_time()
        for tensors, layout in batches:
            importance = (torch.zeros(layout.num_tokens, device=model.device),) if measured else ()
            model.run_blocks(0, model.num_blocks, (*tensors, *importance), layout)
        wait_for(model.device)
        return time.process_time() - start_s

    time_s(measured=True)  # warm-up
    return max(1.0, median(time_s(measured=True) / time_s(measured=False) for _ in range(ROUNDS)))
