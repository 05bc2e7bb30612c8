"""MooreEval: extract -> static legality -> build -> trials -> runtime legality -> timing, cheapest check first.

Three kinds of process per job: the reference (task code only), the candidate (inputs in, raw output bytes out) and
this one, the judge, which holds seeds, expected outputs and clocks and never loads code of either.
"""

from __future__ import annotations

import concurrent.futures as futures
import contextlib
import hashlib
import json
import os
import platform
import shutil
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import musalib
from musalib.mooreeval import legality
from musalib.mooreeval.build import Builder
from musalib.mooreeval.config import EvalConfig
from musalib.mooreeval.examination import Examination
from musalib.mooreeval.extract import ExtractError, extract
from musalib.mooreeval.reference import Reference
from musalib.mooreeval.requests import BuildRequest, literal_requests
from musalib.mooreeval.session import InfraError, Zygote
from musalib.mooreeval.toolchain import Toolchain, cache_root
from musalib.mooreeval.verdict_store import VerdictStore
from musalib.reward import reward
from musalib.tasks import Task, TaskError
from musalib.verdict import Verdict

CHUNK = 64  # candidates whose builds are started together
RETRIES = 2  # of a job that the machine failed


class MooreEval:
    """Verifier for one backend. A context manager: leaving it ends every process that it started."""

    def __init__(self, backend: str = "cpu", config: EvalConfig | None = None) -> None:
        if backend != "cpu":
            raise ValueError(f"backend {backend!r} is not available; this version has: cpu")
        self.backend, self.config = backend, config or EvalConfig()
        self.toolchain = Toolchain.locate()
        self.workers = self.config.workers or os.cpu_count() or 1
        # beside the toolchain, not in /tmp: jobs see a private /tmp
        root = cache_root() / "builds"
        root.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
        self.store = VerdictStore(self.config.store) if self.config.store else None
        self._zygote: Zygote | None = None
        self._builder: Builder | None = None
        self._references: OrderedDict[str, Reference] = OrderedDict()
        self._lock = threading.RLock()

    # -- public ---------------------------------------------------------------------------------------------------
    def verify(self, task: Task, response: str | bytes) -> Verdict:
        """The verdict on one response. Raises TaskError when the task itself does not run."""
        try:
            return self._judge(task, response)
        finally:
            if self.config.seed is None:  # the next call draws fresh secrets
                self._forget_references()

    def verify_many(self, jobs: Iterable[tuple[Task, str | bytes]]) -> Iterator[Verdict]:
        """Verdicts in the order of the jobs, each as soon as its predecessors are done."""
        waiting: dict[int, Verdict] = {}
        wanted = 0
        for index, verdict in self.verify_stream(jobs):
            waiting[index] = verdict
            while wanted in waiting:
                yield waiting.pop(wanted)
                wanted += 1

    def verify_stream(self, jobs: Iterable[tuple[Task, str | bytes]]) -> Iterator[tuple[int, Verdict]]:
        """(index, verdict) as they finish. A broken task gives `infra:task` for its own jobs only."""
        listed = list(jobs)
        seeds = os.urandom(32)
        same: dict[str, futures.Future[Verdict]] = {}
        with (
            futures.ThreadPoolExecutor(self.workers) as pool,
            futures.ThreadPoolExecutor(self.workers) as ahead,
        ):
            chunks = [range(i, min(i + CHUNK, len(listed))) for i in range(0, len(listed), CHUNK)]
            started = [ahead.submit(self._prefetch, [listed[i] for i in chunk]) for chunk in chunks]
            try:
                for chunk, prefetched in zip(chunks, started, strict=True):
                    prefetched.result()
                    running: dict[futures.Future[Verdict], list[int]] = {}
                    for index in chunk:
                        task, response = listed[index]
                        key = self._key(task, response)
                        if key not in same:
                            same[key] = pool.submit(self._contained, task, response, seeds)
                        running.setdefault(same[key], []).append(index)
                    for done in futures.as_completed(running):
                        for index in running[done]:
                            yield (
                                index,
                                replace(
                                    done.result(),
                                    task=listed[index][0].id,
                                    candidate_sha256=_sha(listed[index][1]),
                                ),
                            )
            finally:
                for future in (*started, *same.values()):
                    future.cancel()
                self._forget_references()

    def close(self) -> None:
        self._forget_references()
        if self._zygote is not None:
            self._zygote.close()
            self._zygote = None
        if self.store is not None:
            self.store.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> MooreEval:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def isolation(self) -> str:
        """`namespaces`, or `plain` where the machine refuses them."""
        return self._worker().isolation

    @property
    def build_counts(self) -> dict[str, int]:
        """Builds by tier since the start."""
        return dict(self._builder.counts) if self._builder else {}

    # -- plumbing -------------------------------------------------------------------------------------------------
    def _worker(self) -> Zygote:
        with self._lock:
            if self._zygote is None or self._zygote.process.poll() is not None:
                self.toolchain.prepare()
                keep = [
                    self.toolchain.folder,
                    Path(sys.prefix),
                    Path(sys.base_prefix),
                    Path(musalib.__file__).parent.parent,
                ]
                self._zygote = Zygote(
                    self.toolchain.shim, [self.folder, *keep], self.config.isolate, self.config.memory_bytes
                )
            return self._zygote

    def _make_builder(self) -> Builder:
        with self._lock:
            if self._builder is None:
                self._builder = Builder(
                    self.toolchain.prepare(),
                    self.folder,
                    self.config.build_timeout_s,
                    self.config.build == "plain",
                )
            return self._builder

    def _prefetch(self, jobs: list[tuple[Task, str | bytes]]) -> None:
        requests: list[BuildRequest] = []
        for task, response in jobs:
            if self.store is not None and self.store.get(self._key(task, response)) is not None:
                continue
            with contextlib.suppress(ExtractError):
                requests += literal_requests(extract(response))
        if len({r.key for r in requests}) > 1:
            self._make_builder().prefetch(requests)

    def _reference(self, task: Task, seeds: bytes | None) -> Reference:
        key = hashlib.sha256(task.source.encode()).hexdigest()
        with self._lock:
            found = self._references.get(key)
            if found is None:
                found = self._references[key] = Reference(
                    task, self.config.trials, self._secret(task, seeds), self.config.timeout_s
                )
                while len(self._references) > 64:
                    self._references.popitem(last=False)[1].close()
            return found

    def _forget_references(self) -> None:
        with self._lock:
            for reference in self._references.values():
                reference.close()
            self._references.clear()

    def _secret(self, task: Task, seeds: bytes | None) -> bytes:
        material = (
            f"musalib-{self.config.seed}".encode()
            if self.config.seed is not None
            else seeds or os.urandom(32)
        )
        return hashlib.sha256(material + task.source.encode()).digest()

    def _key(self, task: Task, response: str | bytes) -> str:
        c = self.config
        source: Any = (
            response.decode("utf-8", "backslashreplace") if isinstance(response, bytes) else response
        )
        with contextlib.suppress(ExtractError):
            source = ["module", extract(response)]
        parts = [
            task.source, task.tolerance, source, self.backend, c.trials, c.timeout_s, c.timing, c.build, c.speedup_cap, c.seed, repr(c.reward),
            self.toolchain.folder.name, metadata.version("torch"), musalib.__version__, platform.node() if c.timing else None,
        ]  # fmt: skip
        return hashlib.sha256(json.dumps(parts).encode("utf-8", "backslashreplace")).hexdigest()

    # -- one candidate --------------------------------------------------------------------------------------------
    def _contained(self, task: Task, response: str | bytes, seeds: bytes) -> Verdict:
        try:
            return self._judge(task, response, seeds)
        except TaskError as error:
            return Verdict("infra:task", task=task.id, backend=self.backend, detail=str(error))

    def _judge(self, task: Task, response: str | bytes, seeds: bytes | None = None) -> Verdict:
        key = self._key(task, response) if self.store is not None else ""
        if self.store is not None and (found := self.store.get(key)):
            return replace(found, task=task.id, candidate_sha256=_sha(response))
        started, trouble = time.monotonic(), ""
        for attempt in range(RETRIES + 1):
            try:
                verdict = self._attempt(task, response, seeds)
                break
            except (InfraError, OSError) as error:
                trouble = f"{type(error).__name__}: {error}"
                time.sleep(0.2 * attempt)
        else:
            verdict = Verdict("infra:worker", detail=f"{trouble} (after {RETRIES + 1} attempts)")
        evidence = {
            **verdict.evidence, "wall_s": round(time.monotonic() - started, 4),
            "versions": {"musalib": musalib.__version__, "torch": metadata.version("torch"), "python": platform.python_version()},
        }  # fmt: skip
        verdict = replace(
            verdict, task=task.id, candidate_sha256=_sha(response), backend=self.backend, evidence=evidence
        )
        score = reward(verdict, self.config.reward)
        verdict = replace(verdict, reward=None if score != score else score)
        if self.store is not None and verdict.kind != "infra":
            self.store.put(key, verdict)
        return verdict

    def _attempt(self, task: Task, response: str | bytes, seeds: bytes | None) -> Verdict:
        try:
            source = extract(response)
        except ExtractError as error:
            return Verdict(error.category, compiled=False, correct=False, q=0.0, detail=str(error))
        reference = self._reference(task, seeds)
        reference.prepare(self._worker())
        static = legality.python_findings(source)
        with self._worker().fork() as job:
            return Examination(
                self._make_builder, self.config, self._worker().isolation, reference, job, source, static
            ).run()


def _sha(response: str | bytes) -> str:
    data = response if isinstance(response, bytes) else response.encode("utf-8", "surrogateescape")
    return hashlib.sha256(data).hexdigest()
