"""A toy world for the trainer tests: a tiny random Llama and a STAND-IN for MooreEval that judges by a hash.

Nothing here compiles or runs candidates; the real verifier has its own tests.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from musalib.tasks import Task
from musalib.training.policies import TinyPolicyConfig, build_policy, build_tokenizer, save_policy
from musalib.verdict import Verdict

SOURCE = """import torch
import torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return x + {constant}
def get_inputs():
    return [torch.rand(2, 3)]
def get_init_inputs():
    return []
"""


def toy_tasks(count: int) -> list[Task]:
    return [Task(f"toy{i}", SOURCE.format(constant=i), meta={"depth": 1 + i % 2}) for i in range(count)]


def toy_policy(folder: Path, seed: int = 0) -> Path:
    from musalib.training.prompts import repair_messages, task_messages

    tasks = toy_tasks(40)
    texts = [m["content"] for task in tasks for m in task_messages(task)]
    texts += [m["content"] for task in tasks for m in repair_messages(task, "no\n", "wrong values\n")]
    tokenizer = build_tokenizer(texts, vocab_size=640)
    config = TinyPolicyConfig(hidden=32, layers=2, heads=2, ffn=64, max_length=256)
    return save_policy(build_policy(tokenizer, config, seed), tokenizer, folder)


class HashJudge:
    """Stand-in for MooreEval: a verdict that is a fixed function of (task, response)."""

    def __init__(self, kinds=("ok", "correctness_error:values", "compile_error:cpp"), stop_at_call=None):
        self.kinds = kinds
        self.stop_at_call = stop_at_call
        self.calls = 0
        self.judged = []

    def verify_many(self, jobs):
        self.calls += 1
        if self.calls == self.stop_at_call:
            raise KeyboardInterrupt
        self.judged += jobs
        return [self.verdict(task, response) for task, response in jobs]

    def verdict(self, task, response) -> Verdict:
        digest = hashlib.sha256(f"{task.id}\0{response}".encode()).digest()[0]
        category = self.kinds[digest % len(self.kinds)]
        kind = category.partition(":")[0]
        q = {"ok": 1.0, "correctness_error": 0.5}.get(kind)
        done = kind == "ok"
        return Verdict(
            category,
            compiled=kind not in ("compile_error", "infra") or None,
            correct=done,
            legal=done or None,
            q=q,
        )


def toy_feedback(verdict: Verdict) -> str:
    return f"verdict {verdict.category}\n"
