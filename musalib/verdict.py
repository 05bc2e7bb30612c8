"""The verdict on one candidate (Eq. 1 plus its evidence), as plain data that survives JSON."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

CATEGORIES = {
    "ok": "compiled, correct and legal",
    "extract_error": "no `class ModelNew` could be read from the response",
    "compile_error": "the Python or C++ source does not build",
    "runtime_error": "import, constructor or forward failed, crashed or ran too long",
    "correctness_error": "structure, dtype, shape or values differ from the reference",
    "cheating": "the work was not done by native code written in the candidate",
    "infra": "the machine failed; nothing is said about the candidate",
}


@dataclass(frozen=True)
class Verdict:
    """V(c, x) of Eq. 1. `None` means "not determined": a candidate that never compiled has no `correct`.

    `q` is the share of trials passed, in [0, 1]; `speedup` is reference time / candidate time and is set
    only when the candidate is correct and legal. `evidence` holds per-trial results, operators seen, times
    in seconds, seeds, versions and the isolation that was in force.
    """

    category: str
    task: str | None = None
    candidate_sha256: str | None = None
    backend: str | None = None
    compiled: bool | None = None
    correct: bool | None = None
    legal: bool | None = None
    q: float | None = None
    speedup: float | None = None
    detail: str | None = None
    reward: float | None = None
    evidence: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if self.kind not in CATEGORIES:
            raise ValueError(
                f"unknown verdict category {self.category!r}; allowed: {', '.join(CATEGORIES)} (with an optional ':what')"
            )
        if self.q is not None and not (isinstance(self.q, (int, float)) and 0.0 <= self.q <= 1.0):
            raise ValueError(f"q is the share of trials passed and must lie in [0, 1], got {self.q!r}")
        if not isinstance(self.evidence, dict):
            raise ValueError(f"evidence must be an object, got {type(self.evidence).__name__}")

    @property
    def kind(self) -> str:
        """The part of the category before the colon."""
        return str(self.category).partition(":")[0]

    @property
    def success(self) -> bool:
        """1[s >= 1] of Eq. 22: compiled, correct and legal."""
        return self.category == "ok"

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, record: dict[str, Any]) -> Verdict:
        """Read a verdict back. Missing fields become None; fields of a newer version are ignored."""
        if not isinstance(record, dict) or not isinstance(record.get("category"), str):
            raise ValueError("a verdict record needs a 'category' string")
        known = {f.name for f in dataclasses.fields(cls)}
        values = {name: value for name, value in record.items() if name in known}
        values["evidence"] = values.get("evidence") or {}
        return cls(**values)
