"""Linear and mixed-integer programs, solved by HiGHS through `highspy`, its authors' interface.

`scipy.optimize` contains HiGHS as well, but it takes four times as long for a small program, half a second to import,
and lets HiGHS print to stdout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from profiles.scores import FloatArray, IntArray

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
        self._costs, self._are_integers = list[float](), list[bool]()
        self._lower, self._upper = list[float](), list[float]()
        self._terms: list[tuple[IntArray, IntArray, ArrayLike]] = []
        """Rows as a column, variables, and matrix."""

    def variables(self, count: int, *, cost: Numbers = 0.0, is_integer: bool = False) -> IntArray:
        """Adds variables that are at least 0, and returns their indices."""
        added = np.arange(count) + len(self._costs)
        self._costs += np.full(count, cost).tolist()
        self._are_integers += [is_integer] * count
        return added

    def rows(
        self, *terms: tuple[ArrayLike, IntArray], lower: Numbers = -math.inf, upper: Numbers = math.inf
    ) -> IntArray:
        """Adds rows that keep the sum of all `matrix @ x[variables]` within limits, and returns their indices.

        The matrices have a row for each new row, and a column for each of their variables. A vector is a single row.
        """
        added = np.arange(len(np.atleast_2d(terms[0][0]))) + len(self._lower)
        self._lower += np.full(len(added), lower).tolist()
        self._upper += np.full(len(added), upper).tolist()
        self._terms += [(added[:, None], variables, matrix) for matrix, variables in terms]
        return added

    def minimum(self, seconds: float = math.inf) -> Solution | None:
        """Returns the solution of the least cost, or None if no values satisfy the rows.

        Raises TimeoutError if none was found in `seconds` or, rarely, because numbers of too different magnitude defeat
        the solver.
        """
        from highspy import Highs, HighsModelStatus, MatrixFormat, ObjSense

        model, has_integers = Highs(), any(self._are_integers)  # type: ignore[no-untyped-call]  # it has no annotations
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 1)  # the planner may run beside a service
        model.setOptionValue("mip_rel_gap", INTEGER_GAP)
        model.setOptionValue("time_limit", seconds)
        if not has_integers and len(self._costs) < FEW_VARIABLES:
            model.setOptionValue("presolve", "off")
        matrix_RV = np.zeros((len(self._lower), len(self._costs)))
        for row_B1, variable_B, matrix in self._terms:
            matrix_RV[row_B1, variable_B] = np.asarray(matrix)
        row_T, column_T = np.nonzero(matrix_RV)
        sizes = len(self._costs), len(self._lower), len(row_T)
        form = int(MatrixFormat.kRowwise), int(ObjSense.kMinimize), 0.0
        variables = np.array(self._costs), np.zeros(sizes[0]), np.full(sizes[0], math.inf)
        limits, are_integers = (np.array(self._lower), np.array(self._upper)), np.array(self._are_integers, np.int32)
        starts_R, value_T = np.searchsorted(row_T, np.arange(sizes[1])).astype(np.int32), matrix_RV[row_T, column_T]
        column_T32 = column_T.astype(np.int32)
        model.passModel(*sizes, *form, *variables, *limits, starts_R, column_T32, value_T, are_integers)
        model.run()
        status, info, found = model.getModelStatus(), model.getInfo(), model.getSolution()
        if status == HighsModelStatus.kInfeasible:
            return None
        if not found.value_valid or (not has_integers and status != HighsModelStatus.kOptimal):
            raise TimeoutError(f"HiGHS found no solution in {seconds:g} s: {model.modelStatusToString(status)}")
        return Solution(
            values=np.array(found.col_value),
            duals=np.array(found.row_dual),
            objective=info.objective_function_value,
            bound=info.mip_dual_bound,
        )
