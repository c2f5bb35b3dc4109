"""Linear and mixed-integer programs, solved by HiGHS through `highspy`, its authors' interface.

`scipy.optimize` contains HiGHS as well, but it takes four times as long for a small program, half a second to import,
and lets HiGHS print to stdout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from optimizer.search.step import FloatArray, IntArray

INTEGER_GAP = 1e-4
"""Relative gap at which an integer program counts as solved."""
FEW_VARIABLES = 1000
"""With fewer variables, simplifying a linear program takes longer than solving it."""


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


def minimize(
    cost: FloatArray,
    terms: tuple[IntArray, IntArray, FloatArray],
    lower: FloatArray,
    upper: FloatArray,
    *,
    most: FloatArray | None = None,
    integers: IntArray | None = None,
    seconds: float = math.inf,
) -> Solution | None:
    """Returns the x of the least `cost @ x` with `lower <= A @ x <= upper` and `0 <= x <= most`.

    `terms` holds row, variable and value of each term of A; terms of the same place are summed. `integers` holds the
    variables that are integers. Returns None if no x satisfies the rows. Raises TimeoutError if none was found in
    `seconds` or, rarely, because numbers of too different magnitude defeat the solver.
    """
    from highspy import Highs, HighsLp, HighsModelStatus, HighsVarType, MatrixFormat

    places, term_places = np.unique(terms[0] * len(cost) + terms[1], return_inverse=True)
    program = HighsLp()
    program.num_col_, program.num_row_ = len(cost), len(lower)
    program.col_cost_, program.col_lower_ = cost, np.zeros(len(cost))
    program.col_upper_ = np.full(len(cost), math.inf) if most is None else most
    program.row_lower_, program.row_upper_ = lower, upper
    program.a_matrix_.format_ = MatrixFormat.kRowwise
    program.a_matrix_.start_ = np.searchsorted(places, np.arange(len(lower) + 1) * len(cost))
    program.a_matrix_.index_ = places % len(cost)
    program.a_matrix_.value_ = np.bincount(term_places, terms[2]).astype(np.float64)
    if integers is not None:
        kinds = [HighsVarType.kContinuous] * len(cost)
        for variable in integers:
            kinds[variable] = HighsVarType.kInteger
        program.integrality_ = kinds
    model = Highs()  # type: ignore[no-untyped-call]  # its constructor has no annotations
    model.setOptionValue("output_flag", False)
    model.setOptionValue("threads", 1)  # the planner may run beside a service
    model.setOptionValue("mip_rel_gap", INTEGER_GAP)
    model.setOptionValue("time_limit", seconds)
    if integers is None and len(cost) < FEW_VARIABLES:
        model.setOptionValue("presolve", "off")
    model.passModel(program)
    model.run()
    status, info, found = model.getModelStatus(), model.getInfo(), model.getSolution()
    if status == HighsModelStatus.kInfeasible:
        return None
    if not found.value_valid or (integers is None and status != HighsModelStatus.kOptimal):
        raise TimeoutError(f"HiGHS found no solution in {seconds:g} s: {model.modelStatusToString(status)}")
    return Solution(
        values=np.array(found.col_value),
        duals=np.array(found.row_dual),
        objective=info.objective_function_value,
        bound=info.mip_dual_bound,
    )
