"""Checkpoints that can be trusted after a kill: sealed when complete, checked before use, the newest good one wins.

A sealed checkpoint holds `seal.json`, written last, with the size and SHA-256 of every other file. Event files
(jsonl) are cut back to the checkpoint's step on resume, so that nothing is recorded twice.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from musalib.store import read_json, read_jsonl, sha256, write_json, write_jsonl

SEAL = "seal.json"


def seal(folder: Path) -> None:
    """Record what the folder holds; a folder without a seal was cut short."""
    (folder / SEAL).unlink(missing_ok=True)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    write_json(folder / SEAL, files)


def fault(folder: Path) -> str | None:
    """Why the folder cannot be used, or None when every sealed file is as it was written."""
    try:
        files = read_json(folder / SEAL)
    except FileNotFoundError:
        return f"it has no {SEAL}: writing it was interrupted"
    except ValueError as error:
        return str(error)
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"] or sha256(path) != expected["sha256"]:
            return f"{name} differs from what was written"
    return None


def fingerprint(policy_dir: str | Path) -> str:
    """Hash over the weight files of a policy folder; a hub id stands for itself."""
    weights = sorted(Path(policy_dir).glob("*.safetensors"))
    return digest([sha256(path) for path in weights]) if weights else str(policy_dir)


def digest(value: Any) -> str:
    """Hash of plain data."""
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def checkpoint_step(folder: Path) -> int | None:
    match = re.fullmatch(r"checkpoint-(\d+)", folder.name)
    return int(match.group(1)) if match else None


def newest_checkpoint(out_dir: Path) -> Path | None:
    """The newest sound `checkpoint-<step>` under `out_dir`; every broken newer one is named in a warning."""
    folders = [f for f in out_dir.glob("checkpoint-*") if f.is_dir() and checkpoint_step(f) is not None]
    for folder in sorted(folders, key=checkpoint_step, reverse=True):  # type: ignore[arg-type]
        reason = fault(folder)
        if reason is None:
            return folder
        warnings.warn(f"checkpoint {folder} is not usable ({reason}); trying the one before", stacklevel=2)
    return None


def cut_events(path: Path, keep: Callable[[dict[str, Any]], bool]) -> None:
    """Rewrite a jsonl file with the records that `keep` accepts; a torn last line goes too."""
    if path.exists():
        write_jsonl(path, [record for record in read_jsonl(path) if keep(record)])


def check_same_settings(path: Path, settings: dict[str, Any]) -> None:
    """Write a stage's settings on the first call; ValueError, naming them, when a later call changes any."""
    settings = json.loads(json.dumps(settings))
    if not path.exists():
        write_json(path, settings)
        return
    before = read_json(path)
    changed = [f"{k}: {before.get(k)!r} -> {v!r}" for k, v in settings.items() if before.get(k) != v]
    if changed:
        raise ValueError(
            f"{path.parent} holds results of other settings ({'; '.join(changed)}); use another folder or delete it"
        )
