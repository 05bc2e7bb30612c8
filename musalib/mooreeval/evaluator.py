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
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import musalib
from musalib.mooreeval import judge, legality
from musalib.mooreeval.build import Builder, BuildRequest
from musalib.mooreeval.cpp_source import Finding
from musalib.mooreeval.extract import ExtractError, extract
from musalib.mooreeval.reference import Reference
from musalib.mooreeval.requests import literal_requests
from musalib.mooreeval.session import InfraError, Job, JobError, Zygote
from musalib.mooreeval.timing import measure
from musalib.mooreeval.toolchain import Toolchain, cache_root
from musalib.mooreeval.verdict_store import VerdictStore
from musalib.mooreeval.wire import WireError, send
from musalib.reward import RewardConfig, reward
from musalib.tasks import Task, TaskError
from musalib.verdict import Verdict

CHUNK = 128  # candidates whose builds are started together
RETRIES = 2  # of a job that the machine failed


@dataclass(frozen=True)
class EvalConfig:
    """How candidates are judged. Every default is ours: the paper discloses none of them."""

    trials: int = 5  # random inputs per candidate; at least one per input group
    timeout_s: float = 10.0  # import, constructor, each trial, the whole timing
    build_timeout_s: float = 120.0
    timing: bool = True
    timing_pairs: int = 10
    speedup_cap: float = 100.0  # beyond this the clock was fooled: `cheating:excessive_speedup`
    seed: int | None = None  # None: fresh secret seeds; an int makes verdicts reproducible
    workers: int | None = None  # None: one per core
    store: str | Path | None = None  # file of the verdict store
    build: str = "tiered"  # "plain": torch's own load_inline for every candidate, the baseline of the benchmarks
    isolate: bool = True
    memory_bytes: int = 16 << 30  # address space of one job
    reward: RewardConfig = RewardConfig()

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")
        for name in ("timeout_s", "build_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.build not in ("tiered", "plain"):
            raise ValueError(f"build must be 'tiered' or 'plain', got {self.build!r}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1 or None, got {self.workers}")


class MooreEval:
    """Verifier for one backend. A context manager: leaving it ends every process that it started."""

    def __init__(self, backend: str = "cpu", config: EvalConfig = EvalConfig()) -> None:  # noqa: B008 (frozen)
        if backend != "cpu":
            raise ValueError(f"backend {backend!r} is not available; this version has: cpu")
        self.backend, self.config = backend, config
        self.toolchain = Toolchain.locate()
        self.workers = config.workers or os.cpu_count() or 1
        # beside the toolchain, not in /tmp: jobs see a private /tmp
        root = cache_root() / "builds"
        root.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=root))
        self.store = VerdictStore(config.store) if config.store else None
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
        with futures.ThreadPoolExecutor(self.workers) as pool, futures.ThreadPoolExecutor(1) as ahead:
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
                            yield index, replace(done.result(), task=listed[index][0].id, candidate_sha256=_sha(listed[index][1]))
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
                keep = [self.toolchain.folder, Path(sys.prefix), Path(sys.base_prefix), Path(musalib.__file__).parent.parent]
                self._zygote = Zygote(self.toolchain.shim, [self.folder, *keep], self.config.isolate, self.config.memory_bytes)
            return self._zygote

    def _make_builder(self) -> Builder:
        with self._lock:
            if self._builder is None:
                self._builder = Builder(self.toolchain.prepare(), self.folder, self.config.build_timeout_s, self.config.build == "plain")
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
                found = self._references[key] = Reference(task, self.config.trials, self._secret(task, seeds), self.config.timeout_s)
                while len(self._references) > 64:
                    self._references.popitem(last=False)[1].close()
            return found

    def _forget_references(self) -> None:
        with self._lock:
            for reference in self._references.values():
                reference.close()
            self._references.clear()

    def _secret(self, task: Task, seeds: bytes | None) -> bytes:
        material = f"musalib-{self.config.seed}".encode() if self.config.seed is not None else seeds or os.urandom(32)
        return hashlib.sha256(material + task.source.encode()).digest()

    def _key(self, task: Task, response: str | bytes) -> str:
        c = self.config
        source: Any = response.decode("utf-8", "backslashreplace") if isinstance(response, bytes) else response
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
        verdict = replace(verdict, task=task.id, candidate_sha256=_sha(response), backend=self.backend, evidence=evidence)
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
            return _Examination(self, reference, job, source, static).run()


class _Examination:
    """One candidate in its process, from import to timing. Holds what has been learnt so far."""

    def __init__(self, owner: MooreEval, reference: Reference, job: Job, source: str, findings: list[Finding]) -> None:
        self.owner, self.config, self.reference, self.job, self.source = owner, owner.config, reference, job, source
        self.findings = findings
        self.evidence: dict[str, Any] = {"isolation": owner.isolation, "trials": [], "aten_ops": [], "builds": []}
        self.native_calls = 0

    def run(self) -> Verdict:
        if failed := self._load():
            return failed
        if failed := self._construct():
            return failed
        failed, mismatch, q = self._trials()
        if failed:
            return failed
        self.findings += legality.trace_findings(self.evidence["aten_ops"])
        if self.native_calls == 0:
            self.findings.append(Finding("no_native_code", "no compiled function of the candidate ran during forward", "forward"))
        correct = q == 1.0
        if self.findings:
            return self._cheating(correct, q)
        if not correct:
            return self._verdict(f"correctness_error:{mismatch.kind}", compiled=True, correct=False, legal=True, q=q, detail=mismatch.message)
        return self._time(q)

    def _verdict(self, category: str, **fields: Any) -> Verdict:
        return Verdict(category, evidence=self.evidence, **fields)

    def _cheating(self, correct: bool, q: float) -> Verdict:
        self.evidence["findings"] = [f.__dict__ for f in self.findings]
        detail = "; ".join(dict.fromkeys(str(f) for f in self.findings))
        return self._verdict(f"cheating:{self.findings[0].rule}", compiled=True, correct=correct, legal=False, q=q, detail=detail[:1000])

    def _load(self) -> Verdict | None:
        limit = self.config.timeout_s
        wrong: dict[str, Any] = {"compiled": False, "correct": False, "q": 0.0}
        try:
            answer, _ = self.job.ask({"do": "load", "name": "candidate", "role": "candidate", "defines": ["ModelNew"]}, self.source.encode(), timeout_s=limit)
            while answer.get("event") == "build":
                if failed := self._build(answer):
                    return replace(failed, **wrong)
                answer, _ = self.job.answer(limit)
        except JobError as error:
            if error.kind == "timeout":
                return self._verdict("runtime_error:timeout", detail=f"importing the module took longer than {limit:g} s", **wrong)
            if "undefined symbol" in str(error):
                return self._verdict("compile_error:link", detail=_symbol(str(error)), **wrong)
            return self._verdict(f"runtime_error:import_{error.kind}", detail=f"at import: {_located(error)}", **wrong)
        if "ModelNew" not in (answer.get("found") or []):
            return self._verdict("extract_error:no_modelnew", detail="the module does not define `class ModelNew`", **wrong)
        return None

    def _build(self, asked: dict[str, Any]) -> Verdict | None:
        try:
            request = BuildRequest(
                cpp=tuple(map(str, asked["cpp"])), functions=None if asked["functions"] is None else tuple(map(str, asked["functions"])),
                cflags=tuple(map(str, asked["cflags"])), ldflags=tuple(map(str, asked["ldflags"])), include=tuple(map(str, asked["include"])),
                cuda=tuple(map(str, asked["cuda"])), error_handling=bool(asked["error_handling"]),
                implicit_headers=bool(asked["implicit_headers"]), python_module=bool(asked["python_module"]),
            )  # fmt: skip
        except (KeyError, TypeError) as error:
            raise JobError("protocol", f"malformed build request: {error}") from error
        self.findings += legality.cpp_findings(list(request.cpp))
        start = time.monotonic()
        built = self.owner._make_builder().build(request)
        self.evidence["builds"].append({"tier": built.tier, "wall_s": round(time.monotonic() - start, 4)})
        if built.error is not None:
            return self._verdict(built.category or "compile_error:cpp", detail=built.error)
        reply = {"symbols": built.symbols, "module": "musa_ext", "python_module": request.python_module}
        with contextlib.suppress(WireError):
            send(self.job.channel, reply, built.path.read_bytes())
        return None

    def _construct(self) -> Verdict | None:
        described, payload = self.reference.init
        try:
            answer, _ = self.job.ask({"do": "candidate", "init": described, "seed": self.reference.model_seed}, payload, timeout_s=self.config.timeout_s)
        except JobError as error:
            return self._failed(error, "constructor", 0.0)
        self.evidence["weights"] = answer.get("weights")
        return None

    def _failed(self, error: JobError, where: str, q: float) -> Verdict:
        kind = {"error": "exception", "memory": "out_of_memory"}.get(error.kind, error.kind)
        detail = f"in {where}: {_located(error)}"
        if self.findings and error.kind == "error":
            self.evidence["findings"] = [f.__dict__ for f in self.findings]
        return self._verdict(f"runtime_error:{kind}", compiled=True, correct=False, legal=None, q=q, detail=detail)

    def _trials(self) -> tuple[Verdict | None, judge.Mismatch | None, float]:
        passed, first, operators = 0, None, set()
        trials = self.reference.trials
        for number, trial in enumerate(trials):
            try:
                answer, payload = self.job.ask({"do": "trial", "inputs": trial.inputs}, trial.input_bytes, timeout_s=self.config.timeout_s)
            except JobError as error:
                return self._failed(error, f"forward (trial {number + 1} of {len(trials)})", passed / len(trials)), None, 0.0
            operators |= {str(o) for o in answer.get("operators") or []}
            self.native_calls += int(answer.get("native_calls") or 0)
            mismatch, worst = trial.compare(answer, payload, self.reference.task.tolerance)
            passed += mismatch is None
            first = first or mismatch
            self.evidence["trials"].append({"passed": mismatch is None, "group": trial.group, **worst, "why": mismatch.message if mismatch else None})
        self.evidence["aten_ops"] = sorted(operators)
        return None, first, passed / len(trials)

    def _time(self, q: float) -> Verdict:
        if not self.config.timing:
            return self._verdict("ok", compiled=True, correct=True, legal=True, q=q)
        sets = self.reference.timing_sets

        def check(index: int, sample: tuple[dict[str, Any], bytearray]) -> None:
            mismatch, _ = sets[index].compare_outputs(*sample, self.reference.task.tolerance)
            if mismatch is not None:
                raise _WrongWhenTimed(mismatch)

        try:
            for trial in sets[:1]:  # the buffers must have this group's layout again
                self.job.ask({"do": "trial", "inputs": trial.inputs}, trial.input_bytes, timeout_s=self.config.timeout_s)
            for trial in sets:
                self.job.ask({"do": "keep_inputs", "inputs": trial.inputs}, trial.input_bytes, timeout_s=self.config.timeout_s)
            with self.reference.timed() as reference:
                timing = measure(reference, self.job, len(sets), self.config.timing_pairs, self.config.timeout_s, check, _timing_core())
        except _WrongWhenTimed as error:
            return self._verdict("correctness_error:timed_output", compiled=True, correct=False, legal=True, q=0.0,
                                 detail=f"an output of a timed call is wrong: {error.mismatch.message}")  # fmt: skip
        except JobError as error:
            return self._failed(error, "a timed call", q)
        self.evidence["timing"] = timing.__dict__
        if timing.low > self.config.speedup_cap:
            self.findings.append(Finding("excessive_speedup", f"{timing.speedup:.0f}x is beyond the cap of {self.config.speedup_cap:g}x", "timing"))
            return self._cheating(True, q)
        return self._verdict("ok", compiled=True, correct=True, legal=True, q=q, speedup=timing.speedup)


class _WrongWhenTimed(Exception):
    def __init__(self, mismatch: judge.Mismatch) -> None:
        super().__init__(mismatch.message)
        self.mismatch = mismatch


def _timing_core() -> int | None:
    with contextlib.suppress(OSError, AttributeError):
        return max(os.sched_getaffinity(0))
    return None


def _located(error: JobError) -> str:
    line, code = error.report.get("line"), error.report.get("code")
    where = f" (candidate.py:{int(line)}: {code})" if isinstance(line, int) and code else ""
    return f"{str(error)[:600]}{where}"


def _symbol(text: str) -> str:
    return "undefined symbol: " + text.rpartition("undefined symbol: ")[2].split()[0]


def _sha(response: str | bytes) -> str:
    data = response if isinstance(response, bytes) else response.encode("utf-8", "surrogateescape")
    return hashlib.sha256(data).hexdigest()
