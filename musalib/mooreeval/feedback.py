"""Text for the next turn, from a verdict alone (App. G): what failed, where, and what to do about it.

Bounded, and free of expected values, seeds and paths of this machine.
"""

from __future__ import annotations

from musalib.verdict import Verdict

LIMIT = 1200  # characters

ADVICE = {
    "extract_error": "Answer with one python code block that defines `class ModelNew`.",
    "compile_error": "Fix the build first.",
    "runtime_error": "Fix the fault; do not optimise yet.",
    "correctness_error": "Fix correctness first; do not optimise yet.",
    "cheating": "Write this computation natively in the C++ source.",
}


def feedback(verdict: Verdict) -> str:
    """Feedback f(c) for one candidate; never empty. `infra` verdicts have none: the candidate did nothing wrong."""
    if verdict.kind == "infra":
        raise ValueError("an infra verdict says nothing about the candidate: retry it or drop the sample")
    if verdict.success:
        speed = f"speedup {verdict.speedup:.2f}x" if verdict.speedup is not None else "not timed"
        return f"status: ok\n{speed}\nThe kernel is correct. Keep outputs and parameters; make it faster."
    detail = (verdict.detail or "").strip()
    lines = [
        f"status: {verdict.category}",
        *([detail[: LIMIT - 200]] if detail else []),
        ADVICE[verdict.kind],
    ]
    return "\n".join(lines)
