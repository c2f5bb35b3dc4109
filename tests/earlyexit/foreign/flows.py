"""Dataflows as lines of text, and cut tensors found by removing each tensor, which `cut_tensors` must equal."""

from __future__ import annotations

from collections.abc import Iterable

from earlyexit.foreign.dataflow import Dataflow, Operator, OperatorKind


def flow_of(*lines: str, inputs: str = "x", outputs: str = "y") -> Dataflow:
    """Parses lines like `b = work a w`. Tensors that no line computes and that are no inputs are weights."""
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


def carriers_by_removal(flow: Dataflow) -> list[str]:
    """Returns the tensors, except inputs, without which no output depends on any input, in the order of operators."""
    free = _free(flow)
    if not _reached(flow, free, set()):
        return []
    made = [name for operator in flow.operators for name in operator.outputs if name not in free]
    return [name for name in made if not _reached(flow, free, {name})]


def disconnects(flow: Dataflow, tensors: Iterable[str]) -> bool:
    """Whether no output depends on any input without these tensors."""
    return not _reached(flow, _free(flow), set(tensors))


def _free(flow: Dataflow) -> set[str]:
    free = {*flow.weights, *(flow.layout & set(flow.inputs))}
    for operator in flow.operators:
        if operator.kind == "sizes" or (operator.kind != "random" and all(name in free for name in operator.inputs)):
            free |= set(operator.outputs)
    return free


def _reached(flow: Dataflow, free: set[str], removed: set[str]) -> bool:
    """Whether an output depends on an input without the removed tensors."""
    known = set(flow.inputs) - free - removed
    for operator in flow.operators:
        if operator.kind == "sizes":
            continue
        if known.intersection(operator.inputs) or operator.kind == "random":
            known |= set(operator.outputs) - free - removed
    return bool(known & set(flow.outputs))
