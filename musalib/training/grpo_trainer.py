"""TRL's GRPO trainer plus what the paper adds: the loss of Eq. 5/17, PrimeEcho, Buffered Dynamic Retry.

Shapes: `B` responses of a batch (runs of `G` per prompt), `T` response tokens. rho = pi_theta / pi_rollout, both at
the sampling temperature. Multi-turn trajectories reach the loss through their first answer only: later turns are
played, judged and recorded, but their tokens are never handed to TRL.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from musalib.reward import RewardConfig, group_advantages
from musalib.stabilizers import BufferedRetry, RetryGroup, RetryTask, mirror_pop_mask, policy_loss
from musalib.store import JsonlWriter, write_json
from musalib.tasks import Task
from musalib.training.checkpoints import seal
from musalib.training.rollout_records import batch_means, rollout_record
from musalib.training.rollouts import (
    Evaluator,
    RolloutSettings,
    Start,
    Trajectory,
    fit_repair,
    play,
    prompt_limit,
    task_start,
    trajectory_reward,
)
from musalib.training.sampling import stable_seed
from musalib.verdict import Verdict

RETRY_STATE = "retry_buffer.json"


def roll_out(prompts: list[Any], trainer: MusaGRPOTrainer) -> dict[str, list[Any]]:
    """TRL's rollout hook: one trajectory per row; only the first answer's tokens are returned."""
    start_s = time.perf_counter()
    trainer.trajectories = play(
        trainer.accelerator.unwrap_model(trainer.model),
        trainer.processing_class,
        trainer.evaluator,
        trainer.starts,
        trainer.rollout_settings,
        stable_seed(trainer.args.seed, "rollout", trainer.state.global_step),
        trainer.reward_config,
        trainer.write_feedback,
    )
    trainer._metrics["train"]["rollout_s"].append(time.perf_counter() - start_s)  # sampling and verification
    first = [trajectory.turns[0].sample for trajectory in trainer.trajectories]
    return {
        "prompt_ids": [trajectory.prompt_ids for trajectory in trainer.trajectories],
        "completion_ids": [sample.token_ids for sample in first],
        "logprobs": [sample.logprobs for sample in first],
        "trajectory_reward": [trainer.reward_of(trajectory) for trajectory in trainer.trajectories],
    }


def reported_reward(trajectory_reward: list[float | None], **_: Any) -> list[float | None]:
    """TRL's reward function: the number the rollout already holds (None after a machine fault)."""
    return trajectory_reward


class MusaGRPOTrainer(GRPOTrainer):
    """GRPO on verified rollouts. Rows of the data set hold `prompt` (messages) and `task` (an id of `tasks`).

    `delta` switches MirrorPop on, `retry` Buffered Dynamic Retry, `rollout_settings.max_turns > 1` PrimeEcho with
    `echo` = (alpha, beta1, beta2). Everything else is TRL's.
    """

    def __init__(
        self,
        *,
        tasks: list[Task],
        evaluator: Evaluator,
        rollout_settings: RolloutSettings,
        reward_config: RewardConfig,
        write_feedback: Callable[[Verdict], str],
        retry: BufferedRetry | None = None,
        delta: float | None = None,
        echo: tuple[float, float, float],
        args: GRPOConfig,
        **trl_arguments: Any,
    ) -> None:
        self.tasks = {task.id: task for task in tasks}
        self.evaluator = evaluator
        self.rollout_settings = rollout_settings
        self.reward_config = reward_config
        self.write_feedback = write_feedback
        self.retry = retry
        self.delta = delta
        self.echo = echo
        self.starts: list[Start] = []
        self.trajectories: list[Trajectory] = []
        self.records: list[dict[str, Any]] = []  # rollouts.jsonl lines of the current batch
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*rollout_func.*experimental")
            super().__init__(reward_funcs=reported_reward, args=args, rollout_func=roll_out, **trl_arguments)
        if self.accelerator.num_processes > 1:
            raise NotImplementedError("MusaGRPOTrainer runs in one process: its retry buffer is not shared")
        if args.steps_per_generation != args.gradient_accumulation_steps:
            raise ValueError(
                "steps_per_generation must equal gradient_accumulation_steps: one update per pass"
            )
        self.rollout_log = JsonlWriter(Path(args.output_dir) / "rollouts.jsonl")

    def reward_of(self, trajectory: Trajectory) -> float | None:
        return trajectory_reward(trajectory, *self.echo)

    # rollouts -----------------------------------------------------------------------------------------------

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's batch with our advantages, and infra rows taken out of the loss mask."""
        step = self.state.global_step
        torch.manual_seed(stable_seed(self.args.seed, "batch order", step))  # TRL shuffles rows next
        rows, self.starts = self.mix_in_retries(inputs)
        output = super()._generate_and_score_completions(rows)
        device = output["completion_ids"].device
        rewards = [self.reward_of(trajectory) for trajectory in self.trajectories]
        values = [math.nan if reward is None else reward for reward in rewards]
        group = self.num_generations
        advantages = group_advantages(torch.tensor(values, dtype=torch.float64).view(-1, group)).flatten()
        output["advantages"] = advantages.to(device, torch.float32)
        output["scored"] = torch.tensor([reward is not None for reward in rewards], device=device)
        output["row"] = torch.arange(len(rewards), device=device)
        self.records = [
            rollout_record(trajectory, step, row // group, row % group, rewards[row], advantages[row].item())
            for row, trajectory in enumerate(self.trajectories)
        ]
        self.observe_groups(values)
        for name, value in batch_means(self.trajectories).items():
            self._metrics["train"][name].append(value)
        return output

    def mix_in_retries(self, inputs: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[Start]]:
        """Rows and starts, with whole groups replaced by repair tasks from the buffer."""
        group = self.num_generations
        settings = self.rollout_settings
        limit = prompt_limit(self.model, settings)
        drawn: list[str | RetryTask] = [row["task"] for row in inputs[::group]]
        if self.retry is not None:
            drawn = self.retry.draw(drawn)
        rows, starts = [], []
        for entry, row in zip(drawn, inputs[::group], strict=True):
            start = None
            if isinstance(entry, RetryTask):
                task = self.tasks[entry.task]
                attempt = [(entry.candidate, entry.feedback)]
                messages = fit_repair(self.processing_class, task, attempt, limit, settings.backend)
                # all response tokens of a repair sample are trained: it has a single turn
                start = messages and Start(task, messages, max_turns=1, is_retry=True)
            start = start or task_start(self.tasks[row["task"]], settings.max_turns, settings.backend)
            starts += [start] * group
            rows += [row | {"prompt": start.messages, "task": start.task.id} for _ in range(group)]
        return rows, starts

    def observe_groups(self, rewards: list[float]) -> None:
        """Let the retry buffer see every group: what its first turns said, and what they earned."""
        if self.retry is None:
            return
        for first in range(0, len(rewards), self.num_generations):
            rows = slice(first, first + self.num_generations)
            turns = [trajectory.turns[0] for trajectory in self.trajectories[rows]]
            self.retry.observe(
                RetryGroup(
                    task=self.starts[first].task.id,
                    candidates=[turn.sample.text for turn in turns],
                    rewards=rewards[rows],
                    feedback=[turn.feedback for turn in turns],
                    categories=[turn.verdict.category for turn in turns],
                )
            )
        self._metrics["train"]["retry/buffer"].append(len(self.retry))

    # loss ---------------------------------------------------------------------------------------------------

    def _compute_loss(self, model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Eq. 5 / Eq. 17 over the whole batch: token sum of kept responses / their token count."""
        log_ratio_BT, mask_BT, entropy_BT, ref_log_ratio_BT = self.log_ratios(model, inputs)
        clip = {"eps_low": self.epsilon_low, "eps_high": self.epsilon_high, "delta": self.delta}
        loss, metrics = policy_loss(
            log_ratio_BT,
            inputs["advantages"],
            mask_BT,
            **clip,
            ref_log_ratio_BT=ref_log_ratio_BT,
            beta=self.beta,
        )
        kept, every = self.token_counts(log_ratio_BT.detach(), mask_BT)
        if self.args.gradient_accumulation_steps > 1:
            # a micro-batch counts by its share of the batch's tokens, separately for the two denominators
            policy_term, _ = policy_loss(log_ratio_BT, inputs["advantages"], mask_BT, **clip)
            kept_total, every_total = self.batch_token_counts(model)
            loss = policy_term * (kept / max(kept_total, 1)) + (loss - policy_term) * (
                every / max(every_total, 1)
            )
        self.note_drift(inputs["row"], log_ratio_BT.detach(), mask_BT)
        metrics["entropy"] = (entropy_BT * mask_BT).sum().item() / max(every, 1)
        for name, value in metrics.items():
            self._metrics["train"][name].append(value)
        return loss

    def log_ratios(
        self, model: Any, inputs: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """log rho, loss mask, entropy, log pi_ref - log pi_theta; each [B, T], the last None without a KL term."""
        completion_ids, completion_mask = inputs["completion_ids"], inputs["completion_mask"]
        logprob_BT, entropy_BT, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], completion_ids], dim=1),
            torch.cat([inputs["prompt_mask"], completion_mask], dim=1),
            completion_ids.size(1),
            compute_entropy=True,
        )
        mask_BT = completion_mask * inputs["scored"][:, None]
        log_ratio_BT = logprob_BT - inputs["sampling_per_token_logps"]
        reference_BT = inputs.get("ref_per_token_logps")
        return log_ratio_BT, mask_BT, entropy_BT, None if reference_BT is None else reference_BT - logprob_BT

    def token_counts(self, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[int, int]:
        """Tokens of kept responses and of all responses."""
        length_B = mask_BT.sum(dim=1)
        every = int(length_B.sum())
        if self.delta is None:
            return every, every
        return int(length_B[mirror_pop_mask(log_ratio_BT, mask_BT, self.delta)].sum()), every

    def batch_token_counts(self, model: Any) -> tuple[int, int]:
        """The same over all micro-batches of this update; with MirrorPop this costs one more forward pass."""
        if self._step % self.args.steps_per_generation == 0:
            counts = []
            for inputs in self._buffered_inputs:
                if self.delta is None:
                    mask_BT = inputs["completion_mask"] * inputs["scored"][:, None]
                    counts.append((int(mask_BT.sum()),) * 2)
                else:
                    with torch.no_grad():
                        log_ratio_BT, mask_BT, _, _ = self.log_ratios(model, inputs)
                    counts.append(self.token_counts(log_ratio_BT, mask_BT))
            self._batch_counts = tuple(map(sum, zip(*counts, strict=True)))
        return self._batch_counts

    def note_drift(self, row_B: torch.Tensor, log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> None:
        """Put each response's drift beside its transcript (the last use counts when a batch is used twice)."""
        length_B = mask_BT.sum(dim=1).clamp(min=1)
        signed_B = (log_ratio_BT * mask_BT).sum(dim=1) / length_B
        absolute_B = (log_ratio_BT.abs() * mask_BT).sum(dim=1) / length_B
        for row, signed, absolute in zip(row_B.tolist(), signed_B.tolist(), absolute_B.tolist(), strict=True):
            self.records[row] |= {"mean_log_ratio": signed, "mean_abs_log_ratio": absolute}

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        loss = super().training_step(*args, **kwargs)
        if self._step % (self.args.steps_per_generation * self.num_iterations) == 0:
            for record in self.records:
                self.rollout_log.append(record)
            self.records = []
        return loss

    # checkpoints --------------------------------------------------------------------------------------------

    def create_model_card(self, *_: Any, **__: Any) -> None:
        """No README per checkpoint."""

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
        if self.retry is not None:
            write_json(folder / RETRY_STATE, self.retry.state_dict())
        seal(folder)
