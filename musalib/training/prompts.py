"""Chat messages of a task and of a repair turn: the one place where prompts are worded.

The rules follow the paper's revised KernelBench prompt (App. A) in our own words. Tiny and real policies read
the same text; every fixed line is (part of) one token for the line-level tokenizer of the tiny policy.
"""

from __future__ import annotations

from collections.abc import Iterable

from musalib.tasks import Task

LANGUAGES = {"cpu": "C++ (cpp_sources)", "cuda": "CUDA (cuda_sources)", "musa": "MUSA (cuda_sources)"}

INSTRUCTION = """\
Rewrite the PyTorch module below as `class ModelNew(nn.Module)` with native {language} kernels built by \
torch.utils.cpp_extension.load_inline (name, cpp_sources, cuda_sources, functions, verbose; no compiler flags).
- Every computation of forward runs in your own kernels; neighbouring operators may be fused. No ATen or torch compute call.
- Keep the submodules of __init__ so that the reference state_dict loads; do not call them, hand their weights to the kernel.
- Write real code that compiles, helpers included. Answer with one complete Python module: no tests, no chatter.

```python
"""
CLOSING = "```"
REPAIR = "\n\nRevise your module accordingly and answer with the complete module again."


def task_messages(task: Task, backend: str = "cpu") -> list[dict[str, str]]:
    """The first user turn: the rules for `backend`, then the reference code."""
    if backend not in LANGUAGES:
        raise ValueError(f"backend must be one of {', '.join(LANGUAGES)}, got {backend!r}")
    instruction = INSTRUCTION.format(language=LANGUAGES[backend])
    return [{"role": "user", "content": f"{instruction}{task.source.strip()}\n{CLOSING}"}]


def repair_messages(
    task: Task,
    response: str,
    feedback_text: str,
    backend: str = "cpu",
    earlier: Iterable[tuple[str, str]] = (),
) -> list[dict[str, str]]:
    """Compose(x, c-, f-) of Eq. 15: the task, a failed answer and what the verifier said about it.

    `earlier` holds the (response, feedback) pairs of turns before that one, oldest first. Reasoning of past
    turns is dropped: code and feedback stay (as in the paper's multi-turn SFT).
    """
    messages = task_messages(task, backend)
    for answer, message in [*earlier, (response, feedback_text)]:
        messages.append({"role": "assistant", "content": without_reasoning(answer)})
        messages.append({"role": "user", "content": f"{message.strip()}{REPAIR}"})
    return messages


def without_reasoning(response: str) -> str:
    """The text after the last `</think>`; the whole response when there is none."""
    return response.rpartition("</think>")[2].lstrip() if "</think>" in response else response
