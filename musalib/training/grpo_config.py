"""Settings of an RL stage, and what they are called in TRL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from trl import GRPOConfig


@dataclass(frozen=True)
class GRPOStageConfig:
    """Settings of one RL stage; sizes and rates are for the tiny policy. "Undisclosed": not given in the paper."""

    steps: int = 120  # optimiser steps
    prompts_per_step: int = 8
    group_size: int = 8  # G
    gradient_accumulation_steps: int = 1
    updates_per_rollout: int = 1  # more than 1: later updates are off-policy, where clip and MirrorPop act
    seed: int = 0

    learning_rate: float = 5e-4
    warmup_steps: int = 10
    min_lr_share: float = 0.1  # cosine down to this share of the rate; 1 keeps it constant
    adam_beta2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    gradient_checkpointing: bool = False
    bf16: bool = False

    eps_low: float = 0.2  # undisclosed
    eps_high: float = 0.28  # undisclosed
    delta: float | None = 0.3  # MirrorPop threshold in log space, undisclosed; None: off
    kl_beta: float = 0.0  # undisclosed; weight of KL to the starting policy

    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    max_prompt_tokens: int | None = None
    rollout_batch_size: int = 256

    max_turns: int = 1  # K <= 3 in the paper
    alpha: float = 0.75  # the paper's default
    beta1: float = 0.15  # undisclosed
    beta2: float = 0.08  # undisclosed
    speed_weight: float = 0.0  # lambda; undisclosed; 0 keeps rewards independent of timing noise
    speedup_cap: float = 4.0  # nu_max; undisclosed

    p_buf: float = 0.0  # chance that a group is a repair task; undisclosed; 0: off
    retry_capacity: int = 64  # undisclosed
    retry_trigger: str = "all_failed"
    retry_start_step: int = 0  # rollouts before the first repair task; late use is advised

    backend: str = "cpu"
    checkpoint_every: int = 20  # optimiser steps
    checkpoints_kept: int = 2
    print_every: int = 10
    threads: int | None = None  # of torch; None leaves them as they are

    def __post_init__(self) -> None:
        batch = self.prompts_per_step * self.group_size
        if self.group_size < 2:
            raise ValueError(f"group_size must be >= 2: a group of {self.group_size} has no advantages")
        if batch % self.gradient_accumulation_steps:
            raise ValueError(f"gradient_accumulation_steps must divide the {batch} responses of a step")
        for name in ("steps", "checkpoint_every"):
            if getattr(self, name) % self.updates_per_rollout:
                raise ValueError(
                    f"{name} must be a multiple of updates_per_rollout={self.updates_per_rollout}"
                )
        if self.checkpoints_kept < 2:
            raise ValueError("checkpoints_kept must be >= 2, so that a broken newest one has a predecessor")


def trl_config(config: GRPOStageConfig, out_dir: Path) -> GRPOConfig:
    accumulation = config.gradient_accumulation_steps
    return GRPOConfig(
        output_dir=str(out_dir),
        seed=config.seed,
        max_steps=config.steps,
        per_device_train_batch_size=config.prompts_per_step * config.group_size // accumulation,
        gradient_accumulation_steps=accumulation,
        steps_per_generation=accumulation,
        num_generations=config.group_size,
        num_iterations=config.updates_per_rollout,
        shuffle_dataset=False,  # the schedule is already in order
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": config.min_lr_share},
        adam_beta2=config.adam_beta2,
        weight_decay=config.weight_decay,
        max_grad_norm=config.max_grad_norm,
        gradient_checkpointing=config.gradient_checkpointing,
        bf16=config.bf16,
        use_cpu=not torch.cuda.is_available(),
        epsilon=config.eps_low,
        epsilon_high=config.eps_high,
        beta=config.kl_beta,
        temperature=config.temperature,
        top_p=config.top_p,
        max_completion_length=config.max_new_tokens,
        logging_steps=1,
        save_strategy="steps",
        save_steps=config.checkpoint_every,
        save_total_limit=config.checkpoints_kept,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
