"""Judging a policy on tasks: n sampled answers and a greedy one per task, single- or multi-turn.

Rows are appended to a jsonl file as they come, one per turn; called again, the function continues where the file
ends. What a sample says depends on the seed, its task and its index only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas as pd

from musalib.metrics import bootstrap_interval, faster_rate, pass_at_k
from musalib.reward import RewardConfig
from musalib.store import JsonlWriter, read_jsonl
from musalib.tasks import Task, iter_ids
from musalib.training.checkpoints import check_same_settings, cut_events, digest, fingerprint
from musalib.training.policies import load_policy
from musalib.training.rollouts import Evaluator, RolloutSettings, Trajectory, play, task_start
from musalib.verdict import Verdict

GREEDY = -1  # sample index of the greedy answer
TASKS_PER_CHUNK = 32


def evaluate_policy(
    policy_dir: str | Path,
    tasks: Sequence[Task],
    evaluator: Evaluator,
    out_path: str | Path,
    n: int = 8,
    temperature: float = 1.0,
    greedy: bool = True,
    max_turns: int = 1,
    top_p: float = 1.0,
    max_new_tokens: int = 128,
    max_prompt_tokens: int | None = None,
    seed: int = 0,
    batch_size: int = 256,
    backend: str = "cpu",
    reward_config: RewardConfig | None = None,
    write_feedback: Callable[[Verdict], str] | None = None,
) -> pd.DataFrame:
    """One row per (task, sample, turn); sample -1 is the greedy answer, which has a single turn.

    Columns: task, sample, turn (from 1), is_last, depth, family, level, category, success, q, speedup, reward,
    response, tokens, truncated. A machine fault gives a row of category `infra:*`, which is tried again when
    the evaluation is repeated. ValueError when `out_path` holds results of another policy or other settings.
    """
    if write_feedback is None:
        from musalib.mooreeval import feedback as write_feedback
    out_path = Path(out_path)
    settings = RolloutSettings(
        max_turns, temperature, top_p, max_new_tokens, max_prompt_tokens, batch_size, backend
    )
    described = asdict(settings) | {"n": n, "seed": seed, "policy": fingerprint(policy_dir)}
    described["tasks"] = digest([task.to_dict() for task in tasks])
    out_path.parent.mkdir(parents=True, exist_ok=True)
    check_same_settings(out_path.with_suffix(".settings.json"), described)
    list(iter_ids(tasks))  # a doubled id is an error

    samples = [*([GREEDY] if greedy else []), *range(n)]
    done = finished_samples(out_path)
    model = None
    with JsonlWriter(out_path) as rows:
        for first in range(0, len(tasks), TASKS_PER_CHUNK):
            chunk = tasks[first : first + TASKS_PER_CHUNK]
            missing = {(task.id, sample) for task in chunk for sample in samples} - done
            if not missing:
                continue
            if model is None:
                model, tokenizer = load_policy(policy_dir)
            for kind in (range(GREEDY, 0), range(n)):
                # a chunk is sampled as a whole even if few of its rows are missing: same batch, same numbers
                wanted = [(task, sample) for task in chunk for sample in kind if sample in samples]
                if not any((task.id, sample) in missing for task, sample in wanted):
                    continue
                greedy_kind = kind.start == GREEDY
                chosen = replace(settings, temperature=0.0, max_turns=1) if greedy_kind else settings
                starts = [task_start(task, chosen.max_turns, backend) for task, _ in wanted]
                played = play(
                    model,
                    tokenizer,
                    evaluator,
                    starts,
                    chosen,
                    seed,
                    reward_config or RewardConfig(),
                    write_feedback,
                )
                for (task, sample), trajectory in zip(wanted, played, strict=True):
                    if (task.id, sample) in missing:
                        for row in rows_of(task, sample, trajectory):
                            rows.append(row)
    return read_evaluation(out_path)


def rows_of(task: Task, sample: int, trajectory: Trajectory) -> list[dict[str, Any]]:
    return [
        {
            "task": task.id,
            "sample": sample,
            "turn": number,
            "is_last": number == len(trajectory.turns),
            "depth": task.meta.get("depth"),
            "family": task.meta.get("family"),
            "level": task.level,
            "category": turn.verdict.category,
            "success": turn.verdict.success,
            "q": turn.verdict.q,
            "speedup": turn.verdict.speedup,
            "reward": turn.score,
            "response": turn.sample.text,
            "tokens": len(turn.sample.token_ids),
            "truncated": turn.sample.truncated,
        }
        for number, turn in enumerate(trajectory.turns, 1)
    ]


def finished_samples(path: Path) -> set[tuple[str, int]]:
    """(task, sample) pairs judged to their last turn; rows of unfinished or faulted ones are removed."""
    if not path.exists():
        return set()
    rows = read_jsonl(path)
    faulted = {(r["task"], r["sample"]) for r in rows if r["category"].startswith("infra")}
    done = {(r["task"], r["sample"]) for r in rows if r["is_last"]} - faulted
    cut_events(path, lambda row: (row["task"], row["sample"]) in done)
    return done


def read_evaluation(path: str | Path) -> pd.DataFrame:
    """Rows sorted by task (in order of appearance), sample and turn."""
    frame = pd.DataFrame(read_jsonl(path))
    order = {task: place for place, task in enumerate(frame["task"].drop_duplicates())}
    frame["place"] = frame["task"].map(order)
    return frame.sort_values(["place", "sample", "turn"]).drop(columns="place").reset_index(drop=True)


def summarize(frame: pd.DataFrame) -> dict[str, Any]:
    """Figures of one evaluation with 95 % bootstrap intervals over tasks, over all and per depth.

    Each is {"mean", "low", "high"}: pass_at_n and avg_at_n (first turns of the n samples; n is in the name),
    faster_rate, acc_first and acc_best (any turn), greedy. Samples without a verdict are left out.
    """
    summary: dict[str, Any] = {"tasks": int(frame["task"].nunique()), **figures(frame)}
    faulted = frame["category"].str.startswith("infra")
    summary["infra"] = int(faulted.sum())
    if frame["depth"].notna().any():
        summary["by_depth"] = {
            str(int(depth)): {"tasks": int(part["task"].nunique()), **figures(part)}
            for depth, part in frame.groupby("depth")
        }
    return summary


def figures(frame: pd.DataFrame) -> dict[str, dict[str, float]]:
    values = task_values(frame)
    depth = frame.drop_duplicates("task").set_index("task")["depth"].astype("object")
    strata = {task: None if pd.isna(d) else int(d) for task, d in depth.items()}
    return {
        name: asdict(bootstrap_interval(column.dropna().to_dict(), strata))
        for name, column in values.items()
        if column.notna().any()
    }


def task_values(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per task with its share for every figure of `summarize`: what paired comparisons are made of."""
    n = int(frame["sample"].max()) + 1
    faulted = frame.loc[frame["category"].str.startswith("infra"), ["task", "sample"]]
    bad = pd.MultiIndex.from_frame(faulted)
    judged = frame[~pd.MultiIndex.from_frame(frame[["task", "sample"]]).isin(bad)]
    return pd.DataFrame({task: _task_figures(rows, n) for task, rows in judged.groupby("task", sort=False)}).T


def _task_figures(rows: pd.DataFrame, n: int) -> dict[str, float]:
    sampled = rows[rows["sample"] >= 0]
    first = sampled[sampled["turn"] == 1]
    figures: dict[str, float] = {}
    if len(first):
        passes = int(first["success"].sum())
        best = sampled.groupby("sample")["success"].any()
        records = first.astype({"speedup": "object"}).where(first.notna(), None).to_dict("records")
        figures |= {
            f"pass_at_{n}": pass_at_k(len(first), passes, min(n, len(first))),
            f"avg_at_{n}": passes / len(first),
            "faster_rate": faster_rate(records),
            "acc_first": passes / len(first),
            "acc_best": float(best.mean()),
        }
    greedy = rows[rows["sample"] == GREEDY]
    if len(greedy):
        figures["greedy"] = float(greedy["success"].iloc[0])
    return figures
