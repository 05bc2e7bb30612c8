"""The RL stages: single-turn and multi-turn GRPO from a policy folder to a policy folder, resumable at any moment.

    train_grpo("runs/a/rft/policy", tasks, evaluator, "runs/a/rl", GRPOStageConfig(steps=120))

The output folder holds `policy/` (written last), `rollouts.jsonl` (one line per trajectory), `metrics.jsonl` (one
line per step), `settings.json` and the newest checkpoints. Called again after a kill, it continues from the newest
sound checkpoint and ends with the same numbers.
"""

from __future__ import annotations

import dataclasses
import random
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback

from musalib.reward import RewardConfig
from musalib.stabilizers import BufferedRetry
from musalib.store import JsonlWriter, read_json
from musalib.tasks import Task, iter_ids
from musalib.training.checkpoints import (
    check_same_settings,
    checkpoint_step,
    cut_events,
    digest,
    fault,
    fingerprint,
    newest_checkpoint,
    seal,
)
from musalib.training.grpo_config import GRPOStageConfig, trl_config
from musalib.training.grpo_trainer import RETRY_STATE, MusaGRPOTrainer
from musalib.training.policies import load_policy, save_policy
from musalib.training.prompts import task_messages
from musalib.training.rollouts import Evaluator, RolloutSettings, prompt_limit
from musalib.training.sampling import encode_prompt, stable_seed
from musalib.verdict import Verdict

__all__ = ["GRPOStageConfig", "MusaGRPOTrainer", "train_grpo"]

FREE_SETTINGS = ("threads", "print_every", "checkpoints_kept")  # may change when a stage is continued


def train_grpo(
    policy_dir: str | Path,
    tasks: Sequence[Task],
    evaluator: Evaluator,
    out_dir: str | Path,
    config: GRPOStageConfig | None = None,
    write_feedback: Callable[[Verdict], str] | None = None,
) -> Path:
    """Train the policy of `policy_dir` on verified rollouts; returns `out_dir/policy`.

    A finished stage is returned as it is. ValueError when `out_dir` holds a run with other settings, or when a
    task's prompt leaves no room for an answer.
    """
    config = config or GRPOStageConfig()
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    settings = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE_SETTINGS}
    settings |= {"policy": fingerprint(policy_dir), "tasks": digest([task.to_dict() for task in tasks])}
    check_same_settings(out_dir / "settings.json", settings)
    final = out_dir / "policy"
    if final.exists() and fault(final) is None:
        return final
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = rewind(out_dir)
    trainer = build_trainer(policy_dir, tasks, evaluator, out_dir, config, write_feedback)
    if checkpoint is not None and trainer.retry is not None:
        trainer.retry.load_state_dict(read_json(checkpoint / RETRY_STATE))
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    finally:
        trainer.rollout_log.close()
    return publish(trainer, final)


def build_trainer(
    policy_dir: str | Path,
    tasks: Sequence[Task],
    evaluator: Evaluator,
    out_dir: Path,
    config: GRPOStageConfig,
    write_feedback: Callable[[Verdict], str] | None = None,
) -> MusaGRPOTrainer:
    """The trainer that `train_grpo` runs, ready to train."""
    if write_feedback is None:
        from musalib.mooreeval import feedback as write_feedback
    list(iter_ids(tasks))  # a doubled id is an error
    transformers.utils.logging.disable_progress_bar()
    model, tokenizer = load_policy(policy_dir)
    settings = RolloutSettings(
        max_turns=config.max_turns,
        temperature=config.temperature,
        top_p=config.top_p,
        max_new_tokens=config.max_new_tokens,
        max_prompt_tokens=config.max_prompt_tokens,
        batch_size=config.rollout_batch_size,
        backend=config.backend,
    )
    retry = BufferedRetry(
        capacity=config.retry_capacity,
        p_buf=config.p_buf,
        seed=config.seed,
        trigger=config.retry_trigger,
        start_step=config.retry_start_step,
    )
    trainer = MusaGRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=trl_config(config, out_dir),
        train_dataset=schedule(tasks, tokenizer, prompt_limit(model, settings), config),
        tasks=list(tasks),
        evaluator=evaluator,
        rollout_settings=settings,
        reward_config=RewardConfig(speed_weight=config.speed_weight, speedup_cap=config.speedup_cap),
        write_feedback=write_feedback,
        retry=retry if config.p_buf > 0 else None,
        delta=config.delta,
        echo=(config.alpha, config.beta1, config.beta2),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.add_callback(StepLog(out_dir / "metrics.jsonl", config.print_every))
    return trainer


def schedule(
    tasks: Sequence[Task], tokenizer: PreTrainedTokenizerBase, limit: int, config: GRPOStageConfig
) -> Dataset:
    """Every prompt of the run in order: whole passes over the tasks, each in its own seeded order.

    One row per prompt of each rollout, so that resuming is a matter of skipping rows.
    """
    if not tasks:
        raise ValueError("there are no tasks to train on")
    wanted = config.prompts_per_step * config.steps // config.updates_per_rollout
    order: list[Task] = []
    while len(order) < wanted:
        rng = random.Random(stable_seed(config.seed, "tasks", len(order)))
        order += rng.sample(list(tasks), len(tasks))
    messages = {task.id: task_messages(task, config.backend) for task in order[:wanted]}
    too_long = [name for name, prompt in messages.items() if len(encode_prompt(tokenizer, prompt)) > limit]
    if too_long:
        raise ValueError(
            f"{len(too_long)} tasks have prompts of more than {limit} tokens, first {too_long[0]}; leave them out, "
            "raise max_prompt_tokens or lower max_new_tokens"
        )
    return Dataset.from_list([{"prompt": messages[task.id], "task": task.id} for task in order[:wanted]])


def rewind(out_dir: Path) -> Path | None:
    """Newest sound checkpoint; events and checkpoints later than it are removed, so that nothing is doubled."""
    checkpoint = newest_checkpoint(out_dir)
    step = (checkpoint_step(checkpoint) or 0) if checkpoint else 0
    for folder in out_dir.glob("checkpoint-*"):
        if (checkpoint_step(folder) or 0) > step:
            shutil.rmtree(folder)
    cut_events(out_dir / "rollouts.jsonl", lambda record: record["step"] < step)  # steps count from 0
    cut_events(out_dir / "metrics.jsonl", lambda record: record["step"] <= step)  # steps done
    return checkpoint


def publish(trainer: MusaGRPOTrainer, final: Path) -> Path:
    """Write the trained policy as a Hugging Face folder, in one step."""
    temporary = final.with_name(final.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    save_policy(trainer.accelerator.unwrap_model(trainer.model), trainer.processing_class, temporary)
    seal(temporary)
    shutil.rmtree(final, ignore_errors=True)
    temporary.rename(final)
    return final


class StepLog(TrainerCallback):
    """One line per step in `metrics.jsonl`, one line on screen every so often."""

    def __init__(self, path: Path, print_every: int) -> None:
        self.writer = JsonlWriter(path)
        self.print_every = print_every
        self.cpu_s = time.process_time()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any
    ) -> None:
        if not logs or "loss" not in logs:
            return
        before, self.cpu_s = self.cpu_s, time.process_time()
        self.writer.append({"step": state.global_step, **logs, "cpu_s": round(self.cpu_s - before, 3)})
        # later updates on one rollout have no rewards of their own
        if "reward" in logs and (
            state.global_step % self.print_every == 0 or state.global_step == state.max_steps
        ):
            print(
                f"step {state.global_step}/{state.max_steps}  reward {logs['reward']:.3f}  "
                f"pass {logs['pass/first_turn'] or 0:.3f}  entropy {logs['entropy']:.3f}",
                flush=True,
            )
