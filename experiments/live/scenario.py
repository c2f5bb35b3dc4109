"""How every live scenario runs: a service, a load, what happens meanwhile, a table of windows, a file of figures."""

from __future__ import annotations

import asyncio
from argparse import ArgumentParser
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.settings import ControlSettings
from earlyexit.network.store import read_card
from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.live.emulation import Bench, bench
from experiments.live.load import INPUTS_PER_REQUEST, Driven, Phase, Span, WindowFigures, check, drive, figures
from experiments.live.model import FOLDER
from experiments.live.service import Service, emulated_settings, served
from optimizer.plan import Plan

EMULATED = (
    "emulated: the Serve graph is real, accelerators are not. Decisions come from exit records, time from the "
    "published BERT-base profile, stretched"
)
COLUMNS = ("", "requests", "answered", "lost", "p50 ms", "p99 ms", "in SLO", "goodput/s", "errors")

Event = Callable[[Service], Awaitable[Any]]
"""What happens to a service while its load runs; gives what is to be told of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a scenario gave."""

    driven: Driven
    meanwhile: Any = None
    """What the event told."""
    after: Any = None
    """What was asked of the service after the load."""


def command(
    name: str,
    description: str | None,
    run: Callable[[Bench], Mapping[str, Any]],
    counts: Mapping[str, int],
    *,
    time_scale: float = 40.0,
    **own: Any,
) -> None:
    """Run a scenario from its command line and write its figures to runs/live.

    `counts`: accelerators by their published name; `own`: further options, with their defaults; a tuple
    has all that may be chosen, the default first.
    """
    on = bench(parser(name, description, time_scale=time_scale, **own).parse_args(), counts)
    print(f"{EMULATED} {on.emulation.time_scale:g} times; SLO {on.emulation.wall_slo_s:g} s")
    write(name, {"time_scale": on.emulation.time_scale, "slo_s": on.emulation.wall_slo_s, **run(on)})


def parser(name: str, description: str | None, *, time_scale: float = 40.0, **own: Any) -> ArgumentParser:
    """With the options that all scenarios have, and its own."""
    made = ArgumentParser(prog=f"python -m experiments.live.{name}", description=description)
    made.add_argument("--model", type=Path, default=FOLDER, help="made where it is missing")
    made.add_argument("--time-scale", type=float, default=time_scale, help="wall-clock seconds of an emulated one")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--front", choices=("haproxy", "proxy"), default="haproxy")
    for option, default in own.items():
        flag, first = f"--{option.replace('_', '-')}", default[0] if isinstance(default, tuple) else default
        made.add_argument(flag, type=type(first), default=first, choices=None if first is default else default)
    return made


@contextmanager
def serving(on: Bench, plan: Plan, control: ControlSettings | None = None, **options: Any) -> Iterator[Service]:
    """A service of the bench's model with the plan in force; `options` are further ones of its settings."""
    settings = emulated_settings(on.emulation, on.model, plan, control=control, **options)
    with served(settings, plan, port=on.options.port, front=on.options.front) as service:
        yield service


async def play(
    on: Bench,
    service: Service,
    phases: Sequence[Phase],
    *,
    event: Event | None = None,
    after: Event | None = None,
    inputs_per_request: int = INPUTS_PER_REQUEST,
) -> Played:
    """The load on a running service, with an event beside it; `after` is asked when all requests have an outcome."""
    load = drive(
        service.url,
        phases,
        slo_s=on.emulation.wall_slo_s,
        seed=on.options.seed,
        inputs_per_request=inputs_per_request,
    )
    driven, meanwhile = await asyncio.gather(load, _nothing() if event is None else event(service))
    return Played(driven=driven, meanwhile=meanwhile, after=None if after is None else await after(service))


def played(
    on: Bench,
    plan: Plan,
    phases: Sequence[Phase],
    control: ControlSettings | None = None,
    *,
    event: Event | None = None,
    after: Event | None = None,
    inputs_per_request: int = INPUTS_PER_REQUEST,
    **options: Any,
) -> Played:
    """A service of its own, from its start to its end."""
    with serving(on, plan, control, **options) as service:
        load = play(on, service, phases, event=event, after=after, inputs_per_request=inputs_per_request)
        return asyncio.run(load)


async def _nothing() -> None:
    """Happens meanwhile."""


def judged(
    on: Bench,
    driven: Driven,
    windows: Mapping[str, Sequence[Span]],
    *,
    title: str = "",
    thresholds: Mapping[int, float] | None = None,
) -> dict[str, Any]:
    """Print figures of windows, whether every answer was right and what the machine spent; gives them as plain data.

    `thresholds`: the loosest of all plans that were in force; None for those of the bench.
    """
    of = {name: figures(driven, *spans) for name, spans in windows.items()}
    show(title, COLUMNS, [_row(name, each) for name, each in of.items()])
    checks = check(driven, on.records, thresholds or on.thresholds, read_card(on.model).label_names)
    print(
        f"sent {checks.sent}, outcomes {checks.outcomes}, twice {checks.twice}, wrong answers {len(checks.wrong)}: "
        f"every answer right and once: {checks.hold}\n{driven.usage.told()}"
    )
    return {"windows": of, "checks": checks, "holds": checks.hold, "usage": driven.usage}


def _row(name: str, each: WindowFigures) -> tuple[object, ...]:
    return (
        name,
        str(each.requests),
        str(each.answered),
        str(each.lost),
        milliseconds(each.p50_s),
        milliseconds(each.p99_s),
        f"{each.in_slo / each.requests if each.requests else 0.0:.2%}",
        f"{each.goodput_per_s:.0f}",
        ", ".join(f"{kind} {count}" for kind, count in each.errors.items()) or "none",
    )


def milliseconds(seconds: float | None) -> str:
    """For tables."""
    return "-" if seconds is None else f"{seconds * 1000:.0f}"


def write(name: str, document: Mapping[str, Any]) -> None:
    """Write a scenario's figures, and say where."""
    print(f"written: {keep({'emulated': True, 'what': EMULATED, **document}, RUNS / 'live' / f'{name}.json')}")
