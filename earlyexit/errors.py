"""All errors that Offramp raises on purpose, in one tree.

OfframpError                        500 INTERNAL
├── InputError                      400 INVALID_ARGUMENT    what came from outside is wrong
│   ├── UnauthorizedError           401 UNAUTHENTICATED     no key, or none that is known here; carries scheme
│   ├── UnknownModelError           404 NOT_FOUND
│   ├── UnknownPathError            404 NOT_FOUND
│   ├── ControlRefusedError         403                     an operator's order, at a service that takes none by HTTP
│   ├── MethodNotAllowedError       405
│   ├── NotAcceptableError          406                     an answer of a kind that is not given
│   ├── PayloadTooLargeError        413 RESOURCE_EXHAUSTED
│   ├── ContextLengthError          400 INVALID_ARGUMENT    a prompt and its answer are longer than the model takes
│   ├── UnprocessableInputError     422 INVALID_ARGUMENT    well-formed, but this model cannot take it
│   ├── PlanError                   422                     a plan that contradicts itself or does not fit its model
│   ├── DataError                   422                     training or calibration data that cannot be used
│   ├── ModelFolderError            422                     a folder that is not a saved model of a known schema
│   └── GraphError                  422                     a model's graph that cannot be read, or not be cut
├── RateLimitError                  429 RESOURCE_EXHAUSTED  more than this caller may send; carries retry_after_s
├── OverloadedError                 503 UNAVAILABLE         more is queued than allowed; carries retry_after_s
├── AdmissionError                  503 UNAVAILABLE         it would be answered too late, so it is not begun; the same
├── StageUnavailableError           503 UNAVAILABLE         no replica took the input in time; the same
├── ControllerUnavailableError      503 UNAVAILABLE         the controller does not answer; the same
├── SequenceLostError               503 UNAVAILABLE         a replica has nothing of this sequence any more; the same
├── VersionUnavailableError         503 UNAVAILABLE         another version of the model cannot be reached; the same
├── DeadlineError                   504 DEADLINE_EXCEEDED   the answer would have come too late
├── HeadLostError                   500                     Ray's head has ended under `offramp serve`
└── ExecutionError                  500 INTERNAL            the model itself failed on this input
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from pydantic import ValidationError


class OfframpError(Exception):
    """Base of the tree, with the status of an HTTP response, of a gRPC response and of a command."""

    http_status: ClassVar[int] = 500
    grpc_status: ClassVar[str] = "INTERNAL"
    exit_status: ClassVar[int] = 1
    kind: ClassVar[str] = "offramp"
    """The error's name in JSON answers, metrics and logs: `DeadlineError` -> `deadline`."""

    def __init_subclass__(
        cls, *, http_status: int | None = None, grpc_status: str | None = None, exit_status: int | None = None
    ) -> None:
        """A class names the statuses in which it differs from its base."""
        super().__init_subclass__()
        cls.http_status = http_status or cls.http_status
        cls.grpc_status = grpc_status or cls.grpc_status
        cls.exit_status = exit_status or cls.exit_status
        name = cls.__name__.removesuffix("Error")
        cls.kind = "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")

    @property
    def log_text(self) -> str:
        """The message for logs, which contains nothing that the caller sent."""
        return str(self)


class InputError(OfframpError, http_status=400, grpc_status="INVALID_ARGUMENT", exit_status=2):
    """What came from outside is wrong; the message says what was wrong and what is allowed."""

    param: str | None = None
    """The field of the request that is wrong; None if it is not known."""

    def __init__(self, message: str = "", *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class UnauthorizedError(InputError, http_status=401, grpc_status="UNAUTHENTICATED"):
    """A request without a key, or with one that is not known here; its message never quotes what was sent."""

    def __init__(self, message: str, *, scheme: str = "Bearer") -> None:
        """`scheme`: what the answer's WWW-Authenticate asks for."""
        super().__init__(message)
        self.scheme = scheme


class UnknownModelError(InputError, http_status=404, grpc_status="NOT_FOUND"):
    """A model or version that is not served here."""


class UnknownPathError(InputError, http_status=404, grpc_status="NOT_FOUND"):
    """A path that the server does not have."""


class ControlRefusedError(InputError, http_status=403):
    """An operator's order, at a service whose settings allow none by HTTP."""


class MethodNotAllowedError(InputError, http_status=405):
    """A path asked with a method that it does not take."""

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class NotAcceptableError(InputError, http_status=406):
    """A request whose `Accept` names no kind of answer that is given; the message says which are."""


class PayloadTooLargeError(InputError, http_status=413, grpc_status="RESOURCE_EXHAUSTED"):
    """A request body above the limit."""


class ContextLengthError(InputError):
    """A prompt that, alone or with the answer asked for, is longer than the model takes."""


class UnprocessableInputError(InputError, http_status=422):
    """A well-formed input that this model cannot take, such as a text beyond its length."""


class PlanError(InputError, http_status=422):
    """A plan that contradicts itself or does not fit its model."""


class DataError(InputError, http_status=422):
    """Training or calibration data that cannot be used."""


class ModelFolderError(InputError, http_status=422):
    """A folder that is not a saved model of a known schema."""


class GraphError(InputError, http_status=422):
    """The graph of a foreign model that cannot be read, or not be cut."""


class _RetryableError(OfframpError, http_status=503, grpc_status="UNAVAILABLE"):
    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s)
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:  # keyword arguments do not survive the default pickling
        return partial(type(self), retry_after_s=self.retry_after_s), (str(self),)


class RateLimitError(_RetryableError, http_status=429, grpc_status="RESOURCE_EXHAUSTED"):
    """More requests, or inputs, than the caller may send in this time."""


class OverloadedError(_RetryableError):
    """More inputs are queued than allowed."""


class AdmissionError(_RetryableError):
    """Under the present load and plan the answer would come after the input's deadline; no work is spent on it."""


class StageUnavailableError(_RetryableError):
    """No replica of a stage took the input in time."""


class ControllerUnavailableError(_RetryableError):
    """The controller does not answer; requests are served without it."""


class SequenceLostError(_RetryableError):
    """A replica has no keys and values of this sequence, or no longer: begun anew, it goes on as it would have."""


class VersionUnavailableError(_RetryableError):
    """Another version of the model cannot be reached."""


class DeadlineError(OfframpError, http_status=504, grpc_status="DEADLINE_EXCEEDED"):
    """The answer would have come after the input's deadline."""


class ExecutionError(OfframpError):
    """The model itself failed on this input: `the model failed on this input: KeyError: and its own words`."""

    @property
    def log_text(self) -> str:
        """Without the model's own words: they may quote the input."""
        return ": ".join(str(self).split(": ")[:2])


class HeadLostError(OfframpError, exit_status=4):
    """Ray's head, or raylet, has ended under a service of this machine, which is over with it.

    Its exit status is not 3, which says that there is no plan.
    """


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's name if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def first_mistake(error: ValidationError, whole: str) -> str:
    """Returns place and message of pydantic's first mistake; `whole`: what the document as a whole is called."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or whole}: {first['msg']}"
