from __future__ import annotations

from dataclasses import dataclass

import pytest

from earlyexit.errors import ModelFolderError
from earlyexit.named import NamedSpec, is_own, make_named

HERE = __name__
TABLE = {"circle": f"{HERE}:Circle", "lost": "no_such_module:Circle", "gone": f"{HERE}:Square"}


@dataclass
class Circle:
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
def test_a_module_and_a_function_are_told_from_other_names(name: str, expected: bool) -> None:
    assert is_own(name) == expected


@pytest.mark.parametrize(
    ("spec", "made"),
    [
        pytest.param({"name": "circle"}, Circle(1.0), id="of the table"),
        pytest.param({"name": "circle", "radius": 3.0}, Circle(3.0), id="with its settings"),
        pytest.param({"name": f"{HERE}:own", "radius": 3.0}, Circle(6.0), id="a function of one's own"),
    ],
)
def test_what_a_name_stands_for_is_called_with_the_settings_beside_it(spec: NamedSpec, made: Circle) -> None:
    assert make_named(spec, TABLE, called="shape") == made


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        pytest.param(
            {"name": "oval"},
            "unknown shape 'oval'; known: circle, lost, gone, or your own as module:function",
            id="not in the table",
        ),
        pytest.param(
            {"name": "no_such_module:f"}, "shape 'no_such_module:f' cannot be imported: .*PYTHONPATH", id="no module"
        ),
        pytest.param({"name": f"{HERE}:f"}, "cannot be imported: .* has no attribute 'f'", id="no function"),
        pytest.param({"name": "lost"}, "cannot be imported", id="a table's module that is not there"),
        pytest.param({"name": "gone"}, "has no attribute 'Square'", id="a table's class that is not there"),
        pytest.param(
            {"name": "circle", "width": 2},
            r"shape 'circle' does not take \{'width': 2\}: .*width",
            id="unknown setting",
        ),
        pytest.param(
            {"name": "circle", "radius": -1.0},
            "does not take .*: the radius must be positive, not -1.0",
            id="bad value",
        ),
        pytest.param({"name": f"{HERE}:own"}, "does not take {}: .*radius", id="a setting is missing"),
    ],
)
def test_what_cannot_be_made_is_refused_with_the_reason(spec: NamedSpec, message: str) -> None:
    with pytest.raises(ModelFolderError, match=message):
        make_named(spec, TABLE, called="shape")


def test_a_module_that_was_found_is_not_said_to_be_missing_from_the_path() -> None:
    with pytest.raises(ModelFolderError) as caught:
        make_named({"name": f"{HERE}:f"}, TABLE, called="shape")
    assert "PYTHONPATH" not in str(caught.value)
    assert f"({__file__}) has no attribute 'f'" in str(caught.value)


@pytest.mark.parametrize("spec", [{}, {"name": 3}, {"name": None}], ids=["no name", "a number", "null"])
def test_a_name_that_is_none_is_refused(spec: NamedSpec) -> None:
    with pytest.raises(ModelFolderError, match=r"a shape needs a name, which {.*} does not have"):
        make_named(spec, TABLE, called="shape")
