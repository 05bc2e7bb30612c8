"""The reference side of one task: secret inputs, the outputs they should give, and the process that is timed against."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from musalib.mooreeval import judge
from musalib.mooreeval.session import Job, JobError, Zygote
from musalib.tasks import Task, TaskError

TIMING_SETS = 3  # different inputs that a timed block draws from


@dataclass(frozen=True)
class Trial:
    """Inputs as sent to the candidate, and the reference's outputs, which only the judge holds."""

    group: int
    inputs: Any
    input_bytes: bytes
    outputs: Any
    output_bytes: bytes
    aliases: list[bool]
    inputs_changed: bool

    def compare_outputs(
        self, answer: dict[str, Any], payload: bytearray, tolerance: float | None
    ) -> tuple[judge.Mismatch | None, dict[str, float]]:
        return judge.compare(
            self.outputs,
            memoryview(self.output_bytes),
            answer.get("outputs") or {},
            memoryview(payload),
            tolerance,
        )

    def compare(
        self, answer: dict[str, Any], payload: bytearray, tolerance: float | None
    ) -> tuple[judge.Mismatch | None, dict[str, float]]:
        mismatch, worst = self.compare_outputs(answer, payload, tolerance)
        if mismatch is None and answer.get("inputs_changed") and not self.inputs_changed:
            mismatch = judge.Mismatch(
                "mutated_input", "forward changed one of its inputs, which the reference leaves alone"
            )
        aliases = answer.get("aliases") or []
        if mismatch is None and any(
            have and not want for want, have in zip(self.aliases, aliases, strict=False)
        ):
            mismatch = judge.Mismatch(
                "aliased_output", "an output shares memory with an input, which the reference's does not"
            )
        return mismatch, worst


class Reference:
    """Prepared once per batch of candidates, under the first thread that needs it."""

    def __init__(self, task: Task, trials: int, secret: bytes, timeout_s: float) -> None:
        self.task, self.wanted, self.secret, self.timeout_s = task, trials, secret, timeout_s
        self.model_seed = self._seed("model")
        self.trials: list[Trial] = []
        self.init: tuple[Any, bytes] = (None, b"")
        self._lock, self._timed = threading.Lock(), threading.Lock()
        self._job: Job | None = None
        self._zygote: Zygote | None = None
        self._timing_ready = False

    def _seed(self, what: str) -> int:
        return int.from_bytes(hashlib.sha256(self.secret + what.encode()).digest()[:6], "big")

    @property
    def timing_sets(self) -> list[Trial]:
        return [t for t in self.trials if t.group == 0][:TIMING_SETS]

    def prepare(self, zygote: Zygote) -> None:
        """Run the reference on fresh inputs. Raises TaskError when the task's own code fails."""
        with self._lock:
            self._zygote = zygote
            if self.trials:
                return
            self._job, trials = self._start(zygote), []
            groups = self._groups
            for number in range(max(self.wanted, groups)):
                trials.append(self._trial(number, number % groups))
            self.trials = trials
            self._stop()

    def _start(self, zygote: Zygote) -> Job:
        job = zygote.fork()
        limit = max(self.timeout_s * 6, 60.0)
        try:
            job.ask(
                {"do": "load", "name": "task", "role": "task", "defines": ["Model", "get_inputs"]},
                self.task.source.encode(),
                timeout_s=limit,
            )
            answer, payload = job.ask({"do": "reference", "seed": self.model_seed}, timeout_s=limit)
        except JobError as error:
            job.close()
            raise TaskError(f"task {self.task.id} does not run: {_located(error)}") from error
        self.init, self._groups = (answer["init"], bytes(payload)), int(answer["groups"])
        if self._groups < 1:
            job.close()
            raise TaskError(f"task {self.task.id}: get_input_groups() returned no group")
        return job

    def _trial(self, number: int, group: int) -> Trial:
        try:
            answer, payload = self._job.ask(
                {"do": "reference_trial", "seed": self._seed(f"trial {number}"), "group": group},
                timeout_s=max(self.timeout_s * 6, 60.0),
            )
        except JobError as error:
            self._stop()
            raise TaskError(f"task {self.task.id}: the reference fails: {_located(error)}") from error
        cut = answer["inputs_bytes"]
        if "bad" in str(answer["outputs"].get("t")):
            raise TaskError(
                f"task {self.task.id}: the reference returns {answer['outputs'].get('why')}, not tensors"
            )
        return Trial(
            group,
            answer["inputs"],
            bytes(payload[:cut]),
            answer["outputs"],
            bytes(payload[cut:]),
            answer["aliases"],
            answer["inputs_changed"],
        )

    @contextlib.contextmanager
    def timed(self) -> Iterator[Job]:
        """The live reference process with its input sets in place, for one caller at a time."""
        with self._timed:
            if self._job is None:
                self._job = self._start(self._zygote)
                for number, trial in enumerate(self.timing_sets):
                    if number == 0:
                        self._trial(self.trials.index(trial), trial.group)
                    self._job.ask(
                        {"do": "keep_inputs", "inputs": trial.inputs},
                        trial.input_bytes,
                        timeout_s=self.timeout_s,
                    )
            try:
                yield self._job
            except BaseException:
                self._stop()
                raise

    def _stop(self) -> None:
        if self._job is not None:
            self._job.close()
            self._job = None

    def close(self) -> None:
        self._stop()


def _located(error: JobError) -> str:
    line = error.report.get("line")
    return f"{error}" + (f" (line {line}: {error.report.get('code')})" if line else "")
