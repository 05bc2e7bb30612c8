"""Diversity-preserving rejection fine-tuning: sample, verify, keep 4 to 8 structurally different positives a prompt.

Training on one positive per prompt makes a policy's entropy collapse (to about a tenth in the paper), so each epoch
draws a random target from the prompt's pool.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from musalib.store import write_jsonl
from musalib.tasks import Task
from musalib.training.diversity import Structure, choose_pool
from musalib.training.evaluation import evaluate_policy
from musalib.training.prompts import task_messages
from musalib.training.rollouts import Evaluator
from musalib.training.sft import SFTStageConfig, train_sft
from musalib.verdict import Verdict


@dataclass(frozen=True)
class RFTConfig:
    samples_per_task: int = 8  # undisclosed in the paper, as is all but the pool's size
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    min_pool: int = 4
    max_pool: int = 8
    seed: int = 0
    backend: str = "cpu"

    def __post_init__(self) -> None:
        if not 1 <= self.min_pool <= self.max_pool:
            raise ValueError(
                f"pools need 1 <= min_pool <= max_pool, got min_pool={self.min_pool}, max_pool={self.max_pool}"
            )


def train_rft(
    policy_dir: str | Path,
    tasks: Sequence[Task],
    evaluator: Evaluator,
    out_dir: str | Path,
    config: RFTConfig,
    training: SFTStageConfig,
    more_records: Sequence[Mapping[str, Any]] = (),
    write_feedback: Callable[[Verdict], str] | None = None,
) -> Path:
    """Sample from the policy, build `out_dir/pools.jsonl`, train on it; returns the folder of the new policy.

    `more_records` (e.g. the SFT corpus) are trained on as well. ValueError when nothing passed.
    """
    out_dir = Path(out_dir)
    frame = evaluate_policy(
        policy_dir,
        tasks,
        evaluator,
        out_dir / "samples.jsonl",
        n=config.samples_per_task,
        temperature=config.temperature,
        top_p=config.top_p,
        greedy=False,
        max_new_tokens=config.max_new_tokens,
        seed=config.seed,
        backend=config.backend,
        write_feedback=write_feedback,
    )
    passed = frame[frame["success"]]
    texts = {task: list(rows["response"]) for task, rows in passed.groupby("task", sort=False)}
    records = pool_records(tasks, texts, config)
    if not records:
        raise ValueError(
            f"none of {len(frame)} samples passed, so there is nothing to train on; "
            "raise samples_per_task, take easier tasks or train the policy longer first"
        )
    write_jsonl(out_dir / "pools.jsonl", records)
    return train_sft(policy_dir, [*records, *more_records], out_dir, training)


def pool_records(
    tasks: Sequence[Task], passing: Mapping[str, Sequence[str]], config: RFTConfig
) -> list[dict[str, Any]]:
    """One training record per task that has a passing response: `pool` holds its representatives."""
    records = []
    for task in tasks:
        pool = choose_pool(passing.get(task.id, ()), config.min_pool, config.max_pool)
        if pool:
            records.append(
                {
                    "task": task.to_dict(),
                    "prompt": task_messages(task, config.backend),
                    "completion": [{"role": "assistant", "content": pool[0]}],
                    "pool": pool,
                    "clusters": len({Structure.of(text) for text in pool}),
                }
            )
    return records
