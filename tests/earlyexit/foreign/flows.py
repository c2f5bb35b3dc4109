"""Dataflows for tests, in lines."""

from __future__ import annotations

from earlyexit.foreign.dataflow import Dataflow, Operator, OperatorKind


def flow_of(*lines: str, inputs: str = "x", outputs: str = "y") -> Dataflow:
    """Of lines like `b = work a w`; what no line gives, and is no input, is a weight."""
    operators = [_operator(index, *line.split(" = ")) for index, line in enumerate(lines)]
    given = {*inputs.split(), *(name for operator in operators for name in operator.outputs)}
    return Dataflow(
        operators=tuple(operators),
        inputs=tuple(inputs.split()),
        outputs=tuple(outputs.split()),
        weights=frozenset(name for operator in operators for name in operator.inputs) - given,
        shapes={},
        bytes_per_input={},
    )


def _operator(index: int, outputs: str, call: str) -> Operator:
    kind, *inputs = call.split()
    kinds: dict[str, OperatorKind] = {"work": "work", "light": "light", "sizes": "sizes", "random": "random"}
    return Operator(
        name=f"operator{index}", op=kind, kind=kinds[kind], inputs=tuple(inputs), outputs=tuple(outputs.split())
    )
