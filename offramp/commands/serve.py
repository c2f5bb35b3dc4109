"""`offramp serve`: serves a model folder, a checkpoint or a service file on this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from cluster.devices import find_device
from deployments.choices import FrontSettings
from deployments.keys import read_keys
from deployments.local_ray.cluster import FOLDER_OF_SOCKETS, RAY_FOLDER, LocalCluster, serving, wanted_ports
from deployments.local_ray.ports import await_ports
from deployments.local_ray.private import LOOPBACK_NAMES
from deployments.settings import ServeSettings
from earlyexit.engine.cpu import has_bfloat16
from earlyexit.errors import HeadLostError, InputError
from earlyexit.network.store import ModelCard, read_card
from offramp.commands.folders import check_model, model_folder_for
from offramp.commands.output import command, num_cores, run_in_subprocess, warn
from offramp.spec.application import application_settings, checked_card, resolve_plan, with_environment_keys
from offramp.spec.documents import ApplicationDocument, ServeJob

EXAMPLES = {"text": "'a text'", "text_pair": "'a text' 'another'", "image": "photo.jpg"}
"""Example arguments of `offramp predict`, by the kind of input."""


def run(job: ServeJob) -> None:
    """Serves until Ctrl-C or SIGTERM."""
    if find_spec("ray") is None:  # reported before the model is read
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    settings, cluster = run_in_subprocess(_settings_of, job)
    _serve_until_stopped(settings, cluster, restart=job.restart)


def _settings_of(job: ServeJob) -> tuple[ServeSettings, LocalCluster]:
    """Returns the settings of the service, and how Ray is started.

    It runs in a process of its own, since planning loads 100 MB of modules that serving does not need. Functions of the
    user and the model's files are checked here, because errors in a replica appear only in Serve's log.
    """
    if job.model.is_file():
        from offramp.spec.file import build_service, read_document

        service, source = read_document(job.model)
        cluster = _checked_cluster(job, service, job.model.parent)
        if service.planner.plan is None:
            print(f"planning {service.name}: usually less than a minute", flush=True)
        settings = build_service(service, source).settings
    else:
        document, folder = job.document, model_folder_for(job.model)
        cluster = _checked_cluster(job, document, Path())
        if folder != job.model:
            exits = command("ramp", job.model, "--data", "LOG")
            print(f"{job.model} is served as it is, without exits; for exits: {exits}")
        settings = folder_settings(job, folder, partial(print, flush=True))
    if settings.threads_per_replica > num_cores():
        warn(f"--threads {settings.threads_per_replica}: this machine has {num_cores()} cores; more threads are slower")
    is_on_cpu = any(stage.device == "cpu" for stage in settings.plan.stages)
    if is_on_cpu and settings.dtype == "bfloat16" and has_bfloat16() is False:
        warn("--dtype bfloat16: this processor has no instructions for it, so float32 is several times as fast")
    if settings.plan.policy is not None and settings.plan.policy.own is not None:
        from earlyexit.policies.wrapper import own_policy  # imports torch

        own_policy(settings.plan.policy.own)
    check_model(Path(settings.model))
    return settings, cluster


def _checked_cluster(job: ServeJob, document: ApplicationDocument, base: Path) -> LocalCluster:
    """Returns how Ray is started. Raises InputError for bad keys, ports or folders, and OfframpError for taken ports.

    It is called before a model is measured. `base`: the folder of the document.
    """
    listening = document.ingress.model_dump(include=set(FrontSettings.model_fields))
    given = job.model_dump(include={"port", "grpc_port"}, exclude_unset=True)
    cluster = LocalCluster(**listening | given, metrics_port=job.metrics_port)
    if (access := with_environment_keys(document.access)) is not None:
        keys_file = None if access.keys_file is None else str(base / access.keys_file)
        read_keys(access.model_copy(update={"keys_file": keys_file}))
    await_ports(wanted_ports(cluster))
    if not FOLDER_OF_SOCKETS.fullmatch(str(RAY_FOLDER)):
        raise InputError(f"{RAY_FOLDER} is too long or not ASCII for Ray's sockets: export RAY_TMPDIR=/tmp TMPDIR=/tmp")
    return cluster


def folder_settings(job: ServeJob, folder: Path, notify: Callable[[str], None]) -> ServeSettings:
    """Returns the settings to serve a model folder. Options that are not set are chosen for this machine."""
    document, model = job.document, job.document.model
    card = checked_card(folder, model)  # before the model is measured
    fields: dict[str, Any] = {"folder": str(folder)}
    needs_gpu = find_device(job.device).torch_device == "cuda"
    is_here = shutil.which("nvidia-smi") is not None if needs_gpu else job.device == "cpu"
    if job.plan is None and is_here and card.chain.is_one and not card.generates:
        from offramp.commands.profile import choose  # imports the planner

        plan, fields["backend"], fields["threads_per_replica"] = choose(folder, job, notify)
    else:
        given = job.model_dump(include={"batch", "replicas", "device"}, exclude_unset=True)
        plan = resolve_plan(job.plan or "serial", folder, **given)
    plan = replace(plan, dispatch=job.dispatch or plan.dispatch, order=job.order or plan.order)
    return application_settings(document.model_copy(update={"model": model.model_copy(update=fields)}), plan)


def _serve_until_stopped(settings: ServeSettings, cluster: LocalCluster, *, restart: bool) -> None:
    """Serves on this machine until Ctrl-C or SIGTERM.

    The process ends, or restarts itself, when Ray's head is lost.
    """
    stopping: list[int] = []  # an interrupt can be lost where Python cannot raise, such as in a destructor

    def stop(number: int, _: FrameType | None) -> None:
        stopping.append(number)
        for each in (signal.SIGINT, signal.SIGTERM):  # stopping takes seconds, at whose end Python resets own handlers
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    environment = dict(os.environ) if restart else None  # a copy, taken before Ray's variables are added
    settings = settings.model_copy(update={"access": with_environment_keys(settings.access)})
    print(f"starting Ray and the service of {Path(settings.model).name}: usually less than a minute", flush=True)
    try:
        with serving(settings, cluster, lambda lost: _exit_or_restart(lost, None if stopping else environment)) as url:
            card = read_card(Path(settings.model))
            print(f"serving {card.name} at {url}   API: {url}/docs")
            print(f"live page at {url}/dashboard   metrics at {url}/metrics")
            if cluster.grpc_port is not None:
                print(f"gRPC at {cluster.address}:{cluster.grpc_port}")
            if cluster.metrics_port is not None:
                print(f"Ray's metrics at http://127.0.0.1:{cluster.metrics_port}/metrics")
            print(f"try: {example_of(card)} --url {url}", flush=True)
            has_keys = settings.access is not None and settings.access.has_keys
            for note in exposure_notes(cluster.host, has_keys=has_keys, ray_is_open=cluster.ray_address is None):
                print(f"note: {note}; see docs/deploy.md", file=sys.stderr, flush=True)
            while not stopping:
                signal.pause()
    except KeyboardInterrupt:
        pass
    print("stopped", flush=True)


def exposure_notes(host: str, *, has_keys: bool, ray_is_open: bool) -> list[str]:
    """Returns notes on what other machines can reach; `ray_is_open`: Ray's ports listen on all interfaces."""
    notes = []
    if host not in LOOPBACK_NAMES and not has_keys:
        notes.append(f"listening on {host} without API keys: every caller that can reach it may use it (--api-keys)")
    if ray_is_open:
        for_all = os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled"
        opened = ", and RAY_AUTH_MODE=disabled opens them to all" if for_all else ""
        notes.append(f"Ray's own ports listen on all interfaces, as --metrics-port does{opened}")
    return notes


def example_of(card: ModelCard) -> str:
    """Returns a command that sends an input to the model, without the service's address."""
    if card.generates:
        return "offramp generate 'Why is the sky blue?'"
    return f"offramp predict {EXAMPLES.get(card.input_kind, '--data FILE')}"


def _exit_or_restart(lost: HeadLostError, environment: Mapping[str, str] | None) -> NoReturn:
    """Ends the process at once, because Ray would wait for its head. With an environment, runs the command again."""
    with contextlib.suppress(OSError):  # the reader of stderr may have closed it
        print(f"offramp: {lost}{'' if environment is None else '; restarting'}", file=sys.stderr, flush=True)
        sys.stdout.flush()
    if environment is None:
        os._exit(lost.exit_status)
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], environment)
