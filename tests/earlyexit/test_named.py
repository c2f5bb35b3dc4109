from __future__ import annotations

import inspect
from dataclasses import dataclass

import grpc
import pytest

from earlyexit import errors
from earlyexit.errors import OfframpError
from earlyexit.named import NamedSpec, is_own, make_named

HERE = __name__
TABLE = {"circle": f"{HERE}:Circle", "lost": "no_such_module:Circle", "gone": f"{HERE}:Square"}


class Shape:
    """The kind of the named objects."""


@dataclass
class Circle(Shape):
    radius: float = 1.0

    def __post_init__(self) -> None:
        if self.radius <= 0:
            raise ValueError(f"the radius must be positive, not {self.radius}")


def own(*, radius: float) -> Circle:
    return Circle(2 * radius)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("network:build", True),
        ("my.nets:make", True),
        ("bert", False),
        ("org/model", False),
        ("C:/models/x", False),
        ("my.nets:", False),
        (":make", False),
        ("my..nets:make", False),
        ("a:b:c", False),
        ("", False),
    ],
)
def test_module_function_names_are_recognized(name: str, expected: bool) -> None:
    assert is_own(name) == expected


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        pytest.param({"name": "circle"}, Circle(1.0), id="of the table"),
        pytest.param({"name": "circle", "radius": 3.0}, Circle(3.0), id="with its settings"),
        pytest.param({"name": f"{HERE}:own", "radius": 3.0}, Circle(6.0), id="a function of one's own"),
    ],
)
def test_a_named_factory_is_called_with_its_settings(spec: NamedSpec, made: Circle) -> None:
    assert make_named(spec, TABLE, Shape) == made


KINDS = [
    pytest.param(each, id=each.__name__)
    for _, each in inspect.getmembers(errors, inspect.isclass)
    if issubclass(each, OfframpError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_grpc_status_of_client_or_server(kind: type[OfframpError]) -> None:
    callers = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED"}
    assert grpc.StatusCode[kind.grpc_status] is not grpc.StatusCode.OK
    assert (kind.grpc_status in callers) == (kind.http_status < 500)
