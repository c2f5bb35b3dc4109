from __future__ import annotations

import inspect

import grpc
import pytest

from earlyexit import errors
from earlyexit.errors import OfframpError

KINDS = [
    pytest.param(each, id=each.__name__)
    for _, each in inspect.getmembers(errors, inspect.isclass)
    if issubclass(each, OfframpError)
]


@pytest.mark.parametrize("kind", KINDS)
def test_every_error_has_a_status_of_grpc_that_says_whose_fault_it_is(kind: type[OfframpError]) -> None:
    callers = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "UNAUTHENTICATED", "PERMISSION_DENIED"}
    assert grpc.StatusCode[kind.grpc_status] is not grpc.StatusCode.OK
    assert (kind.grpc_status in callers) == (kind.http_status < 500)
