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
    """Of the variables."""
    duals: FloatArray
    """Of the rows: how the objective grows with a row's limit. For linear programs only."""
    objective: float
    bound: float
    """Lower bound on the objective of an integer program."""


class Program:
    """A linear or mixed-integer program that is built from blocks of variables and of rows."""

    def __init__(self) -> None:
        self._cost: list[FloatArray] = []
        self._most: list[FloatArray] = []
        self._integers: list[IntArray] = []
        self._lower: list[FloatArray] = []
        self._upper: list[FloatArray] = []
        self._terms: list[tuple[IntArray, IntArray, FloatArray]] = []
        """Row, variable and value of the nonzeros of each matrix."""
        self._num_variables = self._num_rows = 0

    def variables(
        self, count: int, *, cost: Numbers = 0.0, most: Numbers = math.inf, is_integer: bool = False
    ) -> IntArray:
        """Adds variables between 0 and `most`, and returns their indices."""
        added = np.arange(self._num_variables, self._num_variables + count)
        self._num_variables += count
        self._cost.append(np.full(count, cost, dtype=float))
        self._most.append(np.full(count, most, dtype=float))
        self._integers.append(added if is_integer else added[:0])
        return added

    def rows(
        self, *terms: tuple[ArrayLike, ArrayLike], lower: Numbers = -math.inf, upper: Numbers = math.inf
    ) -> IntArray:
        """Adds rows that keep the sum of all `matrix @ x[variables]` within limits, and returns their indices.

        The matrices have a row for each new row, and a column for each of their variables. A vector is a single row.
        """
        for matrix, variables in terms:
            values = np.atleast_2d(matrix)
            row_T, column_T = np.nonzero(values)
            self._terms.append((self._num_rows + row_T, np.asarray(variables)[column_T], values[row_T, column_T]))
        added = np.arange(self._num_rows, self._num_rows + len(values))
        self._num_rows += len(added)
        self._lower.append(np.full(len(added), lower, dtype=float))
        self._upper.append(np.full(len(added), upper, dtype=float))
        return added

    def minimum(self, seconds: float = math.inf) -> Solution | None:
        """Returns the solution of the least cost, or None if no values satisfy the rows.

        Raises TimeoutError if none was found in `seconds` or, rarely, because numbers of too different magnitude defeat
        the solver.
        """
        from highspy import Highs, HighsLp, HighsModelStatus, HighsVarType, MatrixFormat

        row_T, variable_T, value_T = (np.concatenate(parts) for parts in zip(*self._terms, strict=True))
        order_T, integers = np.argsort(row_T, kind="stable"), np.concatenate(self._integers)
        program = HighsLp()
        program.num_col_, program.num_row_ = self._num_variables, self._num_rows
        program.col_cost_, program.col_lower_ = np.concatenate(self._cost), np.zeros(self._num_variables)
        program.col_upper_ = np.concatenate(self._most)
        program.row_lower_, program.row_upper_ = np.concatenate(self._lower), np.concatenate(self._upper)
        program.a_matrix_.format_ = MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.searchsorted(row_T[order_T], np.arange(self._num_rows + 1))
        program.a_matrix_.index_, program.a_matrix_.value_ = variable_T[order_T], value_T[order_T]
        if len(integers):
            kinds = [HighsVarType.kContinuous] * self._num_variables
            for variable in integers:
                kinds[variable] = HighsVarType.kInteger
            program.integrality_ = kinds
        model = Highs()  # type: ignore[no-untyped-call]  # its constructor has no annotations
        model.setOptionValue("output_flag", False)
        model.setOptionValue("threads", 1)  # the planner may run beside a service
        model.setOptionValue("mip_rel_gap", INTEGER_GAP)
        model.setOptionValue("time_limit", seconds)
        if not len(integers) and self._num_variables < FEW_VARIABLES:
            model.setOptionValue("presolve", "off")
        model.passModel(program)
        model.run()
        status, info, found = model.getModelStatus(), model.getInfo(), model.getSolution()
        if status == HighsModelStatus.kInfeasible:
            return None
        if not found.value_valid or (not len(integers) and status != HighsModelStatus.kOptimal):
            raise TimeoutError(f"HiGHS found no solution in {seconds:g} s: {model.modelStatusToString(status)}")
        return Solution(
            values=np.array(found.col_value),
            duals=np.array(found.row_dual),
            objective=info.objective_function_value,
            bound=info.mip_dual_bound,
        )
