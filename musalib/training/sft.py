"""Supervised stages on TRL's SFTTrainer: base pretraining, SFT, RFT and the no-reward controls.

The whole run is laid out before it starts: which record, which target and in which order follow from the seed
alone. That makes RFT's random target per epoch reproducible, and a killed run continues as if it had not been.
"""

from __future__ import annotations

import dataclasses
import json
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import torch
from transformers import PreTrainedTokenizerBase, PrinterCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

from musalib.store import JsonlWriter
from musalib.training.checkpoints import (
    check_same_settings,
    checkpoint_step,
    cut_events,
    digest,
    fingerprint,
    newest_checkpoint,
    seal,
)
from musalib.training.policies import load_policy, save_policy

WINDOW = 32  # batches sorted by length together: little padding, little order bias
LOGGED = ("loss", "learning_rate", "grad_norm", "entropy", "mean_token_accuracy")


@dataclass(frozen=True)
class SFTStageConfig:
    """One supervised stage. `steps` optimiser steps of `batch_size` samples; lr by cosine to a tenth."""

    steps: int = 400
    batch_size: int = 16
    gradient_accumulation: int = 1
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.01
    adam_beta2: float = 0.98
    max_length: int = 512  # tokens; longer samples are left out, never cut
    save_every: int = 200  # optimiser steps
    log_every: int = 10
    seed: int = 0


def train_sft(
    policy_dir: str | Path, records: Sequence[Mapping[str, Any]], out_dir: str | Path, config: SFTStageConfig
) -> Path:
    """Train the policy on `records` and return the folder of the result, `out_dir/policy`.

    A record has `prompt` (messages) and `completion` ([assistant message]) or `pool` (texts of positives, one
    drawn per epoch). Loss on the completion only. Continues from the newest valid checkpoint in `out_dir`; a
    finished stage returns at once. Raises ValueError when `out_dir` belongs to other settings or data.
    """
    out_dir, final = Path(out_dir), Path(out_dir) / "policy"
    out_dir.mkdir(parents=True, exist_ok=True)
    check_same_settings(out_dir / "stage.json", stage_settings(config, records, policy_dir))
    if (final / "config.json").is_file():
        return final
    model, tokenizer = load_policy(policy_dir)
    rows = lay_out(tokenizer, records, config)
    checkpoint = newest_checkpoint(out_dir)
    resumed = checkpoint_step(checkpoint) if checkpoint else 0
    cut_events(out_dir / "metrics.jsonl", lambda row: row["step"] <= resumed)
    trainer = SFTTrainer(
        model=model,
        args=training_arguments(out_dir, config),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[StageFiles(out_dir / "metrics.jsonl")],
    )
    trainer.remove_callback(PrinterCallback)  # comes in with disable_tqdm and prints every log line
    trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    # a folder is complete or absent: written beside, then renamed
    save_policy(trainer.model, tokenizer, out_dir / "policy.partial").rename(final)
    return final


def training_arguments(out_dir: Path, config: SFTStageConfig) -> SFTConfig:
    cuda = torch.cuda.is_available()
    return SFTConfig(
        output_dir=str(out_dir),
        max_steps=config.steps,
        per_device_train_batch_size=config.batch_size,
        gradient_accumulation_steps=config.gradient_accumulation,
        learning_rate=config.learning_rate,
        warmup_steps=config.warmup_steps,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        weight_decay=config.weight_decay,
        adam_beta2=config.adam_beta2,
        seed=config.seed,
        train_sampling_strategy="sequential",  # the order is already random, see lay_out
        save_steps=config.save_every,
        save_total_limit=2,
        logging_steps=config.log_every,
        bf16=cuda,  # TRL turns bf16 on by itself, on a CPU too
        use_cpu=not cuda,
        gradient_checkpointing=cuda,  # TRL's default is on, which only costs time for a tiny model
        dataset_kwargs={"skip_prepare_dataset": True},  # rows come tokenised, with labels
        max_length=None,
        report_to=[],
        disable_tqdm=True,
        dataloader_num_workers=0,
        dataloader_pin_memory=cuda,
    )


# --- layout of the run -------------------------------------------------------------------------------------


def lay_out(
    tokenizer: PreTrainedTokenizerBase, records: Sequence[Mapping[str, Any]], config: SFTStageConfig
) -> list[dict[str, list[int]]]:
    """Tokenised rows of the whole run in training order: `input_ids` and `labels` (-100 on the prompt)."""
    total = config.steps * config.batch_size * config.gradient_accumulation
    encoded: dict[tuple[int, str], dict[str, list[int]] | None] = {}
    rows: list[dict[str, list[int]]] = []
    epoch = 0
    while len(rows) < total:
        before = len(rows)
        for index in shuffled(len(records), config.seed, epoch):
            target = target_of(records[index], config.seed, epoch)
            if (index, target) not in encoded:
                encoded[index, target] = encode(
                    tokenizer, records[index]["prompt"], target, config.max_length
                )
            if encoded[index, target] is not None:
                rows.append(encoded[index, target])
        if len(rows) == before:
            raise ValueError(
                f"none of {len(records)} records fits into max_length={config.max_length} tokens"
            )
        epoch += 1
    if dropped := sum(row is None for row in encoded.values()):
        warnings.warn(
            f"{dropped} samples are longer than {config.max_length} tokens and were left out", stacklevel=3
        )
    return by_length(rows[:total], config)


def shuffled(count: int, seed: int, epoch: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def target_of(record: Mapping[str, Any], seed: int, epoch: int) -> str:
    """The text to learn in this epoch: the completion, or a draw from `pool` by (seed, epoch, prompt)."""
    pool = record.get("pool")
    if not pool:
        return record["completion"][-1]["content"]
    return random.Random(f"{seed}/{epoch}/{json.dumps(record['prompt'])}").choice(pool)


def encode(
    tokenizer: PreTrainedTokenizerBase, prompt: Sequence[Mapping[str, str]], target: str, max_length: int
) -> dict[str, list[int]] | None:
    """Token ids with labels on the target and its end token; None when longer than `max_length`."""
    prompt = list(prompt)
    head = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, return_dict=False)
    whole = [*prompt, {"role": "assistant", "content": target}]
    ids = tokenizer.apply_chat_template(whole, return_dict=False)
    if ids[: len(head)] != head:
        raise ValueError(
            "the chat template does not keep the prompt as a prefix of prompt + answer, so the loss cannot be put "
            "on the answer alone; use a template that renders earlier turns unchanged"
        )
    if len(ids) > max_length:
        return None
    return {"input_ids": ids, "labels": [-100] * len(head) + ids[len(head) :]}


def by_length(rows: list[dict[str, list[int]]], config: SFTStageConfig) -> list[dict[str, list[int]]]:
    """Within windows of `WINDOW` batches, rows of similar length share a batch; batches stay shuffled."""
    rng = random.Random(f"{config.seed}/batches")
    size, ordered = config.batch_size, []
    for start in range(0, len(rows), WINDOW * size):
        window = sorted(rows[start : start + WINDOW * size], key=lambda row: len(row["input_ids"]))
        batches = [window[i : i + size] for i in range(0, len(window), size)]
        rng.shuffle(batches)
        ordered += [row for batch in batches for row in batch]
    return ordered


# --- events ------------------------------------------------------------------------------------------------


class StageFiles(TrainerCallback):
    """Seals every checkpoint once it is complete and appends one line per log to `metrics.jsonl`."""

    def __init__(self, metrics: Path) -> None:
        self.metrics = metrics

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        seal(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any
    ) -> None:
        row = {name: logs[name] for name in LOGGED if name in (logs or {})}
        if row:  # the last log of a run holds wall times only, which no rerun repeats
            with JsonlWriter(self.metrics) as file:
                file.append({"step": state.global_step, **row})


def stage_settings(
    config: Any, records: Sequence[Mapping[str, Any]], policy_dir: str | Path
) -> dict[str, Any]:
    """What a stage folder belongs to: settings, a digest of the data, the start policy."""
    records_digest = digest(list(records))
    return {**dataclasses.asdict(config), "policy": fingerprint(policy_dir), "records": records_digest}
