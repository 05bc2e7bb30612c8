"""Never-seen candidates through plain `load_inline` and through the tiered build, side by side in one run.

    CCACHE_DISABLE=1 python benchmarks/build_path.py --candidates 8 --out benchmarks/results/build_path.json

Both arms judge the same candidates in the same sandbox; only the build differs. CPU seconds are those of the judge
and of every process under it. The machine's own preparation (precompiled headers, once per machine) is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import subprocess
import time
from datetime import date
from importlib import metadata
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

from musalib.mooreeval import EvalConfig, MooreEval
from musalib.synthesis.teacher import write_candidate, write_unreliable
from musalib.synthesis.workloads import sample_programs, task_of


def corpus(count: int, seed: int) -> list:
    """Half teacher answers, half unreliable ones: what a policy in training sends."""
    rng = random.Random(seed)
    jobs = []
    for index, program in enumerate(sample_programs("train", count, seed)):
        write = write_candidate if index % 2 == 0 else write_unreliable
        jobs.append((task_of(program), write(program, rng)))
    return jobs


def cpu_seconds() -> float:
    """User and system time of this process and everything below it, finished children included."""
    total = 0.0
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            times = process.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
        except psutil.Error:
            continue
    return total


def arm(build: str, jobs: list, workers: int) -> dict:
    config = EvalConfig(
        trials=3, timing=False, build=build, workers=workers, build_timeout_s=600.0, timeout_s=30.0
    )
    with MooreEval("cpu", config) as evaluator:
        evaluator.isolation  # noqa: B018 (starts the worker: not part of what is compared)
        start_cpu, start = cpu_seconds(), time.perf_counter()
        verdicts = list(evaluator.verify_many(jobs))
        return {
            "wall_s": round(time.perf_counter() - start, 2),
            "cpu_s": round(cpu_seconds() - start_cpu, 2),
            "categories": [v.category for v in verdicts],
            "passed": [[t["passed"] for t in v.evidence.get("trials", [])] for v in verdicts],
            "tiers": evaluator.build_counts,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--candidates", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=20261)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    os.environ["CCACHE_DISABLE"] = "1"
    jobs = corpus(args.candidates, args.seed)
    arms = {build: arm(build, jobs, args.workers) for build in ("plain", "tiered")}
    same = sum(a == b for a, b in zip(arms["plain"]["categories"], arms["tiered"]["categories"], strict=True))
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    dirty = bool(
        subprocess.run(
            ["git", "status", "--porcelain"], capture_output=True, text=True, check=False
        ).stdout.strip()
    )
    result = {
        "date": date.today().isoformat(), "commit": commit, "dirty": dirty, "device": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "versions": {name: metadata.version(name) for name in ("torch", "musalib")}, "python": platform.python_version(),
        "candidates": len(jobs), "seed": args.seed, "arms": arms, "same_category": same,
        "cpu_ratio": round(arms["plain"]["cpu_s"] / arms["tiered"]["cpu_s"], 1), "wall_ratio": round(arms["plain"]["wall_s"] / arms["tiered"]["wall_s"], 1),
    }  # fmt: skip
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    table = Table("build", "wall s", "CPU s", "CPU s / candidate", "tiers")
    for name, values in arms.items():
        table.add_row(
            name,
            f"{values['wall_s']}",
            f"{values['cpu_s']}",
            f"{values['cpu_s'] / len(jobs):.2f}",
            str(values["tiers"]),
        )
    Console().print(table)
    print(
        f"same category for {same} of {len(jobs)}; plain / tiered: {result['cpu_ratio']}x CPU, {result['wall_ratio']}x wall"
    )


if __name__ == "__main__":
    main()
