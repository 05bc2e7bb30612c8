"""Everything a training run needs as data: four disjoint task sets, the base corpus and the verified SFT corpus.

    tasks_{sft,rl,tune,final}.jsonl   task records
    base_corpus.jsonl                 UNVERIFIED single-turn answers and repair dialogues with real feedback
    sft_corpus.jsonl                  easy tasks only, no rare operator; every answer passed the verifier
    wrong_shares.md                   how often each operator is written wrongly in the base corpus
    report.json                       counts, pass shares, disjointness

A corpus record is {"task", "prompt", "completion", "verdict"}; `prompt` and `completion` are chat messages.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from musalib.mooreeval import feedback
from musalib.store import read_json, read_jsonl, write_json, write_jsonl, write_text
from musalib.synthesis.operators import OPERATORS, wrong_share_table
from musalib.synthesis.teacher import Draft, draft, render, revise, write_candidate
from musalib.synthesis.workloads import (
    DEPTH_WEIGHTS,
    Program,
    check_disjoint,
    program_of,
    sample_programs,
    task_of,
)
from musalib.tasks import Task
from musalib.training.checkpoints import check_same_settings
from musalib.training.prompts import repair_messages, task_messages
from musalib.verdict import Verdict

Record = dict[str, Any]
TASK_SETS = {"sft": "train", "rl": "rl", "tune": "tune", "final": "final"}  # file -> split
VERDICT_FIELDS = ("category", "compiled", "correct", "legal", "q")


class Evaluator(Protocol):
    """The part of MooreEval used here."""

    def verify_many(self, jobs: Sequence[tuple[Task, str]]) -> Iterable[Verdict]: ...


@dataclass(frozen=True)
class DataConfig:
    """Sizes of the corpora; the defaults are the `tiny` profile."""

    seed: int = 0
    base_answers: int = 6000  # unverified single-turn answers, to half as many distinct programs
    base_dialogues: int = 600  # first answers verified for repair dialogues; the failed ones become dialogues
    patience: float = 0.5  # share of its wrong share that a wrong line keeps in the second answer
    base_checked: int = 200  # base answers verified for the report only
    sft_max_wrong_share: float = 0.4  # SFT covers operators that are wrong no more often than this
    sft_programs: int = 70
    sft_answers: int = 560  # in all, in turn over the programs, in random structures and spellings
    sft_depths: tuple[int, ...] = (1, 2)
    rl_tasks: int = 1500
    tune_tasks: int = 150
    final_tasks: int = 200


def build_data(
    out_dir: str | Path, config: DataConfig, evaluator: Evaluator, backend: str = "cpu"
) -> dict[str, Any]:
    """Write all files that are missing and return the report. Finished files of the same config are kept.

    Everything is drawn by `config.seed`: a killed build continues and ends with the same bytes.
    """
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    check_same_settings(out_dir / "data_config.json", {**dataclasses.asdict(config), "backend": backend})
    report_path = out_dir / "report.json"
    if report_path.is_file():
        return read_json(report_path)
    sets = task_sets(config)
    check_disjoint(sets)
    for name, programs in sets.items():
        keep(
            out_dir / f"tasks_{name}.jsonl",
            lambda programs=programs: [task_of(p).to_dict() for p in programs],
        )
    base = keep(out_dir / "base_corpus.jsonl", lambda: base_corpus(config, evaluator, backend))
    tried = keep(
        out_dir / "sft_tried.jsonl", lambda: verified_answers(sets["sft"], config, evaluator, backend)
    )
    sft = keep(out_dir / "sft_corpus.jsonl", lambda: passed(tried))
    check_disjoint(
        {"base and sft corpus": programs_in([*base, *sft]), **{k: sets[k] for k in ("rl", "tune", "final")}}
    )
    report = {
        "config": dataclasses.asdict(config),
        "tasks": {name: describe(programs) for name, programs in sets.items()},
        "base_corpus": {
            "records": len(base),
            "repair_dialogues": sum(len(record["prompt"]) > 1 for record in base),
            "checked": check_sample(base, config, evaluator),
            "wrong_share_documented": {name: operator.wrong_share for name, operator in OPERATORS.items()},
        },
        "sft_corpus": {
            "records": len(sft),
            "tried": categories(record["verdict"]["category"] for record in tried),
        },
        "disjoint_by_composition": True,  # check_disjoint raised otherwise
    }
    write_text(out_dir / "wrong_shares.md", wrong_share_table() + "\n")
    write_json(report_path, report)
    return read_json(report_path)


def task_sets(config: DataConfig) -> dict[str, list[Program]]:
    """Programs of the SFT, RL, tuning and final sets."""
    seed = config.seed
    sft = sample_programs(
        "train", min(config.sft_programs, config.sft_answers), seed, config.sft_depths, easy_operators(config)
    )
    # held-out sets are the same for every seed: seeds differ in training data, not in what is measured
    return {
        "sft": sft,
        "rl": sample_programs("rl", config.rl_tasks, seed),
        "tune": sample_programs("tune", config.tune_tasks, 0),
        "final": sample_programs("final", config.final_tasks, 0),
    }


def easy_operators(config: DataConfig) -> list[str]:
    """Operators the base policy is fairly reliable in: SFT teaches these, the others are left to RFT and RL."""
    return [
        name for name, operator in OPERATORS.items() if operator.wrong_share <= config.sft_max_wrong_share
    ]


# --- corpora -----------------------------------------------------------------------------------------------


def base_corpus(config: DataConfig, evaluator: Evaluator, backend: str = "cpu") -> list[Record]:
    """Unverified answers, then repair dialogues: wrong answer, the verifier's real feedback, second answer."""
    rng = random.Random(f"{config.seed}/base")
    programs = sample_programs("train", max(1, config.base_answers // 2), config.seed)
    records = []
    for program in by_depth(programs, config.base_answers, rng):
        answer = render(program, draft(program, rng, unreliable=True))
        records.append(record_of(task_of(program), task_messages(task_of(program), backend), answer))
    picked = by_depth(programs, config.base_dialogues, rng)
    firsts = [(program, draft(program, rng, unreliable=True)) for program in picked]
    return records + repair_dialogues(firsts, rng, config.patience, evaluator, backend)


def by_depth(programs: Sequence[Program], n: int, rng: random.Random) -> list[Program]:
    """`n` draws with replacement in which depths have the weights `DEPTH_WEIGHTS`, however many programs each has."""
    pools = {depth: [program for program in programs if program.depth == depth] for depth in DEPTH_WEIGHTS}
    depths = [depth for depth, pool in pools.items() if pool]
    weights = [DEPTH_WEIGHTS[depth] for depth in depths]
    return [rng.choice(pools[depth]) for depth in rng.choices(depths, weights, k=n)]


def repair_dialogues(
    firsts: Sequence[tuple[Program, Draft]],
    rng: random.Random,
    patience: float,
    evaluator: Evaluator,
    backend: str,
) -> list[Record]:
    """One dialogue per first answer that the verifier rejects; the second answer is unreliable too."""
    jobs = [(task_of(program), render(program, first)) for program, first in firsts]
    records = []
    for (program, first), (task, answer), verdict in zip(
        firsts, jobs, evaluator.verify_many(jobs), strict=True
    ):
        second = render(program, revise(program, first, rng, patience))  # drawn always: rng stays in step
        if verdict.success or verdict.kind == "infra":
            continue
        records.append(record_of(task, repair_messages(task, answer, feedback(verdict), backend), second))
    return records


def verified_answers(
    programs: Sequence[Program], config: DataConfig, evaluator: Evaluator, backend: str = "cpu"
) -> list[Record]:
    """Correct-by-template answers, `sft_answers` in all, with the verdicts that say whether they are."""
    rng = random.Random(f"{config.seed}/sft")
    tasks = [task_of(programs[i % len(programs)]) for i in range(config.sft_answers)]
    jobs = [(task, write_candidate(program_of(task), rng)) for task in tasks]
    verdicts = evaluator.verify_many(jobs)
    return [
        record_of(task, task_messages(task, backend), answer, verdict)
        for (task, answer), verdict in zip(jobs, verdicts, strict=True)
    ]


def passed(records: Iterable[Record]) -> list[Record]:
    """Records whose answer the verifier accepted, without doubles."""
    unique = {
        (r["task"]["id"], r["completion"][-1]["content"]): r
        for r in records
        if r["verdict"]["category"] == "ok"
    }
    return list(unique.values())


def record_of(
    task: Task, prompt: list[dict[str, str]], answer: str, verdict: Verdict | None = None
) -> Record:
    """A corpus record; of a verdict only what repeats exactly is kept (no times, no evidence)."""
    return {
        "task": task.to_dict(),
        "prompt": prompt,
        "completion": [{"role": "assistant", "content": answer}],
        "verdict": {name: getattr(verdict, name) for name in VERDICT_FIELDS} if verdict else None,
    }


# --- files and report --------------------------------------------------------------------------------------


def keep(path: Path, make: Callable[[], Sequence[Record]]) -> list[Record]:
    """The records in `path`; when it is missing they are made and written as a whole."""
    if not path.is_file():
        write_jsonl(path, make())
    return read_jsonl(path)


def programs_in(records: Iterable[Mapping[str, Any]]) -> set[Program]:
    return {program_of(Task.from_dict(record["task"])) for record in records}


def describe(programs: Sequence[Program]) -> dict[str, Any]:
    return {
        "count": len(programs),
        "by_depth": dict(sorted(Counter(program.depth for program in programs).items())),
        "by_family": dict(sorted(Counter(program.family for program in programs).items())),
        "with_rare_operator": sum(program.rare for program in programs),
    }


def check_sample(base: Sequence[Record], config: DataConfig, evaluator: Evaluator) -> dict[str, int]:
    """Verdict categories of a random sample of single-turn base answers: for the report, never for filtering."""
    single = [record for record in base if len(record["prompt"]) == 1]
    sample = random.Random(f"{config.seed}/check").sample(single, min(config.base_checked, len(single)))
    jobs = [(Task.from_dict(record["task"]), record["completion"][-1]["content"]) for record in sample]
    return categories(verdict.category for verdict in evaluator.verify_many(jobs))


def categories(found: Iterable[str]) -> dict[str, int]:
    return dict(Counter(found).most_common())
