"""An SQLite file that somebody else made, opened so that nothing in it can run, and looked through before it is believed.

A file may define what is computed as it is read: a view that never ends, a column that is worked out, a table that a module of
SQLite's answers for. Or its pages may point at each other so that a walk through them does not end. This follows what SQLite
advises for files that are not trusted (https://sqlite.org/security.html, section 2).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection

MOST_BYTES = 1 << 28
"""Of one value; a fit with its bootstrap takes some megabytes (assumed)."""
_COMPUTED = (2, 3)  # of a column in `table_xinfo`: worked out when it is read, or when it was written


def connect(uri: str) -> sqlite3.Connection:
    """A connection to a file of somebody else's; any thread may use it.

    Args:
        uri: As `storage.read_only` gives it.
    """
    connection = sqlite3.connect(uri, uri=True, check_same_thread=False)
    connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MOST_BYTES)
    for pragma in ("trusted_schema = OFF", "cell_size_check = ON", "ignore_check_constraints = ON"):
        connection.execute(f"PRAGMA {pragma}")
    return connection


def fault(connection: sqlite3.Connection, triggers: Collection[str] = ()) -> str:
    """What keeps a file from being read, "" if nothing does.

    Args:
        connection: Of `connect`.
        triggers: That it may have, as SQLite keeps them.

    Raises:
        sqlite3.DatabaseError: If it is no database, or too damaged to be looked through.
    """
    for kind, name, sql in connection.execute("SELECT type, name, sql FROM sqlite_master").fetchall():
        text = " ".join(str(sql or "").split())
        if kind == "view" or (kind == "trigger" and text not in triggers):
            return f"{name}: must be a table, got a {kind}, which could run when it is read"
        if kind == "table" and text.upper().startswith("CREATE VIRTUAL"):
            return f"{name}: must be a table with rows of its own, got {text[:60]!r}"
        if kind == "table":
            found = connection.execute("SELECT name, hidden FROM pragma_table_xinfo(?)", (name,)).fetchall()
            if computed := [column for column, hidden in found if hidden in _COMPUTED]:
                return f"{name}.{computed[0]}: must be a column with values of its own, got one that is computed"
    told = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    return "" if told == "ok" else f"is damaged: {' '.join(told.split())[:200]}"
