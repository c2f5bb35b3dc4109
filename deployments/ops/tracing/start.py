"""Starts tracing where the settings ask for it, and otherwise imports nothing of OpenTelemetry."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from deployments.settings import ServeSettings
from earlyexit.clock import Clock
from earlyexit.errors import InputError

if TYPE_CHECKING:
    from deployments.ops.tracing.tracer import Tracer


def start_tracing(settings: ServeSettings, clock: Clock, starts: Collection[int] = ()) -> Tracer | None:
    """Returns the tracer that the settings ask for; without one, OpenTelemetry is not imported.

    `starts`: the first block of each network of a chain.
    """
    if settings.tracing is None:
        return None
    from deployments.ops.tracing.tracer import build_tracer

    return build_tracer(settings.tracing, settings.app, clock, starts)


def check_tracing(settings: ServeSettings) -> None:
    """Raises InputError if the settings ask for traces and the exporter is not installed."""
    if settings.tracing is None:
        return
    try:
        import opentelemetry.exporter.otlp.proto.http  # noqa: F401 # only whether it is there
    except ImportError as error:
        raise InputError(
            "tracing needs OpenTelemetry's exporter over OTLP/HTTP: install Offramp with its extra 'tracing', "
            f"pip install '.[tracing]' ({error})"
        ) from error
