"""A stage of a run: its parameters, its sizes, its folder, and what earlier stages left for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from musalib import profiles, runs, store
from musalib.parameters import UsageError
from musalib.tasks import Task, load_tasks

if TYPE_CHECKING:
    import pandas as pd

    from musalib.mooreeval import MooreEval

DATA = "02_data_synthesis"


class MissingInput(UsageError):
    """An input of this notebook is not there; the message names the notebook that makes it."""


# --- parameters of the notebooks: None keeps the profile's value -------------------------------------------


@dataclass(frozen=True)
class Parameters:
    run: str
    profile: str = "tiny"
    seed: int = 0
    eval_samples: int | None = None


@dataclass(frozen=True)
class VerifierParameters(Parameters):
    trials: int | None = None


@dataclass(frozen=True)
class DataParameters(Parameters):
    eval_tasks: int | None = None
    base_samples: int | None = None
    base_steps: int | None = None
    base_learning_rate: float | None = None
    sft_samples: int | None = None
    rl_tasks: int | None = None


@dataclass(frozen=True)
class SFTParameters(Parameters):
    sft_steps: int | None = None
    sft_learning_rate: float | None = None


@dataclass(frozen=True)
class RFTParameters(Parameters):
    rft_tasks: int | None = None
    rft_samples: int | None = None
    rft_steps: int | None = None
    rft_learning_rate: float | None = None


@dataclass(frozen=True)
class SingleTurnParameters(Parameters):
    rl_steps: int | None = None
    rl_learning_rate: float | None = None
    mirror_pop_delta: float | None = None


@dataclass(frozen=True)
class MultiTurnParameters(Parameters):
    multi_steps: int | None = None
    multi_turns: int | None = None
    multi_learning_rate: float | None = None
    alpha: float | None = None
    retry_share: float | None = None
    mirror_pop_delta: float | None = None


@dataclass(frozen=True)
class AblationParameters(Parameters):
    more_rft: bool = False


# --- one stage of one run ----------------------------------------------------------------------------------


class Stage:
    """A stage's folder and sizes. Opening it locks the folder and refuses artefacts made with other parameters."""

    def __init__(self, name: str, parameters: Parameters) -> None:
        self.name = name
        self.run = parameters.run
        self.seed = parameters.seed
        self.parameters = parameters
        self.profile = profiles.resolve(parameters.profile, dataclasses.asdict(parameters))
        self.folder = runs.artifacts_of(self.run, name)
        self._lock = runs.acquire(self.folder / ".lock", f"stage {name} of run {self.run!r}")
        wanted = {"format": runs.FORMAT, "seed": self.seed, **dataclasses.asdict(self.profile)}
        path = self.folder / "parameters.json"
        if path.exists() and (found := store.read_json(path)) != wanted:
            raise runs.RunError(
                f"{runs.shown(self.folder)} was made with other parameters ({runs.differences(found, wanted)}); "
                "repeat those, choose another run or delete the folder"
            )
        store.write_json(path, wanted)
        import torch

        torch.set_num_threads(self.profile.threads)

    def header(self) -> str:
        """Run, seed, versions and device in three lines."""
        device, versions = runs.device(), runs.versions(runs.PACKAGES)
        names = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        machine = f"{device['cpu']}, {device['cores']} cores, {device['memory_GiB']} GiB"
        return f"run {self.run}, profile {self.profile.name}, seed {self.seed}\n{names}\n{machine}"

    def sizes(self, *prefixes: str) -> pd.DataFrame:
        """The profile's entries that start with one of `prefixes`, as a table."""
        import pandas as pd

        values = profiles.sizes(self.profile, *prefixes)
        return pd.DataFrame(
            {f"profile {self.profile.name}": values.values()}, index=list(values), dtype=object
        )

    def profile_of(self, stage: str) -> profiles.Profile:
        """The sizes that an earlier stage really had."""
        found = store.read_json(self.input(stage, "parameters.json"))
        names = {f.name for f in dataclasses.fields(profiles.Profile)}
        return profiles.Profile(**{name: value for name, value in found.items() if name in names})

    def input(self, stage: str, name: str) -> Path:
        """An artefact of an earlier stage; MissingInput when it is not there yet."""
        path = runs.artifacts_of(self.run, stage) / name
        if not path.exists():
            raise MissingInput(
                f"{runs.shown(path)} is missing: notebooks/{stage}.ipynb makes it (run={self.run!r})"
            )
        return path

    def tasks(self, name: str) -> list[Task]:
        """A task set of notebook 02: sft, rl, tune or final."""
        return load_tasks(self.input(DATA, f"data/tasks_{name}.jsonl"))

    def records(self, stage: str, name: str) -> list[dict[str, Any]]:
        return store.read_jsonl(self.input(stage, name))

    @contextmanager
    def evaluator(self, timing: bool = False) -> Iterator[MooreEval]:
        """The verifier, with verdicts that depend on the run's seed only; `timing` adds speedups."""
        from musalib.mooreeval import EvalConfig, MooreEval

        config = EvalConfig(
            trials=self.profile.trials,
            timing=timing,
            timing_pairs=self.profile.timing_pairs,
            seed=self.seed,
            store=self.folder.parent / "verdicts.sqlite",
        )
        with MooreEval(self.profile.backend, config) as evaluator:
            yield evaluator
