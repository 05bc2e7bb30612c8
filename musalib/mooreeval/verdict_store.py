"""Verdicts by content: the same task, candidate, configuration and versions are judged once.

One SQLite file in WAL mode: a commit survives kill -9, and several processes may share it.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path

from musalib.verdict import Verdict


class VerdictStore:
    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()
        self._db = sqlite3.connect(self.path, check_same_thread=False, timeout=60)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.execute(
                "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, record TEXT NOT NULL)"
            )
            self._db.commit()
        except sqlite3.DatabaseError as error:
            raise ValueError(
                f"{self.path} is no verdict store ({error}); move it away or choose another path"
            ) from error

    def get(self, key: str) -> Verdict | None:
        with self._lock:
            row = self._db.execute("SELECT record FROM verdicts WHERE key = ?", (key,)).fetchone()
        return Verdict.from_dict(json.loads(row[0])) if row else None

    def put(self, key: str, verdict: Verdict) -> None:
        with self._lock:
            self._db.execute(
                "INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, json.dumps(verdict.to_dict()))
            )
            self._db.commit()

    def __len__(self) -> int:
        with self._lock:
            return self._db.execute("SELECT count(*) FROM verdicts").fetchone()[0]

    def close(self) -> None:
        with self._lock:
            self._db.close()
