"""Gradient descent: options, optimizer, one-cycle schedule, and the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

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
    label_smoothing: float = 0.0
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
        self.sizes = _batch_sizes(num_inputs, options.batch, least_batch)
        """The sizes of an epoch's batches."""
        groups = [{"params": list(each)} for each in (parameters, slower) if each]
        largest = [options.learning_rate, options.learning_rate * pace][-len(groups) :] if slower else None
        self.optimizer = OPTIMIZERS[optimizer](groups, options)
        self.generator = torch.Generator().manual_seed(options.seed)
        steps = max(3, options.epochs * len(self.sizes))  # two rise, one falls: with fewer, torch divides by 0
        self.schedule = OneCycleLR(
            self.optimizer,
            max_lr=largest or options.learning_rate,
            total_steps=steps,
            pct_start=max(RISING, 2 / steps),
        )

    def epoch(self, loss: Callable[[Tensor], Tensor]) -> float:
        """Train one epoch in random batches; returns the mean loss. `loss`: of the inputs at the given positions."""
        total = 0.0
        for rows in self._batches():
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

    def _batches(self) -> Iterator[Tensor]:
        return iter(torch.split(torch.randperm(self.num_inputs, generator=self.generator), self.sizes))

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


def _batch_sizes(num_inputs: int, batch: int, least_batch: int) -> list[int]:
    full, rest = divmod(num_inputs, batch)
    if full and rest < least_batch:
        return [batch] * (full - 1) + [batch + rest]
    return [batch] * full + [rest] * (rest > 0)
