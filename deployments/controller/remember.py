"""The controller's persistent state and history, in one SQLite file: probes, counts, plans, and events."""

from __future__ import annotations

import io
import json
import logging
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from deployments.wire.messages import Interval
from earlyexit.errors import DataError, raising
from optimizer.live.plan_changes import Trial
from optimizer.live.stragglers import RestingReplica
from optimizer.plans.plan import PlacedPlan, Stage
from optimizer.plans.plan_file import parse_placed, placed_document
from profiles.stream import Observations, StreamShape

Placed = Annotated[PlacedPlan, PlainValidator(parse_placed), PlainSerializer(placed_document)]
Blamed = Annotated[Mapping[tuple[Stage, ...], int], PlainValidator(lambda _: {}), PlainSerializer(lambda _: ())]


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The persistent state of the controller: the current plan, and everything that decisions depend on."""

    placed: Placed
    """The current plan, which ingresses should follow."""
    reason: str
    """Why it became the current plan."""
    at_s: float
    """When it became the current plan."""
    followed: Placed | None = None
    """The plan that all ingresses were last made to follow; None: unknown."""
    followed_s: float = 0.0
    spare_epoch: int = 0
    """The epoch at which the followed plan gets new thresholds during a change. No other plan has it."""
    planned_s: float
    """When the controller last planned or, before that, when it started."""
    changed_s: float
    """When the share of inputs that leave at each exit last changed."""
    rate_changed_s: float
    suspended: str | None = None
    """Why the service refuses all inputs; None: it serves."""
    hold: bool = False
    """Whether the controller keeps the plan until an operator applies another one."""
    trial: Trial | None = None
    previous: Placed | None = None
    """The plan before the current one. If there is a trial, a rollback returns to it."""
    resting: tuple[RestingReplica, ...] = ()
    blamed: Blamed = field(default_factory=dict)
    """Plans that were rolled back: the first control period in which each may be chosen again. They are not stored: the
    next controller process may try them again."""
    thresholds: Mapping[int, float]
    """The current thresholds of all ramps of the problem: those of the settings until they are tuned."""

    @classmethod
    def first(cls, placed: PlacedPlan, thresholds: Mapping[int, float], now_s: float) -> State:
        """Returns the state of a controller without a history, whose ingresses follow this plan."""
        names = "at_s", "followed_s", "planned_s", "changed_s", "rate_changed_s"
        times: dict[str, Any] = dict.fromkeys(names, now_s)
        return cls(placed=placed, reason="start", followed=placed, thresholds=thresholds, **times)

    def document(self) -> Any:
        """Returns the state as plain data, which `parse_state` reads back."""
        return STATE.dump_python(self, mode="json")


STATE = TypeAdapter(State)
INTERVAL = TypeAdapter(Interval)


def parse_state(document: Any) -> State:
    """Reads a state from plain data. Raises DataError, and PlanError for plans that this version refuses."""
    with raising(DataError, "the stored state of the controller cannot be read", ValidationError, KeyError, TypeError):
        return STATE.validate_python(document)


logger = logging.getLogger(f"ray.serve.{__name__}")

SCHEMA = 1
KEEP_S = 7200.0
"""The age at which probes, counts and events are dropped, here and in the live stream of exit records."""
MOST_PLANS = 1000
BUSY_S = 5.0
"""How long a controller that was just replaced may still lock the file."""
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
DELETE FROM plans WHERE NOT (json_valid(placed) AND json_valid(ifnull(gained, 'null')));
"""


class History:
    """The history of one application's controller. What was written survives a killed process.

    A power failure may lose the last data, because the write-ahead log is not synced at every commit. While the disk is
    full, `put` raises sqlite3.Error. Other data, on which the service does not depend, are lost with a warning.
    """

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection

    @classmethod
    def open(cls, path: Path, app: str) -> History:
        """Opens or creates the file. Raises DataError for a file of another version, application or format."""
        if not path.parent.is_dir():
            raise DataError(f"{path} cannot be used for the controller's history: there is no folder {path.parent}")
        with raising(DataError, f"{path} cannot be used for the controller's history", sqlite3.Error, UnicodeError):
            # Serve may create and run a replica in different threads, but never uses two at a time.
            connection = sqlite3.connect(path, timeout=BUSY_S, check_same_thread=False, isolation_level=None)
            connection.text_factory = partial(str, encoding="utf-8", errors="replace")  # readers refuse damaged text
            _check_owner(connection, path, app)  # before anything is written to the file
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            owner = {"schema_version": str(SCHEMA), "app": app}
            with connection:  # all or nothing: a file without an owner would be refused
                connection.executescript(f"BEGIN; {TABLES}")
                connection.executemany("INSERT OR IGNORE INTO file VALUES (?, ?)", owner.items())
        return cls(connection)

    @classmethod
    def check(cls, path: Path, app: str) -> None:
        """Raises what `open` would raise, without creating the file."""
        if path.exists() or not path.parent.is_dir():
            cls.open(path, app).close()

    def close(self) -> None:
        self._connection.close()

    def add_probes(self, at_s: float, probes: Observations) -> None:
        """Stores the probes of one collection."""
        shape = json.dumps(asdict(probes.shape))
        packed = io.BytesIO()
        arrays: dict[str, Any] = {name: array for name, array in probes.arrays().items() if array is not None}
        np.savez_compressed(packed, **arrays)
        self._try_to_write("INSERT INTO probes VALUES (?, ?, ?)", (at_s, shape, packed.getvalue()))

    def probes(self) -> Iterator[Observations]:
        """Yields the probes of each collection, oldest first. Raises DataError for a row that cannot be read."""
        rows = self._connection.execute("SELECT shape, columns FROM probes ORDER BY at_s, rowid")
        return (_unpacked(shape, columns) for shape, columns in rows)

    def add_counts(self, interval: Interval) -> None:
        """Stores the counts of one collection."""
        self._try_to_write("INSERT INTO counts VALUES (?, ?)", (interval.at_s, INTERVAL.dump_json(interval).decode()))

    def counts(self) -> list[Interval]:
        """Returns the intervals, oldest first. Raises pydantic's ValidationError for a row that cannot be read."""
        rows = self._connection.execute("SELECT interval FROM counts ORDER BY at_s, rowid")
        return [INTERVAL.validate_json(text) for (text,) in rows]

    def add_plan(self, at_s: float, placed: PlacedPlan, outcome: str, reason: str, words: str) -> None:
        """Stores a plan.

        `outcome`: `in force`, or `proposed` (rejected). `reason`: why the controller planned. `words`: the verdict.
        """
        self._try_to_write(
            "INSERT INTO plans (epoch, at_s, outcome, reason, words, placed) VALUES (?, ?, ?, ?, ?, ?)",
            (placed.epoch, at_s, outcome, reason, words, json.dumps(placed_document(placed))),
        )

    def gained(self, epoch: int, measured: Mapping[str, Any]) -> None:
        """Stores the measurements of the plan of an epoch."""
        self._try_to_write(
            "UPDATE plans SET gained = ? WHERE id = "
            "(SELECT max(id) FROM plans WHERE epoch = ? AND outcome = 'in force')",  # new settings restart at epoch 0
            (json.dumps(measured), epoch),
        )

    def plans(self, limit: int) -> list[dict[str, Any]]:
        """Returns the last plans, newest first, by the names of the table's columns.

        `placed` has the plan's predictions. `gained` is None until the plan was replaced.
        """
        names = "epoch", "at_s", "outcome", "reason", "words", "placed", "gained"
        rows = self._connection.execute(f"SELECT {', '.join(names)} FROM plans ORDER BY id DESC LIMIT ?", (limit,))
        documents = ((*row, json.loads(placed), json.loads(gained or "null")) for *row, placed, gained in rows)
        return [dict(zip(names, each, strict=True)) for each in documents]

    def add_event(self, at_s: float, kind: str, words: str) -> None:
        """Stores an event."""
        self._try_to_write("INSERT INTO events VALUES (?, ?, ?)", (at_s, kind, words))

    def events(self, limit: int) -> list[dict[str, Any]]:
        """Returns the last events, newest first."""
        rows = self._connection.execute("SELECT * FROM events ORDER BY rowid DESC LIMIT ?", (limit,))
        return [{"at_s": at_s, "kind": kind, "words": words} for at_s, kind, words in rows]

    def put(self, **values: Any) -> None:
        """Stores plain data by key, all or nothing."""
        rows = ", ".join(["(?, ?)"] * len(values))
        fields = [text for key, value in values.items() for text in (key, json.dumps(value))]
        self._connection.execute(f"INSERT OR REPLACE INTO standing VALUES {rows}", fields)

    def get(self, key: str) -> Any:
        """Returns the data under a key; None if there are none."""
        row = self._connection.execute("SELECT value FROM standing WHERE key = ?", (key,)).fetchone()
        return None if row is None else json.loads(row[0])

    def forget(self, now_s: float) -> None:
        """Deletes rows that are too old."""
        for table in ("probes", "counts", "events"):
            self._try_to_write(f"DELETE FROM {table} WHERE at_s < ?", (now_s - KEEP_S,))
        self._try_to_write("DELETE FROM plans WHERE id <= (SELECT max(id) FROM plans) - ?", (MOST_PLANS,))

    def _try_to_write(self, statement: str, values: Sequence[Any]) -> None:
        try:
            self._connection.execute(statement, values)
        except sqlite3.Error as error:
            logger.warning("the controller's history cannot be written: %s", error)


def _check_owner(connection: sqlite3.Connection, path: Path, app: str) -> None:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return
    if "file" not in tables:
        raise DataError(f"{path} is another database, not a controller's history")
    found = dict(connection.execute("SELECT key, value FROM file"))
    if found.get("schema_version") != str(SCHEMA):
        raise DataError(
            f"{path} has schema {found.get('schema_version')}, this version reads {SCHEMA}; move it to start again"
        )
    if connection.execute("PRAGMA integrity_check").fetchone() != ("ok",):
        raise DataError(f"{path} is damaged; move it to start again")
    if found.get("app") != app:
        raise DataError(f"{path} belongs to application {found.get('app')!r}, not {app!r}; each needs its own file")


def _unpacked(shape: str, columns: bytes) -> Observations:
    try:
        document = json.loads(shape)
        with np.load(io.BytesIO(columns), allow_pickle=False) as arrays:
            return Observations(shape=StreamShape(**(document | {"ramps": tuple(document["ramps"])})), **arrays)
    except Exception as error:  # damaged archives raise many kinds
        raise DataError(f"the controller's history has probes that cannot be read: {error}") from error
