"""`offramp serve`: serves a model's folder, or a service file, on this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from deployments.local_ray.cluster import LocalCluster, serving
from deployments.settings import ServeSettings
from earlyexit.errors import HeadLostError
from earlyexit.network.store import ModelCard, read_card
from offramp.commands.checkpoint import model_folder_of
from offramp.commands.options import order_option
from offramp.commands.output import command, in_own_process
from offramp.spec.application import application_settings, exposure_notes, resolve_plan, with_environment
from offramp.spec.documents import FolderDocument, IngressDocument
from offramp.spec.jobs import ServeJob

EXAMPLES = {"text": "'a text'", "text_pair": "'a text' 'another'", "image": "photo.jpg"}
"""Example arguments of `offramp predict`, by codec."""


def run(job: ServeJob) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    if find_spec("ray") is None:  # said before a model is looked at
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    settings, ingress = in_own_process(_asked, job)
    _serve_until_stopped(settings, ingress, metrics_port=job.metrics_port, restart=job.restart)


def _asked(job: ServeJob) -> tuple[ServeSettings, IngressDocument]:
    """Returns what is served; planning loads 100 MB that serving does not need."""
    if job.model.is_file():
        from offramp.spec.file import read_service

        found = read_service(job.model)
        return found.settings, found.ingress.model_copy(update=job.ports)
    document, folder = job.document, model_folder_of(job.model)
    if folder != job.model:
        exits = command("ramp", job.model, "--data", "LOG")
        print(f"{job.model} is served as it is, without exits; for exits: {exits}")
    return folder_settings(document, folder, partial(print, flush=True)), document.ingress


def folder_settings(document: FolderDocument, folder: Path, say: Callable[[str], None]) -> ServeSettings:
    """Returns settings to serve a model's folder with these options; others are chosen for this machine."""
    asked, model, card = document.plan, document.model, read_card(folder)
    fields: dict[str, Any] = {"folder": str(folder)}
    if asked.plan is None and asked.device == "cpu" and card.chain.is_one and not card.generates:
        from offramp.commands.machine import choose  # which needs the planner

        plan, fields["backend"], fields["threads_per_replica"] = choose(folder, document, say)
    else:
        given = asked.model_dump(exclude={"plan", "order", "dispatch"}, exclude_unset=True)
        plan = resolve_plan(asked.plan or "serial", folder, **given)
    if asked.dispatch is not None:
        plan = replace(plan, dispatch=asked.dispatch)
    if (order := order_option(asked.order)) is not None:
        plan = replace(plan, order=order)
    return application_settings(document.model_copy(update={"model": model.model_copy(update=fields)}), plan)


def _serve_until_stopped(
    settings: ServeSettings, ingress: IngressDocument, *, metrics_port: int | None, restart: bool
) -> None:
    """Serve on this machine until Ctrl-C or SIGTERM.

    The process ends, or restarts itself, when Ray's head is lost.
    """
    stopping: list[int] = []  # for an interrupt may be lost where Python can raise nothing, as in a destructor

    def stop(number: int, _: FrameType | None) -> None:  # later ones are ignored, since the end takes seconds
        if not stopping:
            stopping.append(number)
            raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
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
                host = cluster.ray_address or cluster.address
                print(f"Ray's metrics at http://{host}:{cluster.metrics_port}/metrics")
            print(f"try: {example_of(card)} --url {url}", flush=True)
            has_keys = settings.access is not None and settings.access.has_keys
            for note in exposure_notes(cluster.host, has_keys=has_keys, ray_is_open=cluster.ray_address is None):
                print(f"note: {note}; see docs/deploy.md", file=sys.stderr, flush=True)
            while not stopping:
                signal.pause()
    except KeyboardInterrupt:
        pass
    print("stopped", flush=True)


def example_of(card: ModelCard) -> str:
    """Returns a command that asks a model, without the service's address."""
    if card.generates:
        return "offramp generate 'Why is the sky blue?'"
    return f"offramp predict {EXAMPLES.get(card.input_kind, '--data FILE')}"


def _leave(lost: HeadLostError, environment: Mapping[str, str] | None) -> NoReturn:
    """Ends at once, since Ray would wait for its head; with an environment, runs the same command again."""
    with contextlib.suppress(OSError):  # the reader of a pipe may be gone
        print(f"offramp: {lost}{'' if environment is None else '; it starts anew'}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    if environment is None:
        os._exit(lost.exit_status)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
