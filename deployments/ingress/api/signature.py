"""What a model takes and gives, for everything in the API that says or checks it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from earlyexit.codecs.base import Codec
from earlyexit.signature import Column
from earlyexit.tasks.base import Task

EXIT = Column(name="exit", datatypes=("INT32",))
"""The block that an input left after; every task's answers have it."""
EXIT_SCHEMA = {
    "type": "integer",
    "description": "The block it left after; the model's last block for inputs that no ramp let out.",
}


class Signature:
    """A codec's inputs and a task's outputs."""

    def __init__(self, codec: Codec[Any], task: Task) -> None:
        self.codec = codec
        self.task = task
        self.inputs = codec.inputs
        self.outputs = (*task.columns, EXIT)
        self.output_names = tuple(column.name for column in self.outputs)

    @property
    def input_tensors(self) -> list[dict[str, Any]]:
        """Of the model's metadata: every input in the form that is preferred."""
        preferred = {column.name: column for column in reversed(self.inputs)}
        return [_tensor(preferred[name]) for name in dict.fromkeys(column.name for column in self.inputs)]

    @property
    def output_tensors(self) -> list[dict[str, Any]]:
        return [_tensor(column) for column in self.outputs]

    @property
    def answer_schema(self) -> Mapping[str, Any]:
        """The JSON schema of one answer of `POST /predict`."""
        properties = {**self.task.json_schema, EXIT.name: EXIT_SCHEMA}
        return {"type": "object", "properties": properties, "required": list(properties)}


def _tensor(column: Column) -> dict[str, Any]:
    return {"name": column.name, "datatype": column.datatype, "shape": [-1, *column.shape]}
