"""Steps down a loss: optimizer, one-cycle schedule, and the order of the inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

Parameters = Sequence[torch.nn.Parameter]
Groups = list[dict[str, Any]]
"""Of parameters, each with a learning rate of its own."""
RISING = 0.1
"""The share of all steps in which steps grow larger, before they grow smaller (Smith and Topin 2018)."""


class Pace(Protocol):
    """How long and how fast to learn: as `TrainOptions` has it."""

    @property
    def epochs(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def seed(self) -> int: ...


OPTIMIZERS: Mapping[str, Callable[[Groups, Pace], Optimizer]] = {
    "adamw": lambda parameters, options: AdamW(parameters, lr=options.learning_rate, weight_decay=options.weight_decay),
    "sgd": lambda parameters, options: SGD(
        parameters, lr=options.learning_rate, momentum=0.9, nesterov=True, weight_decay=options.weight_decay
    ),
}


class Descent:
    """A training run's steps, epoch by epoch; its state can be kept and taken up again."""

    def __init__(
        self,
        parameters: Parameters,
        num_inputs: int,
        options: Pace,
        *,
        optimizer: str = "adamw",
        least_batch: int = 1,
        slower: Parameters = (),
        pace: float = 1.0,
    ) -> None:
        """Parameters take gradients from now on, until `done`; those that are `slower` in steps of this share.

        An epoch's last batch, if it is of fewer than `least_batch` inputs, is one with that before it.
        """
        self.parameters = [*parameters, *slower]
        for parameter in self.parameters:
            parameter.requires_grad_(True)
        self.num_inputs = num_inputs
        self.sizes = _batch_sizes(num_inputs, options.batch, least_batch)
        """Of an epoch's batches."""
        groups = [{"params": list(each)} for each in (parameters, slower) if each]
        largest = [options.learning_rate, options.learning_rate * pace][-len(groups) :] if slower else None
        self.optimizer = OPTIMIZERS[optimizer](groups, options)
        self.generator = torch.Generator().manual_seed(options.seed)
        steps = max(3, options.epochs * len(self.sizes))  # two that rise, one that falls: of less, torch divides by 0
        self.schedule = OneCycleLR(
            self.optimizer,
            max_lr=largest or options.learning_rate,
            total_steps=steps,
            pct_start=max(RISING, 2 / steps),
        )

    def epoch(self, loss: Callable[[Tensor], Tensor]) -> float:
        """A step for every batch of inputs, drawn anew; the mean loss. `loss` is of the inputs at given positions."""
        total = 0.0
        for rows in self._batches():
            self.optimizer.zero_grad(set_to_none=True)
            value = loss(rows)
            value.backward()  # type: ignore[no-untyped-call] # torch leaves it untyped
            self.optimizer.step()
            self.schedule.step()
            total += float(value.detach()) * len(rows)
        return total / self.num_inputs

    def _batches(self) -> Iterator[Tensor]:
        return iter(torch.split(torch.randperm(self.num_inputs, generator=self.generator), self.sizes))

    def done(self) -> None:
        """Parameters take no gradients any more."""
        for parameter in self.parameters:
            parameter.requires_grad_(False)

    def state(self) -> dict[str, Any]:
        """All that the next epoch depends on, but for the parameters."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": self.schedule.state_dict(),
            "generator": self.generator.get_state(),
        }

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Go on as `state` of an equal run would."""
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.generator.set_state(state["generator"])


def _batch_sizes(num_inputs: int, batch: int, least_batch: int) -> list[int]:
    full, rest = divmod(num_inputs, batch)
    if full and rest < least_batch:
        return [batch] * (full - 1) + [batch + rest]
    return [batch] * full + [rest] * (rest > 0)
