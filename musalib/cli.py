"""The `musalib` command. Exit codes: 0 done, 1 a notebook or check failed, 2 wrong use, 3 the machine failed.

Every command imports what it needs when it runs, so that `--help` is instant. With `--json` stdout carries
exactly one JSON object; whatever else there is to say goes to stderr.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from musalib.parameters import UsageError
from musalib.tasks import TaskError

if TYPE_CHECKING:
    from musalib.mooreeval import EvalConfig
    from musalib.verdict import Verdict

DONE, FAILED, WRONG_USE, INFRA = 0, 1, 2, 3
BACKENDS = ("cpu", "cuda", "musa")


def positive(kind: type) -> object:
    """argparse type: an int or float above zero."""

    def convert(text: str) -> int | float:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    convert.__name__ = f"{kind.__name__} above 0"
    return convert


def levels(text: str) -> set[int]:
    """argparse type: "1,2" as a set."""
    return {int(level) for level in text.split(",")}


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="musalib", description="Train language models to write native kernels."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: object, text: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    verify = command("verify", run_verify, "judge one candidate against one task")
    verify.add_argument("task", metavar="TASK", help="KernelBench-style Python file")
    verify.add_argument("candidate", metavar="CANDIDATE", help="file with the model's response")
    verify.add_argument("--json", action="store_true", help="print the verdict as one JSON object")
    verifier_options(verify)

    batch = command(
        "verify-batch", run_verify_batch, "judge many candidates, verdicts appended as they finish"
    )
    batch.add_argument(
        "jobs", metavar="JOBS.jsonl", help='lines {"id", "task": path or source, "candidate": path or text}'
    )
    batch.add_argument("--out", required=True, metavar="VERDICTS.jsonl")
    batch.add_argument("--workers", type=positive(int), help="parallel candidates (default: cores)")
    batch.add_argument("--ray", metavar="ADDRESS", help="judge on a Ray cluster")
    batch.add_argument("--resume", action="store_true", help="skip ids that --out already holds")
    batch.add_argument("--no-cache", action="store_true", help="do not reuse stored verdicts")
    verifier_options(batch)

    run = command("run", run_run, "run the pipeline notebooks in order")
    run.add_argument("--profile", default="tiny", help="sizes: smoke, tiny, smol, 9b or 27b (default: tiny)")
    run.add_argument(
        "--run", dest="name", metavar="NAME", help="folder under papermill_runs; repeat it to continue"
    )
    run.add_argument("--from", dest="start", metavar="NN", help="start at this notebook")
    run.add_argument("--only", metavar="NN", help="run just this notebook")
    run.add_argument("-p", dest="parameters", action="append", default=[], metavar="key=value")

    evaluate = command("evaluate", run_evaluate, "Pass@k, Avg@k and Faster Rate of a policy on a suite")
    evaluate.add_argument(
        "--policy", required=True, metavar="PATH", help="checkpoint folder or Hugging Face id"
    )
    evaluate.add_argument(
        "--suite", required=True, metavar="SUITE", help="tasks: .jsonl, .py or a folder of .py files"
    )
    evaluate.add_argument(
        "--levels", type=levels, default=set(), help="comma-separated, e.g. 1,2 (default: all)"
    )
    evaluate.add_argument("-k", type=positive(int), default=8, help="samples per task (default: 8)")
    evaluate.add_argument(
        "--out", metavar="EVAL.jsonl", help="rows, kept for resuming (default: POLICY-eval.jsonl here)"
    )
    evaluate.add_argument("--seed", type=int, default=0)
    evaluate.add_argument("--json", action="store_true", help="print the summary as one JSON object")
    verifier_options(evaluate)

    figures = command("figures", run_figures, "redraw everything in figures/")
    figures.add_argument("--run", dest="name", metavar="NAME", help="take the numbers of this run")

    command("doctor", run_doctor, "check compiler, versions, isolation and disk")
    return top


def verifier_options(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--backend", choices=BACKENDS, default="cpu")
    sub.add_argument("--trials", type=positive(int), default=5, help="input sets to compare (default: 5)")
    sub.add_argument(
        "--timeout",
        type=positive(float),
        default=None,
        metavar="S",
        help="seconds for what the candidate runs",
    )
    sub.add_argument(
        "--build-timeout", type=positive(float), default=None, metavar="S", help="seconds for its compilation"
    )
    sub.add_argument("--no-timing", action="store_true", help="skip the speedup measurement")


class MachineError(RuntimeError):
    """This machine cannot judge candidates; the message says what it lacks."""


@contextlib.contextmanager
def setup_problems() -> Iterator[None]:
    """What keeps the verifier from working at all, in terms of exit codes."""
    try:
        yield
    except RuntimeError as error:
        if type(error).__name__ != "ToolchainError":  # its module is too heavy to import for the comparison
            raise
        raise MachineError(str(error)) from error


def eval_config(arguments: argparse.Namespace, **more: object) -> EvalConfig:
    from musalib.mooreeval import EvalConfig

    limits = {"timeout_s": arguments.timeout, "build_timeout_s": arguments.build_timeout}
    values = {"trials": arguments.trials, "timing": not arguments.no_timing, **limits, **more}
    return EvalConfig(**{name: value for name, value in values.items() if value is not None})


def read_candidate(path: str) -> bytes:
    """Bytes, because a response need not be UTF-8."""
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read candidate {path}: {getattr(error, 'strerror', None) or error}"
        ) from error


def run_verify(arguments: argparse.Namespace) -> int:
    from musalib.tasks import Task

    task, candidate = Task.from_file(arguments.task), read_candidate(arguments.candidate)
    with clean_stdout() as stdout, setup_problems():
        from musalib.mooreeval import MooreEval

        with MooreEval(arguments.backend, eval_config(arguments)) as evaluator:
            verdict = evaluator.verify(task, candidate)
        if arguments.json:
            stdout.write(json.dumps(verdict.to_dict()) + "\n")
    if not arguments.json:
        explain(verdict)
    return INFRA if verdict.kind == "infra" else DONE


def explain(verdict: Verdict) -> None:
    """A verdict in a few coloured lines."""
    from rich.console import Console
    from rich.text import Text

    from musalib.verdict import CATEGORIES

    style = {"ok": "bold green", "infra": "bold yellow"}.get(verdict.kind, "bold red")
    console = Console(highlight=False, soft_wrap=True)
    console.print(Text(verdict.category, style), Text(f" {CATEGORIES[verdict.kind]}"), sep="")
    facts = {
        "trials passed": None if verdict.q is None else f"{verdict.q:.0%}",
        "speedup": None if verdict.speedup is None else f"{verdict.speedup:.2f}x over the PyTorch reference",
        "reward": None if verdict.reward is None else f"{verdict.reward:+.3f}",
        "detail": verdict.detail,
    }
    for name, value in facts.items():
        if value:
            printable = value.encode(
                "utf-8", "replace"
            ).decode()  # a response may hold bytes that are no UTF-8
            console.print(Text(f"  {name:<14}", "dim"), Text(printable), sep="")


def run_verify_batch(arguments: argparse.Namespace) -> int:
    if arguments.ray:
        raise UsageError("--ray is not available here yet; leave it out to judge on this machine")
    from musalib import batch

    jobs = batch.read_jobs(arguments.jobs)
    out = Path(arguments.out)
    done = batch.finished_ids(out, arguments.resume)
    more = {"workers": arguments.workers, "store": None if arguments.no_cache else batch.default_store()}
    todo = [job for job in jobs if job.id not in done]
    with clean_stdout(), setup_problems():
        counts = batch.judge(todo, out, arguments.backend, lambda: eval_config(arguments, **more), len(done))
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items()) or "nothing new"
    print(f"{len(todo)} judged ({summary}), {len(done)} were there before: {out}", file=sys.stderr)
    return INFRA if counts.get("infra") else DONE


def run_run(arguments: argparse.Namespace) -> int:
    from musalib.chain import Request, run_chain
    from musalib.parameters import parse_assignments

    given = parse_assignments(arguments.parameters)
    return run_chain(Request(arguments.profile, arguments.name, arguments.start, arguments.only, given))


def run_evaluate(arguments: argparse.Namespace) -> int:
    from musalib import stages

    tasks = stages.load_suite(arguments.suite, arguments.levels)
    with clean_stdout() as stdout, setup_problems():
        choice = (arguments.k, arguments.seed, arguments.out)
        try:
            summary = stages.evaluate_on_suite(
                arguments.policy, tasks, arguments.backend, eval_config(arguments), *choice
            )
        except ValueError as error:  # no policy there, or --out holds results of other settings
            raise UsageError(str(error)) from error
        if arguments.json:
            stdout.write(json.dumps(summary) + "\n")
    if not arguments.json:
        for line in summary_lines(summary):
            print(line)
    return DONE


def summary_lines(summary: dict[str, Any]) -> list[str]:
    """An evaluation's summary in percent with its intervals; difficulties indented below."""
    lines = []
    for name, value in summary.items():
        if isinstance(value, dict) and "mean" in value:
            value = "{mean:.1%} [{low:.1%}, {high:.1%}]".format(**value)
        if isinstance(value, dict):
            for depth, part in value.items():
                lines += [f"depth {depth}", *(f"  {line}" for line in summary_lines(part))]
        else:
            lines.append(f"{name:<12} {value}")
    return lines


def run_figures(arguments: argparse.Namespace) -> int:
    from musalib import figures

    for path in figures.rebuild(arguments.name):
        print(path)
    return DONE


def run_doctor(arguments: argparse.Namespace) -> int:
    from musalib import doctor

    return DONE if doctor.report() else FAILED


@contextlib.contextmanager
def clean_stdout() -> Iterator[TextIO]:
    """Yield the real stdout; whatever else writes to stdout inside the block, child processes too, goes to stderr."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(kept), "w", encoding="utf-8") as real, contextlib.redirect_stdout(sys.stderr):
            yield real
    finally:
        os.dup2(kept, 1)
        os.close(kept)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (UsageError, TaskError) as error:
        print(f"musalib {arguments.command}: {error}", file=sys.stderr)
        return WRONG_USE
    except KeyboardInterrupt:
        print(f"musalib {arguments.command}: stopped", file=sys.stderr)
        return 130
    except (OSError, MachineError) as error:
        print(f"musalib {arguments.command}: {error}", file=sys.stderr)
        return INFRA
