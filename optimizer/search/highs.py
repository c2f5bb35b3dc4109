"""Linear and mixed-integer programs, solved by HiGHS through `highspy`, its authors' interface.

`scipy.optimize` contains HiGHS as well, but it takes four times as long for a small program, half a second to import,
and lets HiGHS print to stdout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from optimizer.search.step import FloatArray, IntArray

INTEGER_GAP = 1e-4
"""Relative gap at which an integer program counts as solved."""
FEW_VARIABLES = 1000
"""With fewer variables, simplifying a linear program takes longer than solving it."""
Numbers = float | FloatArray
"""One number for each variable or row of a block, or the same number for all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best solution that was found."""

    values: FloatArray
    """Values of the variables."""
    duals: FloatArray
    """By row: how the objective grows with the row's limit. For linear programs only."""
    objective: float
    bound: float
    """Lower bound on the objective of an integer program."""


class Program:
    """A linear or mixed-integer program that is built from blocks of variables and of rows."""

    def __init__(self) -> None:
        from highspy import Highs

        self._model = Highs()  # type: ignore[no-untyped-call]  # its constructor has no annotations
        self._model.setOptionValue("output_flag", False)
        self._model.setOptionValue("threads", 1)  # the planner may run beside a service
        self._model.setOptionValue("mip_rel_gap", INTEGER_GAP)
        self._has_integers = False

    def variables(self, count: int, *, cost: Numbers = 0.0, is_integer: bool = False) -> IntArray:
        """Adds variables that are at least 0, and returns their indices."""
        added, none = np.arange(count) + self._model.getNumCol(), np.zeros(0, dtype=np.int64)
        limits = np.zeros(count), np.full(count, math.inf)
        self._model.addCols(count, np.full(count, cost, dtype=float), *limits, 0, none, none, np.zeros(0))
        if is_integer:
            self._has_integers = True
            self._model.changeColsIntegrality(count, added, np.ones(count, dtype=np.uint8))
        return added

    def rows(
        self, *terms: tuple[ArrayLike, ArrayLike], lower: Numbers = -math.inf, upper: Numbers = math.inf
    ) -> IntArray:
        """Adds rows that keep the sum of all `matrix @ x[variables]` within limits, and returns their indices.

        The matrices have a row for each new row, and a column for each of their variables. A vector is a single row.
        """
        values = np.hstack([np.atleast_2d(matrix) for matrix, _ in terms])
        row_T, column_T = np.nonzero(values)
        added = np.arange(len(values)) + self._model.getNumRow()
        limits = np.full(len(values), lower, dtype=float), np.full(len(values), upper, dtype=float)
        starts, variable_T = np.searchsorted(row_T, np.arange(len(values))), np.concatenate([each for _, each in terms])
        self._model.addRows(len(values), *limits, len(row_T), starts, variable_T[column_T], values[row_T, column_T])
        return added

    def minimum(self, seconds: float = math.inf) -> Solution | None:
        """Returns the solution of the least cost, or None if no values satisfy the rows.

        Raises TimeoutError if none was found in `seconds` or, rarely, because numbers of too different magnitude defeat
        the solver.
        """
        from highspy import HighsModelStatus

        model = self._model
        model.setOptionValue("time_limit", seconds)
        if not self._has_integers and model.getNumCol() < FEW_VARIABLES:
            model.setOptionValue("presolve", "off")
        model.run()
        status, info, found = model.getModelStatus(), model.getInfo(), model.getSolution()
        if status == HighsModelStatus.kInfeasible:
            return None
        if not found.value_valid or (not self._has_integers and status != HighsModelStatus.kOptimal):
            raise TimeoutError(f"HiGHS found no solution in {seconds:g} s: {model.modelStatusToString(status)}")
        return Solution(
            values=np.array(found.col_value),
            duals=np.array(found.row_dual),
            objective=info.objective_function_value,
            bound=info.mip_dual_bound,
        )
