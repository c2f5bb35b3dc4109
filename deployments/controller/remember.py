"""What the controller remembers, in one SQLite file: probes, counts, plans, events, and its state."""

from __future__ import annotations

import io
import json
import sqlite3
import zlib
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any
from zipfile import BadZipFile

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from deployments.controller.intake import Interval
from earlyexit.errors import DataError
from optimizer.live.stragglers import RestingReplica
from optimizer.live.trial import FailedPlan, Trial
from optimizer.placement import PlacedPlan, parse_placed, placed_document
from optimizer.plan import Plan, PolicySpec, chains_of
from optimizer.plan_file import parse_plan, plan_document
from optimizer.problem_file import parse_problem, problem_document
from profiles.stream import Observations, StreamShape

Placed = Annotated[PlacedPlan, PlainValidator(parse_placed), PlainSerializer(placed_document)]


def _blame_document(blame: FailedPlan) -> dict[str, Any]:
    """The stages are written as a plan, whose policy and shares do not matter."""
    num_chains = len(chains_of(blame.stages, blame.problem.num_blocks))
    plan = Plan(
        stages=blame.stages,
        shares=(1 / num_chains,) * num_chains,
        policy=PolicySpec(name="patience", patience=1),
        networks=blame.problem.networks,
    )
    return {"stages": plan_document(plan), "problem": problem_document(blame.problem), "until": blame.until}


def _parse_blame(document: Mapping[str, Any]) -> FailedPlan:
    stages, problem = parse_plan(document["stages"]).stages, parse_problem(document["problem"]).problem
    return FailedPlan(stages=stages, problem=problem, until=document["until"])


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The plan in force, and everything that decisions about the next plan take into account."""

    placed: Placed
    """The plan that ingresses shall follow."""
    reason: str
    """Why it is in force."""
    at_s: float
    """When it was put in force."""
    followed: Placed | None = None
    """What all ingresses were last told to follow; None: not known."""
    followed_s: float = 0.0
    planned_s: float
    """When the controller last planned; at first, when it began."""
    changed_s: float
    """When the share of inputs that leave at each exit last changed."""
    rate_changed_s: float
    sized_for_rps: float | None = None
    """The rate that the plan was made for; None: it gives the highest rate."""
    suspended: str | None = None
    """Why nothing is served; None: inputs are served."""
    hold: bool = False
    """Whether the plan stays in force until a replan is asked for."""
    trial: Trial | None = None
    previous: Placed | None = None
    """The plan that a rollback returns to while the present plan is on trial."""
    resting: tuple[RestingReplica, ...] = ()
    blamed: tuple[Annotated[FailedPlan, PlainValidator(_parse_blame), PlainSerializer(_blame_document)], ...] = ()
    thresholds: Mapping[int, float] | None = None
    """Thresholds of all ramps that tuning has found; None: those of the settings."""

    @classmethod
    def first(cls, placed: PlacedPlan, now_s: float) -> State:
        """The state of a controller that remembers nothing, whose ingresses follow this plan."""
        return cls(
            placed=placed,
            reason="start",
            at_s=now_s,
            followed=placed,
            followed_s=now_s,
            planned_s=now_s,
            changed_s=now_s,
            rate_changed_s=now_s,
        )

    def document(self) -> Any:
        """Plain data that `parse_state` reads."""
        return STATE.dump_python(self, mode="json")


STATE = TypeAdapter(State)
INTERVAL = TypeAdapter(Interval)


def parse_state(document: Any) -> State:
    """Reads a state's document; raises DataError, and PlanError for plans that this version refuses."""
    try:
        return STATE.validate_python(document)
    except (ValidationError, KeyError, TypeError) as error:
        raise DataError(f"the state in the controller's memory cannot be read: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRow:
    """A plan that was in force, or was proposed and not taken."""

    epoch: int
    at_s: float
    outcome: str
    """`in force` or `proposed`."""
    reason: str
    """Why the controller planned: `period`, `asked`, ..."""
    words: str
    """The verdict."""
    placed: Mapping[str, Any]
    """A document as of `optimizer.placement.placed_document`; its plan holds what was predicted."""
    gained: Mapping[str, Any] | None = None
    """What was measured while the plan was in force; None until it was replaced."""


SCHEMA = 1
KEEP_S = 7200.0
"""Age of probes, counts and events that are dropped, here and in the live stream of exit records: sixty windows of two
minutes show any drift that a forecast can use."""
MOST_PLANS = 1000
BUSY_S = 5.0
"""How long a controller that was just replaced may still hold the file."""
TABLES = """
CREATE TABLE IF NOT EXISTS file (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS probes (at_s REAL NOT NULL, shape TEXT NOT NULL, columns BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS probes_by_time ON probes (at_s);
CREATE TABLE IF NOT EXISTS counts (at_s REAL NOT NULL, interval TEXT NOT NULL);
CREATE INDEX IF NOT EXISTS counts_by_time ON counts (at_s);
CREATE TABLE IF NOT EXISTS plans (
    id INTEGER PRIMARY KEY, epoch INTEGER NOT NULL, at_s REAL NOT NULL, outcome TEXT NOT NULL, reason TEXT NOT NULL,
    words TEXT NOT NULL, placed TEXT NOT NULL, gained TEXT
);
CREATE TABLE IF NOT EXISTS events (at_s REAL NOT NULL, kind TEXT NOT NULL, words TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS standing (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class History:
    """The memory of one application's controller. `commit` puts it on disk, where it survives a killed process.

    (A machine that loses power may lose the last commits: write-ahead logging without a sync per commit.)
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path, app: str) -> History:
        """Opens or creates the file.

        Raises DataError for a file of another version, of another application, or that is no database.
        """
        try:
            # Serve may build a replica in another thread than it runs it in; it never uses two at a time.
            connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False)
            _check_owner(connection, path, app)  # before anything is written to the file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            connection.executescript(TABLES)
            for key, value in (("schema_version", str(SCHEMA)), ("app", app)):
                connection.execute("INSERT OR IGNORE INTO file VALUES (?, ?)", (key, value))
            connection.commit()
        except sqlite3.Error as error:
            raise DataError(f"{path} cannot be used as the controller's memory: {error}") from error
        return cls(connection)

    @staticmethod
    def check(path: Path, app: str) -> None:
        """Raises what `open` would, and leaves the file as it is."""
        if not path.parent.is_dir():
            raise DataError(f"{path} cannot be the controller's memory: there is no folder {path.parent}")
        if not path.exists():
            return
        try:
            address = f"{path.absolute().as_uri()}?mode=ro"
            with closing(sqlite3.connect(address, timeout=BUSY_S, uri=True)) as connection:
                _check_owner(connection, path, app)
        except sqlite3.Error as error:
            raise DataError(f"{path} cannot be used as the controller's memory: {error}") from error

    def commit(self) -> None:
        """Puts everything since the last commit on disk."""
        self._connection.commit()

    def close(self) -> None:
        """Closes the file without what was not committed."""
        self._connection.close()

    def add_probes(self, at_s: float, probes: Observations) -> None:
        """Keeps what one collection brought."""
        shape = json.dumps(asdict(probes.shape))
        packed = io.BytesIO()
        there: dict[str, Any] = {name: array for name, array in probes.arrays().items() if array is not None}
        np.savez_compressed(packed, **there)
        self._connection.execute("INSERT INTO probes VALUES (?, ?, ?)", (at_s, shape, packed.getvalue()))

    def probes(self) -> Iterator[Observations]:
        """Yields the probes of each collection, oldest first; raises DataError for a row that cannot be read."""
        rows = self._connection.execute("SELECT shape, columns FROM probes ORDER BY at_s, rowid")
        return (_unpacked(shape, columns) for shape, columns in rows)

    def add_counts(self, interval: Interval) -> None:
        """Keeps what one collection counted."""
        text = INTERVAL.dump_json(interval).decode()
        self._connection.execute("INSERT INTO counts VALUES (?, ?)", (interval.at_s, text))

    def counts(self) -> list[Interval]:
        """Returns the intervals, oldest first."""
        rows = self._connection.execute("SELECT interval FROM counts ORDER BY at_s, rowid")
        return [INTERVAL.validate_json(text) for (text,) in rows]

    def add_plan(self, row: PlanRow) -> None:
        """Keeps a plan."""
        self._connection.execute(
            "INSERT INTO plans (epoch, at_s, outcome, reason, words, placed) VALUES (?, ?, ?, ?, ?, ?)",
            (row.epoch, row.at_s, row.outcome, row.reason, row.words, json.dumps(row.placed)),
        )

    def gained(self, epoch: int, measured: Mapping[str, Any]) -> None:
        """Keeps what the plan of an epoch gave while it was in force."""
        self._connection.execute(
            "UPDATE plans SET gained = ? WHERE id = "
            "(SELECT max(id) FROM plans WHERE epoch = ? AND outcome = 'in force')",  # other settings begin at 0 again
            (json.dumps(measured), epoch),
        )

    def plans(self, limit: int) -> list[PlanRow]:
        """Returns the last plans, newest first."""
        rows = self._connection.execute(
            "SELECT epoch, at_s, outcome, reason, words, placed, gained FROM plans ORDER BY id DESC LIMIT ?", (limit,)
        )
        names = [each.name for each in fields(PlanRow)]
        documents = ((*row, json.loads(placed), json.loads(gained or "null")) for *row, placed, gained in rows)
        return [PlanRow(**dict(zip(names, each, strict=True))) for each in documents]

    def add_event(self, at_s: float, kind: str, words: str) -> None:
        """Keeps an event."""
        self._connection.execute("INSERT INTO events VALUES (?, ?, ?)", (at_s, kind, words))

    def events(self, limit: int) -> list[dict[str, Any]]:
        """Returns the last events, newest first."""
        rows = self._connection.execute(
            "SELECT at_s, kind, words FROM events ORDER BY at_s DESC, rowid DESC LIMIT ?", (limit,)
        )
        return [{"at_s": at_s, "kind": kind, "words": words} for at_s, kind, words in rows]

    def put(self, key: str, value: Any) -> None:
        """Keeps plain data under a key."""
        self._connection.execute("INSERT OR REPLACE INTO standing VALUES (?, ?)", (key, json.dumps(value)))

    def get(self, key: str) -> Any:
        """Returns what was put last under a key; None for nothing."""
        row = self._connection.execute("SELECT value FROM standing WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def forget(self, now_s: float) -> None:
        """Drops rows that are too old to matter."""
        for table in ("probes", "counts", "events"):
            self._connection.execute(f"DELETE FROM {table} WHERE at_s < ?", (now_s - KEEP_S,))
        self._connection.execute("DELETE FROM plans WHERE id <= (SELECT max(id) FROM plans) - ?", (MOST_PLANS,))


def _check_owner(connection: sqlite3.Connection, path: Path, app: str) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return
    if "file" not in tables:
        raise DataError(f"{path} is a database of something else, not a controller's memory")
    found = dict(connection.execute("SELECT key, value FROM file").fetchall())
    if found.get("schema_version") != str(SCHEMA):
        raise DataError(
            f"{path} has schema {found.get('schema_version')}, this version reads {SCHEMA}; "
            "move the file away to begin anew"
        )
    if found.get("app") != app:
        raise DataError(f"{path} belongs to application {found.get('app')!r}, not {app!r}; give each a file of its own")


def _unpacked(shape: str, columns: bytes) -> Observations:
    document = json.loads(shape)
    try:
        with np.load(io.BytesIO(columns), allow_pickle=False) as arrays:
            kept = dict(arrays)
        return Observations(shape=StreamShape(**(document | {"ramps": tuple(document["ramps"])})), **kept)
    except (OSError, ValueError, KeyError, EOFError, TypeError, zlib.error, BadZipFile) as error:
        raise DataError(f"the controller's memory holds probes that cannot be read: {error}") from error
