"""Precision with exits: PAME's equation 1, and its update behind a further exit (section 6.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from profiles.outcome import ExitOutcome
from profiles.scores import BoolArray, FloatArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """What one exit does to those who reach it; precision is 1 - mean loss: of labels, the share that is right."""

    leaving: float
    """r_e: share of those who reach the exit that return from it."""
    of_leaving: float
    """Q_e: mean precision of these; 1 where nobody does."""
    of_moving: float
    """Q_m: mean precision of the others at the model's end; 1 where there are none."""

    @classmethod
    def measured(
        cls, inside_N: BoolArray, leave_N: BoolArray, exit_losses_N: FloatArray, end_losses_N: FloatArray
    ) -> Precision:
        """Of the inputs inside, some of whom leave."""
        going_N, moving_N = inside_N & leave_N, inside_N & ~leave_N
        reaching = int(inside_N.sum())
        return cls(
            leaving=int(going_N.sum()) / reaching if reaching else 0.0,
            of_leaving=_precision(exit_losses_N[going_N]),
            of_moving=_precision(end_losses_N[moving_N]),
        )

    @property
    def overall(self) -> float:
        """Equation 1: Q = r_e Q_e + (1 - r_e) Q_m."""
        return self.with_moving(self.of_moving)

    def with_moving(self, of_moving: float) -> float:
        """The same, when those who move on meet another exit, whose own Q is `of_moving`."""
        return self.leaving * self.of_leaving + (1 - self.leaving) * of_moving


def overall(exits: Sequence[Precision], of_nobody: float = 1.0) -> float:
    """Q of several exits in their order: behind each, Q_m is the next one's Q. `of_nobody`: without any exit."""
    if not exits:
        return of_nobody
    found = exits[-1].overall
    for each in reversed(exits[:-1]):
        found = each.with_moving(found)
    return found


def normalised(outcome: ExitOutcome) -> float:
    """Accuracy over that of the model without exits (section 7.2); where truth is not known, agreement with it."""
    accuracy, full_accuracy = outcome.accuracy, outcome.full_accuracy
    if accuracy is None or not full_accuracy:
        return outcome.agreement
    return accuracy / full_accuracy


def _precision(losses_N: FloatArray) -> float:
    return 1 - float(losses_N.mean()) if len(losses_N) else 1.0
