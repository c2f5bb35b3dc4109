"""All errors that Offramp raises on purpose, in one tree.

OfframpError                        500 INTERNAL
├── InputError                      400 INVALID_ARGUMENT    a request, file or option is wrong
│   ├── UnauthorizedError           401 UNAUTHENTICATED     the key is missing or unknown; carries scheme
│   ├── UnknownModelError           404 NOT_FOUND
│   ├── UnknownPathError            404 NOT_FOUND
│   ├── ControlRefusedError         403                     the service accepts no operator commands over HTTP
│   ├── MethodNotAllowedError       405
│   ├── NotAcceptableError          406                     no response has a type that the request accepts
│   ├── PayloadTooLargeError        413 RESOURCE_EXHAUSTED
│   ├── ContextLengthError          400 INVALID_ARGUMENT    prompt and answer are longer than the model's context
│   ├── UnprocessableInputError     422 INVALID_ARGUMENT    well-formed, but this model cannot process it
│   ├── PlanError                   422                     a plan that contradicts itself or does not fit its model
│   ├── DataError                   422                     training or calibration data that cannot be used
│   ├── ModelFolderError            422                     a folder that is not a saved model of a known schema
│   └── GraphError                  422                     a model's graph that cannot be read or cannot be cut
├── RateLimitError                  429 RESOURCE_EXHAUSTED  the caller sent more than its limit
├── OverloadedError                 503 UNAVAILABLE         the queue is full
├── AdmissionError                  503 UNAVAILABLE         the answer would be too late, so no work is started
├── StageUnavailableError           503 UNAVAILABLE         there is no plan, or calls of a stage failed too often
├── ControllerUnavailableError      503 UNAVAILABLE         the controller does not answer
├── SequenceLostError               503 UNAVAILABLE         the replica has lost the keys and values of the sequence
├── VersionUnavailableError         503 UNAVAILABLE         another version of the model cannot be reached
├── DeadlineError                   504 DEADLINE_EXCEEDED   the answer would have come after the deadline
├── HeadLostError                   500                     Ray's head node died under `offramp serve`
└── ExecutionError                  500 INTERNAL            the model raised an error for this input
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError


class OfframpError(Exception):
    """The base class. Each class defines an HTTP status, a gRPC status and the exit status of a command."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    exit_status: ClassVar[int] = 1
    kind: ClassVar[str] = "offramp"
    """The error's name in JSON responses, metrics and logs: `DeadlineError` -> `deadline`."""

    def __init_subclass__(
        cls, *, http_status: int | None = None, grpc_status: str | None = None, exit_status: int | None = None
    ) -> None:
        """Sets the statuses that differ from the base class."""
        super().__init_subclass__()
        cls.http_status = http_status or cls.http_status
        cls.grpc_status = grpc_status or cls.grpc_status
        cls.exit_status = exit_status or cls.exit_status
        name = cls.__name__.removesuffix("Error")
        cls.kind = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")

    @property
    def log_text(self) -> str:
        """The message for logs. It must not contain data of the caller."""
        return str(self)


class InputError(OfframpError, http_status=400, grpc_status="INVALID_ARGUMENT", exit_status=2):
    """A request, file or option is wrong. The message names the mistake and the allowed values."""

    param: str | None = None
    """The name of the wrong request field. None: not known."""
    at: tuple[str | int, ...] = ()
    """The path of the wrong value inside the document or object that was checked. Readers of files find its line."""

    def __init__(self, message: str = "", *, param: str | None = None, at: tuple[str | int, ...] = ()) -> None:
        super().__init__(message)
        self.param, self.at = param, at


@contextmanager
def within(*path: str | int) -> Iterator[None]:
    """Adds a path in front of the path of an InputError that is raised in the block."""
    try:
        yield
    except InputError as error:
        error.at = (*path, *error.at)
        raise


@contextmanager
def raising(kind: type[OfframpError], words: str, *caught: type[Exception]) -> Iterator[None]:
    """Raises an error of this kind, with these words and the reason, in place of a caught error of the block."""
    try:
        yield
    except caught as error:
        raise kind(f"{words}: {getattr(error, 'strerror', None) or error}") from error


class UnauthorizedError(InputError, http_status=401, grpc_status="UNAUTHENTICATED"):
    """The API key is missing or unknown. The message never quotes the key."""

    def __init__(self, message: str, *, scheme: str = "Bearer") -> None:
        """`scheme`: the authentication scheme that the response's WWW-Authenticate header names."""
        super().__init__(message)
        self.scheme = scheme


class UnknownModelError(InputError, http_status=404, grpc_status="NOT_FOUND"):
    """The service does not serve the model or version."""


class UnknownPathError(InputError, http_status=404, grpc_status="NOT_FOUND"):
    """The server has no such path."""


class ControlRefusedError(InputError, http_status=403):
    """The settings of this service allow no operator commands over HTTP."""


class MethodNotAllowedError(InputError, http_status=405):
    """The path does not support the request's HTTP method."""

    def __init__(self, message: str, *, allowed: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.allowed = allowed


class NotAcceptableError(InputError, http_status=406):
    """The `Accept` header names no supported media type. The message lists the supported types."""


class PayloadTooLargeError(InputError, http_status=413, grpc_status="RESOURCE_EXHAUSTED"):
    """The request body is larger than the limit."""


class ContextLengthError(InputError):
    """Prompt and answer exceed the model's context. Clients know it by OpenAI's words, `maximum context length is`."""


class UnprocessableInputError(InputError, http_status=422):
    """A well-formed input that this model cannot process, such as a text longer than its context."""


class PlanError(InputError, http_status=422):
    """A plan that contradicts itself or does not fit its model."""


class DataError(InputError, http_status=422):
    """Training or calibration data that cannot be used."""


class ModelFolderError(InputError, http_status=422):
    """A folder that is not a saved model of a known schema."""


class GraphError(InputError, http_status=422):
    """The graph of a foreign model cannot be read or cannot be cut."""


class RetryableError(OfframpError, http_status=503, grpc_status="UNAVAILABLE"):
    """Base class of the errors with status 429 or 503, which carry the time to wait before a retry, usually 1 s."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message, retry_after_s)  # all arguments, from which pickle makes an equal error
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])


class RateLimitError(RetryableError, http_status=429, grpc_status="RESOURCE_EXHAUSTED"):
    """The caller exceeded its limit of requests per second."""


class OverloadedError(RetryableError):
    """More inputs are queued than allowed."""


class AdmissionError(RetryableError):
    """Admission control refused the input: under the current load, its answer would come after its deadline."""


class StageUnavailableError(RetryableError):
    """The service has no plan, or calls of a stage failed too often."""


class ControllerUnavailableError(RetryableError):
    """The controller does not answer. Requests are still served."""


class SequenceLostError(RetryableError):
    """The replica lacks the keys and values of a sequence. If the sequence restarts, it generates the same tokens."""


class VersionUnavailableError(RetryableError):
    """Another version of the model cannot be reached."""


class DeadlineError(OfframpError, http_status=504, grpc_status="DEADLINE_EXCEEDED"):
    """The answer would have come after the input's deadline."""


class ExecutionError(OfframpError):
    """The model raised an error: `the model failed on this input: CLASS: MESSAGE`."""

    @property
    def log_text(self) -> str:
        """The message up to the class of the model's error, because the rest may quote the input."""
        return ": ".join(str(self).split(": ")[:2])


class HeadLostError(OfframpError, exit_status=4):
    """Ray's head node or raylet died, which ends the service. Exit status 3 already means that no plan exists."""


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the name of its class if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def first_mistake(error: ValidationError, whole: str) -> str:
    """Returns the location and message of pydantic's first error; `whole`: the name of the document itself."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg'].removeprefix('Value error, ')}"
