"""The examination of one candidate in its own process: import, build, constructor, trials, legality, timing."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from musalib.mooreeval import judge, legality
from musalib.mooreeval.build import Builder
from musalib.mooreeval.config import EvalConfig
from musalib.mooreeval.cpp_source import Finding
from musalib.mooreeval.reference import Reference
from musalib.mooreeval.requests import BuildRequest
from musalib.mooreeval.session import Job, JobError
from musalib.mooreeval.timing import measure
from musalib.mooreeval.wire import WireError, send
from musalib.verdict import Verdict


class Examination:
    """One candidate in its process, from import to timing. Holds what has been learnt so far."""

    def __init__(
        self,
        builder: Callable[[], Builder],
        config: EvalConfig,
        isolation: str,
        reference: Reference,
        job: Job,
        source: str,
        findings: list[Finding],
    ) -> None:
        """`builder` is asked for only when the candidate builds something; `findings` are those of the static layer."""
        self.builder, self.config, self.reference, self.job, self.source = (
            builder,
            config,
            reference,
            job,
            source,
        )
        self.findings = findings
        self.evidence: dict[str, Any] = {"isolation": isolation, "trials": [], "aten_ops": [], "builds": []}
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
            self.findings.append(
                Finding(
                    "no_native_code", "no compiled function of the candidate ran during forward", "forward"
                )
            )
        correct = q == 1.0
        if self.findings:
            return self._cheating(correct, q)
        if not correct:
            return self._verdict(
                f"correctness_error:{mismatch.kind}",
                compiled=True,
                correct=False,
                legal=True,
                q=q,
                detail=mismatch.message,
            )
        return self._time(q)

    def _verdict(self, category: str, **fields: Any) -> Verdict:
        return Verdict(category, evidence=self.evidence, **fields)

    def _cheating(self, correct: bool, q: float) -> Verdict:
        self.evidence["findings"] = [f.__dict__ for f in self.findings]
        detail = "; ".join(dict.fromkeys(str(f) for f in self.findings))
        return self._verdict(
            f"cheating:{self.findings[0].rule}",
            compiled=True,
            correct=correct,
            legal=False,
            q=q,
            detail=detail[:1000],
        )

    def _load(self) -> Verdict | None:
        limit = self.config.timeout_s
        wrong: dict[str, Any] = {"compiled": False, "correct": False, "q": 0.0}
        try:
            answer, _ = self.job.ask(
                {"do": "load", "name": "candidate", "role": "candidate", "defines": ["ModelNew"]},
                self.source.encode(),
                timeout_s=limit,
            )
            while answer.get("event") == "build":
                if failed := self._build(answer):
                    return replace(failed, **wrong)
                answer, _ = self.job.answer(limit)
        except JobError as error:
            if error.kind == "timeout":
                return self._verdict(
                    "runtime_error:timeout",
                    detail=f"importing the module took longer than {limit:g} s",
                    **wrong,
                )
            if "undefined symbol" in str(error):
                return self._verdict("compile_error:link", detail=_symbol(str(error)), **wrong)
            return self._verdict(
                f"runtime_error:import_{error.kind}", detail=f"at import: {_located(error)}", **wrong
            )
        if "ModelNew" not in (answer.get("found") or []):
            return self._verdict(
                "extract_error:no_modelnew", detail="the module does not define `class ModelNew`", **wrong
            )
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
        built = self.builder().build(request)
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
            answer, _ = self.job.ask(
                {"do": "candidate", "init": described, "seed": self.reference.model_seed},
                payload,
                timeout_s=self.config.timeout_s,
            )
        except JobError as error:
            return self._failed(error, "constructor", 0.0)
        self.evidence["weights"] = answer.get("weights")
        return None

    def _failed(self, error: JobError, where: str, q: float) -> Verdict:
        kind = {"error": "exception", "memory": "out_of_memory"}.get(error.kind, error.kind)
        detail = f"in {where}: {_located(error)}"
        if self.findings and error.kind == "error":
            self.evidence["findings"] = [f.__dict__ for f in self.findings]
        return self._verdict(
            f"runtime_error:{kind}", compiled=True, correct=False, legal=None, q=q, detail=detail
        )

    def _trials(self) -> tuple[Verdict | None, judge.Mismatch | None, float]:
        passed, first, operators = 0, None, set()
        trials = self.reference.trials
        for number, trial in enumerate(trials):
            try:
                answer, payload = self.job.ask(
                    {"do": "trial", "inputs": trial.inputs},
                    trial.input_bytes,
                    timeout_s=self.config.timeout_s,
                )
            except JobError as error:
                return (
                    self._failed(
                        error, f"forward (trial {number + 1} of {len(trials)})", passed / len(trials)
                    ),
                    None,
                    0.0,
                )
            operators |= {str(o) for o in answer.get("operators") or []}
            self.native_calls += int(answer.get("native_calls") or 0)
            mismatch, worst = trial.compare(answer, payload, self.reference.task.tolerance)
            passed += mismatch is None
            first = first or mismatch
            self.evidence["trials"].append(
                {
                    "passed": mismatch is None,
                    "group": trial.group,
                    **worst,
                    "why": mismatch.message if mismatch else None,
                }
            )
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
                self.job.ask(
                    {"do": "trial", "inputs": trial.inputs},
                    trial.input_bytes,
                    timeout_s=self.config.timeout_s,
                )
            for trial in sets:
                self.job.ask(
                    {"do": "keep_inputs", "inputs": trial.inputs},
                    trial.input_bytes,
                    timeout_s=self.config.timeout_s,
                )
            with self.reference.timed() as reference:
                timing = measure(
                    reference,
                    self.job,
                    len(sets),
                    self.config.timing_pairs,
                    self.config.timeout_s,
                    check,
                    _timing_core(),
                )
        except _WrongWhenTimed as error:
            return self._verdict("correctness_error:timed_output", compiled=True, correct=False, legal=True, q=0.0,
                                 detail=f"an output of a timed call is wrong: {error.mismatch.message}")  # fmt: skip
        except JobError as error:
            return self._failed(error, "a timed call", q)
        self.evidence["timing"] = timing.__dict__
        if timing.low > self.config.speedup_cap:
            self.findings.append(
                Finding(
                    "excessive_speedup",
                    f"{timing.speedup:.0f}x is beyond the cap of {self.config.speedup_cap:g}x",
                    "timing",
                )
            )
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
