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
from offramp.cli.options import (
    ATTENTIONS,
    BACKENDS,
    BUILT_IN_PLANS,
    DEVICE_NAMES,
    DTYPES,
    FRONTS,
    HOP_DTYPES,
    KV_FILLS,
    OrderOf,
    above_zero,
    choice,
    completes,
    optional_http_address,
    order_option,
)

if TYPE_CHECKING:
    from deployments.settings import ServeSettings
    from earlyexit.network.store import ModelCard
    from offramp.spec.documents import ApplicationDocument, IngressDocument

EXAMPLES = {"text": "'a text'", "text_pair": "'a text' 'another'", "image": "photo.jpg"}
"""Arguments of `offramp predict`, by codec."""
KINDS = {
    "dtype": DTYPES,
    "hop_dtype": HOP_DTYPES,
    "backend": BACKENDS,
    "attention": ATTENTIONS,
    "kv_fill": KV_FILLS,
}
BESIDE_A_FILE = {"model", "port", "grpc_port", "metrics_port", "restart"}

Model = Annotated[Path, typer.Argument(help="Model folder, or a service file, which says all but the ports itself.")]
Plan = Annotated[
    str | None,
    typer.Option(
        help="Plan file, or built in: stock, early-exit, serial; default: serial.", **completes(BUILT_IN_PLANS)
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Batch size of a built-in plan; default: 32.")]
Replicas = Annotated[int | None, typer.Option(min=1, help="Replicas of a built-in plan; default: 1.")]
PlanDevice = Annotated[
    str | None, typer.Option(help="Device of a built-in plan; default: cpu.", **completes(DEVICE_NAMES))
]
Port = Annotated[int | None, typer.Option(min=1, max=65535, help="Default: 8000.")]
Host = Annotated[str | None, typer.Option(help="Address to listen on; default: 127.0.0.1.")]
Front = Annotated[
    str | None,
    typer.Option(
        help="direct (nobody), haproxy or proxy (Serve's own); default: auto.",
        **completes(FRONTS),
    ),
]
IngressReplicas = Annotated[int | None, typer.Option(min=1, help="Default: 1.")]
Dtype = Annotated[str | None, typer.Option(help="float32 (default) or bfloat16.", **completes(DTYPES))]
HopDtype = Annotated[
    str | None,
    typer.Option(
        help="Hidden states between stages: same (as --dtype, the default) or float16.", **completes(HOP_DTYPES)
    ),
]
Backend = Annotated[
    str | None, typer.Option(help="torch (default), onnx, or auto: whichever is faster here.", **completes(BACKENDS))
]
AttentionOption = Annotated[
    str | None,
    typer.Option("--attention", help="auto (default), padded, slotted or apart.", **completes(ATTENTIONS)),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads of a CPU replica; default: 1.")]
KvTokens = Annotated[
    int | None, typer.Option(min=1, help="Of decoders: tokens that a replica keeps at once; default: by its memory.")
]
KvFill = Annotated[
    str | None,
    typer.Option(help="Of decoders, blocks that a token skipped: compute (default) or copy.", **completes(KV_FILLS)),
]
MaxQueued = Annotated[int | None, typer.Option(min=1, help="Unanswered inputs per ingress before 503; default: 2000.")]
MaxBodyBytes = Annotated[int | None, typer.Option(min=1, help="Of a request, before 413; default: 2000000.")]
MaxHeldBytes = Annotated[
    int | None, typer.Option(min=1, help="Of all bodies an ingress holds, before 503; default: 256000000.")
]
TimeoutS = Annotated[
    float | None,
    typer.Option(callback=above_zero, help="Timeout of requests that name none, and of a first token; default: 30."),
]
TokenTimeoutS = Annotated[
    float | None,
    typer.Option(callback=above_zero, help="Of models that generate: timeout between two tokens; default: 30."),
]
GrpcPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of the Open Inference Protocol over gRPC; default: none.")
]
MetricsPort = Annotated[
    int | None, typer.Option(min=1, max=65535, help="Port of the Prometheus metrics; default: a free one.")
]
OtlpEndpoint = Annotated[
    str | None, typer.Option(callback=optional_http_address, help="OpenTelemetry collector, for traces.")
]
TraceRatio = Annotated[
    float | None, typer.Option(min=0, max=1, help="Share of requests that are traced; default: 0.01.")
]
ApiKeys = Annotated[
    Path | None, typer.Option(help="File of API keys, name:key or key per line; default: $OFFRAMP_API_KEYS.")
]
RateLimit = Annotated[
    float | None, typer.Option(callback=above_zero, help="Requests per second that one key, or all, may send.")
]
CorsOrigin = Annotated[
    list[str] | None,
    typer.Option(help="Origin whose pages browsers let use the service, or *; may be repeated. Default: none."),
]
Restart = Annotated[
    bool, typer.Option("--restart", help="Start anew when Ray's head has died, rather than end with status 4.")
]


def serve(
    context: typer.Context,
    model: Model,
    plan: Plan = None,
    batch: Batch = None,
    replicas: Replicas = None,
    device: PlanDevice = None,
    order: OrderOf = None,
    port: Port = None,
    host: Host = None,
    front: Front = None,
    ingress_replicas: IngressReplicas = None,
    dtype: Dtype = None,
    hop_dtype: HopDtype = None,
    backend: Backend = None,
    attention: AttentionOption = None,
    threads: Threads = None,
    kv_tokens: KvTokens = None,
    kv_fill: KvFill = None,
    max_queued: MaxQueued = None,
    max_body_bytes: MaxBodyBytes = None,
    max_held_bytes: MaxHeldBytes = None,
    timeout_s: TimeoutS = None,
    token_timeout_s: TokenTimeoutS = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    otlp_endpoint: OtlpEndpoint = None,
    trace_ratio: TraceRatio = None,
    api_keys: ApiKeys = None,
    rate_limit: RateLimit = None,
    cors_origin: CorsOrigin = None,
    restart: Restart = False,
) -> None:
    """Serve a model, or a service file's, on this machine until it is told to stop (Ctrl-C or SIGTERM)."""
    ports = {"port": port, "grpc_port": grpc_port}
    if model.is_file():
        _refuse_beside_a_file(context)
        from offramp.spec.file import read_service

        found = read_service(model)
        _serve_until_stopped(found.settings, found.ingress, ports, metrics_port, restart=restart)
        return
    from offramp.spec.application import application_settings, resolve_plan

    chosen = resolve_plan(
        plan or "serial", model, batch=batch, replicas=replicas, device=device, order=order_option(order)
    )
    kind = _chosen(dtype=dtype, hop_dtype=hop_dtype, backend=backend, attention=attention, kv_fill=kv_fill)
    ingress = {"host": host, "front": choice("front", front, FRONTS), "replicas": ingress_replicas}
    limits = {"max_queued": max_queued, "max_body_bytes": max_body_bytes, "max_held_bytes": max_held_bytes}
    times = {"default_timeout_s": timeout_s, "token_timeout_s": token_timeout_s}
    document = _document(
        model=kind | {"folder": str(model), "threads_per_replica": threads, "kv_tokens": kv_tokens},
        ingress=ingress | limits | times,
        tracing=tracing_options(otlp_endpoint, trace_ratio),
        access=_access(None if api_keys is None else str(api_keys), rate_limit, cors_origin or None),
    )
    settings = application_settings(document, chosen)
    _serve_until_stopped(settings, document.ingress, ports, metrics_port, restart=restart)


def _access(keys_file: str | None, rate_per_s: float | None, origins: list[str] | None) -> dict[str, Any] | None:
    access = {"keys_file": keys_file, "rate_per_s": rate_per_s, "cors_origins": origins}
    return access if any(value is not None for value in access.values()) else None


def _chosen(**given: str | None) -> dict[str, str | None]:
    """How a model is computed; raises InputError for what is not to be had."""
    return {name: choice(name.replace("_", "-"), value, KINDS[name]) for name, value in given.items()}


def _refuse_beside_a_file(context: typer.Context) -> None:
    given = {name for name, value in context.params.items() if value not in (None, [], ())}
    refused = sorted(f"--{name.replace('_', '-')}" for name in given - BESIDE_A_FILE)
    if refused:
        allowed = "--port, --grpc-port, --metrics-port, --restart"
        raise InputError(f"{' and '.join(refused)}: the service file says it; only {allowed} go with one")


def tracing_options(endpoint: str | None, ratio: float | None) -> dict[str, Any] | None:
    """What `--otlp-endpoint` and `--trace-ratio` ask for; raises InputError for a ratio of nothing."""
    if endpoint is None and ratio is not None:
        raise InputError("--trace-ratio is of the requests whose traces go to --otlp-endpoint, which is missing")
    return None if endpoint is None else {"endpoint": endpoint, "ratio": ratio}


def _document(**parts: Mapping[str, Any] | None) -> ApplicationDocument:
    """The options that are given, as a service file would say them; raises InputError that names the field."""
    from pydantic import ValidationError

    from offramp.spec.documents import ApplicationDocument

    given = {
        name: {field: value for field, value in part.items() if value is not None}
        for name, part in parts.items()
        if part is not None
    }
    try:
        return ApplicationDocument.model_validate(given)
    except ValidationError as error:
        [first, *_] = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise InputError(f"{where}: {first['msg']}, not {first['input']}") from error


def _serve_until_stopped(
    settings: ServeSettings,
    ingress: IngressDocument,
    ports: dict[str, int | None],
    metrics_port: int | None,
    *,
    restart: bool,
) -> None:
    """Serve on this machine until Ctrl-C or SIGTERM; ports that are given take the place of the ingress's own.

    The process ends, or begins anew, where Ray's head is lost.
    """
    from deployments.local_ray.cluster import LocalCluster, serving
    from earlyexit.network.store import read_card
    from offramp.spec.application import exposure_notes, with_environment

    stopping = _stop_once()
    environment = dict(os.environ)  # before Ray, and its switches, are put into it
    settings = with_environment(settings)
    listening = ingress.model_dump(include={"port", "host", "front", "grpc_port"})
    given = {name: port for name, port in ports.items() if port is not None}
    cluster = LocalCluster(**listening | given, metrics_port=metrics_port)
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
                print(f"note: {note}; see docs/security.md", file=sys.stderr, flush=True)
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
    with contextlib.suppress(OSError):  # nobody may read any more
        print(f"offramp: {lost}{'' if environment is None else '; it starts anew'}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    if environment is None:
        os._exit(lost.exit_status)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
