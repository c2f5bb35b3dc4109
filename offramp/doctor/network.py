"""Checks of ports, and of what Ray runs or has left behind."""

from __future__ import annotations

from collections.abc import Iterator

from offramp.doctor.finding import Finding, failed, ok, size, warning
from offramp.doctor.machine import Machine, Port

MANY_SESSION_BYTES = 2 * 2**30
NO_TOKEN = "disabled"


def left_haproxies(machine: Machine) -> Iterator[Finding]:
    """HAProxies of Serve whose Ray has ended; they keep their ports."""
    for each in machine.ray.haproxies:
        if each.is_left:
            yield failed(f"haproxy of an earlier run, pid {each.pid}, holds its ports", f"kill {each.pid}")


def ports(machine: Machine) -> Iterator[Finding]:
    """Those that a service would listen on."""
    free = [each for each in machine.ports if not each.taken]
    if free:
        yield ok(f"free: {', '.join(f'{each.number} ({each.purpose})' for each in free)}")
    for each in machine.ports:
        if each.taken:
            yield _taken(each, machine)


def ray(machine: Machine) -> Iterator[Finding]:
    """A cluster that runs here, or the trace of one."""
    state = machine.ray
    if state.processes:
        pids = ", ".join(f"{each.name} {each.pid}" for each in state.processes)
        where = f" at {state.address}" if state.address else ""
        yield ok(f"a Ray runs here{where} ({pids}); `offramp serve` starts one of its own, `offramp deploy` uses this")
    elif state.address is not None:
        yield warning(
            f"/tmp/ray/ray_current_cluster names {state.address}, where nothing runs", "ray stop, which removes it"
        )
    else:
        yield ok("none runs here")


def token(machine: Machine) -> Iterator[Finding]:
    """Token authentication: on unless RAY_AUTH_MODE says otherwise, with whatever token lies in the home folder."""
    state = machine.ray
    if state.auth_mode == NO_TOKEN:
        yield ok("off (RAY_AUTH_MODE=disabled)")
    elif state.token_file is not None:
        yield warning(
            f"Ray will use the token in {state.token_file}, which another Ray may have left",
            "on one machine: export RAY_AUTH_MODE=disabled; of a cluster: make sure that all nodes have this one",
        )
    else:
        yield ok("Ray will make one, in ~/.ray/auth_token; RAY_AUTH_MODE=disabled does without")


def ray_files(machine: Machine) -> Iterator[Finding]:
    """Sessions below /tmp/ray."""
    state = machine.ray
    words = f"{state.sessions} sessions in /tmp/ray, {size(state.session_bytes)}"
    if state.session_bytes < MANY_SESSION_BYTES:
        yield ok(words)
    elif state.processes:
        yield warning(words, "old sessions can go: rm -r those of /tmp/ray/session_* that session_latest is not")
    else:
        yield warning(words, "no Ray runs: rm -r /tmp/ray")


def _taken(port: Port, machine: Machine) -> Finding:
    holder = port.holder
    by = "a process that this user may not see" if holder is None else f"{holder.name}, pid {holder.pid}"
    words = f"{port.number} ({port.purpose}) is taken by {by}"
    if port.purpose == DASHBOARD:
        return ok(f"{words}; `offramp deploy` goes there")
    if holder is None:
        return failed(words, f"sudo ss -ltnp 'sport = :{port.number}' names it; {_elsewhere(port)}")
    haproxy = next((each for each in machine.ray.haproxies if each.pid == holder.pid), None)
    if haproxy is None:
        return failed(words, f"end it, or {_elsewhere(port)}")
    if haproxy.is_left:
        return failed(words, f"kill {holder.pid}")
    return warning(words, "a service runs here: ask it, or end it with Ctrl-C before another begins")


def _elsewhere(port: Port) -> str:
    return f"set {VARIABLES[port.purpose]}" if port.purpose in VARIABLES else "serve on another with --port"


SERVICE = "service"
STATISTICS = "HAProxy's statistics"
METRICS = "HAProxy's metrics"
DASHBOARD = "Ray's dashboard"
VARIABLES = {STATISTICS: "RAY_SERVE_HAPROXY_STATS_PORT", METRICS: "RAY_SERVE_HAPROXY_METRICS_PORT"}
