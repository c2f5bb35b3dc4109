"""`offramp serve`: a model's folder, or a service file, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from earlyexit.errors import HeadLostError, InputError
from offramp.cli.fields import nested, takes_fields, validated
from offramp.cli.options import optional_http_address

if TYPE_CHECKING:
    from deployments.settings import ServeSettings
    from earlyexit.network.store import ModelCard
    from offramp.spec.documents import IngressDocument, PlanOptions
    from optimizer.plan import Plan

EXAMPLES = {"text": "'a text'", "text_pair": "'a text' 'another'", "image": "photo.jpg"}
"""Arguments of `offramp predict`, by codec."""
OPTIONS = {
    "plan": "plan.plan",
    "batch": "plan.batch",
    "replicas": "plan.replicas",
    "device": "plan.device",
    "order": "plan.order",
    "port": "ingress.port",
    "host": "ingress.host",
    "front": "ingress.front",
    "ingress_replicas": "ingress.replicas",
    "dtype": "model.dtype",
    "hop_dtype": "model.hop_dtype",
    "backend": "model.backend",
    "attention": "model.attention",
    "threads": "model.threads_per_replica",
    "kv_tokens": "model.kv_tokens",
    "kv_fill": "model.kv_fill",
    "max_queued": "ingress.max_queued",
    "max_body_bytes": "ingress.max_body_bytes",
    "max_held_bytes": "ingress.max_held_bytes",
    "timeout_s": "ingress.default_timeout_s",
    "token_timeout_s": "ingress.token_timeout_s",
    "grpc_port": "ingress.grpc_port",
    "trace_ratio": "tracing.ratio",
    "api_keys": "access.keys_file",
    "rate_limit": "access.rate_per_s",
    "cors_origin": "access.cors_origins",
}
"""Options of `offramp serve`, and the fields of `FolderDocument` that they are."""
BESIDE_A_FILE = {"model", "port", "grpc_port", "metrics_port", "restart"}

Model = Annotated[Path, typer.Argument(help="Model folder, or a service file, which says all but the ports itself.")]
MetricsPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of the Prometheus metrics; default: a free one.")
]
OtlpEndpoint = Annotated[
    str | None, typer.Option(callback=optional_http_address, help="OpenTelemetry collector, for traces.")
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start anew when Ray's head has died, rather than end with status 4.")
]


@takes_fields("offramp.spec.documents:FolderDocument", OPTIONS)
def serve(
    context: typer.Context,
    model: Model,
    metrics_port: MetricsPort = None,
    otlp_endpoint: OtlpEndpoint = None,
    restart: Restart = False,
    **given: Any,
) -> None:
    """Serve a model, or a service file's, on this machine until it is told to stop (Ctrl-C or SIGTERM)."""
    if model.is_file():
        _refuse_beside_a_file(context)
        from offramp.spec.file import read_service

        found = read_service(model)
        ports = {name: given[name] for name in ("port", "grpc_port") if given[name] is not None}
        _serve_until_stopped(
            found.settings, found.ingress.model_copy(update=ports), metrics_port=metrics_port, restart=restart
        )
        return
    from offramp.spec.application import application_settings
    from offramp.spec.documents import FolderDocument

    if otlp_endpoint is None and given["trace_ratio"] is not None:
        raise InputError("--trace-ratio is of the requests whose traces go to --otlp-endpoint, which is missing")
    options = OPTIONS | {"folder": "model.folder", "otlp_endpoint": "tracing.endpoint"}
    asked = nested(options, given | {"folder": str(model), "otlp_endpoint": otlp_endpoint})
    document: FolderDocument = validated(FolderDocument, asked)
    settings = application_settings(document, _plan_of(document.plan, model))
    _serve_until_stopped(settings, document.ingress, metrics_port=metrics_port, restart=restart)


def _plan_of(asked: PlanOptions, model: Path) -> Plan:
    from offramp.commands.order import order_option
    from offramp.spec.application import resolve_plan

    given = asked.model_dump(exclude={"plan", "order"}, exclude_unset=True)
    return resolve_plan(asked.plan, model, order=order_option(asked.order), **given)


def _refuse_beside_a_file(context: typer.Context) -> None:
    given = {name for name, value in context.params.items() if value not in (None, [], ())}
    refused = sorted(f"--{name.replace('_', '-')}" for name in given - BESIDE_A_FILE)
    if refused:
        allowed = "--port, --grpc-port, --metrics-port, --restart"
        raise InputError(f"{' and '.join(refused)}: the service file says it; only {allowed} go with one")


def _serve_until_stopped(
    settings: ServeSettings, ingress: IngressDocument, *, metrics_port: int | None, restart: bool
) -> None:
    """Serve on this machine until Ctrl-C or SIGTERM.

    The process ends, or restarts itself, when Ray's head is lost.
    """
    from deployments.local_ray.cluster import LocalCluster, serving
    from earlyexit.network.store import read_card
    from offramp.spec.application import exposure_notes, with_environment

    stopping = _stop_once()
    environment = dict(os.environ)  # before Ray, and its switches, are put into it
    settings = with_environment(settings)
    listening = ingress.model_dump(include={"port", "host", "front", "grpc_port"})
    cluster = LocalCluster(**listening, metrics_port=metrics_port)
    try:
        with serving(settings, cluster, lambda lost: _leave(lost, environment if restart else None)) as url:
            card = read_card(Path(settings.model))
            print(f"serving {card.name} at {url}   API: {url}/docs")
            print(f"live page at {url}/dashboard   metrics at {url}/metrics")
            if cluster.grpc_port is not None:
                print(f"gRPC at {cluster.address}:{cluster.grpc_port}")
            if cluster.metrics_port is not None:
                print(f"Ray's metrics at http://{cluster.address}:{cluster.metrics_port}/metrics")
            print(f"try: {example_of(card)} --url {url}", flush=True)
            has_keys = settings.access is not None and settings.access.has_keys
            for note in exposure_notes(cluster.host, has_keys=has_keys, ray_is_open=cluster.ray_address is None):
                print(f"note: {note}; see docs/deploy.md", file=sys.stderr, flush=True)
            while not stopping:
                signal.pause()
    except KeyboardInterrupt:
        pass
    print("stopped", flush=True)


def _stop_once() -> list[int]:
    """Have Ctrl-C and SIGTERM raise KeyboardInterrupt, the first of them alone: what it ends takes seconds.

    Returns where its number will be, for an interrupt may be lost where Python can raise nothing, as in a destructor.
    """
    stopping: list[int] = []

    def stop(number: int, _: FrameType | None) -> None:
        if not stopping:
            stopping.append(number)
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    return stopping


def example_of(card: ModelCard) -> str:
    """Returns a command that asks a model, but for the service's address."""
    if card.generates:
        return "offramp generate 'Why is the sky blue?'"
    return f"offramp predict {EXAMPLES.get(card.input_kind, '--data FILE')}"


def _leave(lost: HeadLostError, environment: Mapping[str, str] | None) -> NoReturn:
    """End at once, for Ray's own end would wait for its head; in an environment, begin anew with the same command."""
    with contextlib.suppress(OSError):  # the reader of a pipe may be gone
        print(f"offramp: {lost}{'' if environment is None else '; it starts anew'}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    if environment is None:
        os._exit(lost.exit_status)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
