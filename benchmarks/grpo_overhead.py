"""What MirrorPop, retries and our rollouts cost on top of plain TRL: the same step through both trainers, side by side.

    python benchmarks/grpo_overhead.py [--steps 8] [--rounds 3] [--threads 1]

Both trainers start from the same untrained 0.8M-parameter policy (which writes to the token limit, so that both do the
same work) and get their rewards from a hash of the answer: no candidate is verified here. Rounds alternate between
the two. Writes benchmarks/results/grpo_overhead.json; figures are CPU seconds per step, median over steps.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch
import transformers
import trl
from datasets import Dataset

from musalib.synthesis.teacher import write_unreliable
from musalib.synthesis.workloads import sample_programs, task_of
from musalib.training.grpo import build_trainer, schedule
from musalib.training.grpo_config import GRPOStageConfig, trl_config
from musalib.training.policies import (
    TinyPolicyConfig,
    build_policy,
    build_tokenizer,
    load_policy,
    save_policy,
)
from musalib.training.prompts import task_messages
from musalib.verdict import Verdict

RESULT = Path(__file__).parent / "results" / "grpo_overhead.json"
PASSES = 0.3  # share of answers that the stand-in judge lets pass


def passes(text: str) -> bool:
    return hashlib.sha256(text.encode()).digest()[0] < PASSES * 256


class Judge:
    """Stand-in for MooreEval that costs nothing."""

    def verify_many(self, jobs):
        return [Verdict("ok", q=1.0) if passes(text) else Verdict("compile_error:cpp") for _, text in jobs]


def plain_reward(completions, **_):
    return [1.0 if passes(completion[0]["content"]) else -1.0 for completion in completions]


class Meter(transformers.TrainerCallback):
    """CPU seconds of each step, and of the part in which answers are written."""

    def __init__(self, trainer) -> None:
        self.step_s: list[float] = []
        self.rollout_s: list[float] = []
        generate = trainer._generate

        def timed(prompts):
            start = time.process_time()
            result = generate(prompts)
            self.rollout_s.append(time.process_time() - start)
            return result

        trainer._generate = timed
        trainer.add_callback(self)

    def on_step_begin(self, *_, **__):
        self.start = time.process_time()

    def on_step_end(self, *_, **__):
        self.step_s.append(time.process_time() - self.start)


def policy_and_tasks(folder: Path):
    programs = sample_programs("rl", 64, seed=0)
    tasks = [task_of(program) for program in programs]
    rng = random.Random(0)
    texts = [write_unreliable(program, rng) for program in programs * 10]
    texts += [message["content"] for task in tasks for message in task_messages(task)]
    tokenizer = build_tokenizer(texts, 1024)
    return save_policy(build_policy(tokenizer, TinyPolicyConfig(), seed=0), tokenizer, folder), tasks


def plain_trainer(policy, tasks, out_dir, config):
    model, tokenizer = load_policy(policy)
    dataset: Dataset = schedule(tasks, tokenizer, limit=10_000, config=config)
    return trl.GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        args=trl_config(config, out_dir),
        train_dataset=dataset,
        reward_funcs=plain_reward,
    )


def measure(trainer, skip: int = 2) -> dict[str, float]:
    trainer.remove_callback(transformers.PrinterCallback)
    meter = Meter(trainer)
    trainer.train()
    tokens = trainer.state.log_history[0]["completions/mean_length"]
    step = statistics.median(meter.step_s[skip:])
    rollout = statistics.median(meter.rollout_s[skip:])
    return {"step_cpu_s": step, "rollout_cpu_s": rollout, "rest_cpu_s": step - rollout, "mean_tokens": tokens}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.utils.logging.disable_progress_bar()
    config = GRPOStageConfig(
        steps=arguments.steps,
        checkpoint_every=10 * arguments.steps,
        prompts_per_step=8,
        group_size=8,
        max_new_tokens=45,
        p_buf=0.25,
        print_every=10**6,
    )
    rounds: dict[str, list[dict[str, float]]] = {"plain_trl": [], "musalib": []}
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        policy, tasks = policy_and_tasks(root / "policy")
        for number in range(arguments.rounds):
            rounds["plain_trl"].append(measure(plain_trainer(policy, tasks, root / f"plain{number}", config)))
            ours = build_trainer(
                policy, tasks, Judge(), root / f"ours{number}", config, lambda verdict: "it failed\n"
            )
            rounds["musalib"].append(measure(ours))
    best = {side: {key: min(one[key] for one in many) for key in many[0]} for side, many in rounds.items()}
    result = {
        "what": "CPU seconds per GRPO step, 64 completions of 45 tokens, 0.8M-parameter Llama, no verification; best round",
        **best,
        "ratio_step": best["musalib"]["step_cpu_s"] / best["plain_trl"]["step_cpu_s"],
        "ratio_rest": best["musalib"]["rest_cpu_s"] / best["plain_trl"]["rest_cpu_s"],
        "rounds": rounds,
        "settings": {"steps": arguments.steps, "rounds": arguments.rounds, "threads": arguments.threads},
        "device": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "versions": {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "trl": trl.__version__,
        },
        "commit": subprocess.run(
            ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        ).stdout.strip(),
        "date": datetime.date.today().isoformat(),
    }
    RESULT.parent.mkdir(exist_ok=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))


if __name__ == "__main__":
    main()
