"""What a run of a service notes of its processes, and which of those that run it has left. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

MARK = "OFFRAMP_RUN"
"""The environment variable by which a run's processes, and theirs, tell whose they are."""


class Identity(BaseModel):
    """A process, told apart from a later one with its number."""

    model_config = ConfigDict(frozen=True)

    pid: int
    started: int
    """Ticks of the system's clock between the machine's start and the process's."""


class RunNotes(BaseModel):
    """What is in a run's file, for the next start to read."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    boot: str
    """The system's name of the time between two starts of the machine: processes of another have ended."""
    run: str
    """The value of `MARK` in the run's processes."""
    owner: Identity
    """The `offramp serve` itself."""
    noted: tuple[Identity, ...] = ()
    """Those whose environment cannot be read are known by their number and start only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenProcess:
    """A process that runs."""

    identity: Identity
    parent: int
    name: str
    run: str | None = None
    """What its environment says; None where that says nothing, is somebody else's, or was written over by its title."""


Seen = Mapping[int, SeenProcess]
"""Everything that runs on this machine now, by process id."""


def runs_on(notes: RunNotes, boot: str, seen: Seen, *, me: Identity) -> bool:
    """Whether somebody else's service looks after its processes itself; our own number may have had a run before."""
    return notes.boot == boot and notes.owner != me and _is_there(notes.owner, seen)


def processes_of(notes: RunNotes, boot: str, seen: Seen, *, me: Identity) -> tuple[SeenProcess, ...]:
    """Those of a run that are still there, by number; never `me`, nor who led to me.

    Its own are those that were noted, those with its mark, and what either has started.
    """
    if notes.boot != boot:
        return ()
    noted = {each.pid for each in notes.noted if _is_there(each, seen)}
    marked = {pid for pid, each in seen.items() if each.run == notes.run}
    spared = {me.pid, *_ancestors(me.pid, seen)}
    ours = _with_descendants((noted | marked) - spared, seen) - spared
    return tuple(seen[pid] for pid in sorted(ours))


def described(processes: Iterable[SeenProcess]) -> str:
    """For a line of a log: `haproxy 17, raylet 12`."""
    return ", ".join(f"{each.name} {each.identity.pid}" for each in processes)


def _is_there(wanted: Identity, seen: Seen) -> bool:
    found = seen.get(wanted.pid)
    return found is not None and found.identity == wanted


def _ancestors(pid: int, seen: Seen) -> set[int]:
    found: set[int] = set()
    while (process := seen.get(pid)) is not None and process.parent not in found:
        pid = process.parent
        found.add(pid)
    return found


def _with_descendants(first: set[int], seen: Seen) -> set[int]:
    found, grown = set(first), True
    while grown:
        children = {pid for pid, each in seen.items() if each.parent in found and pid not in found}
        found |= children
        grown = bool(children)
    return found
