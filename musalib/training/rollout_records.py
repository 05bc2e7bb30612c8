"""What is kept of a rollout: one line per trajectory for `rollouts.jsonl`, means over the batch for `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from musalib.training.rollouts import Trajectory


def rollout_record(
    trajectory: Trajectory, step: int, group: int, sample: int, reward: float | None, advantage: float
) -> dict[str, Any]:
    """One line of `rollouts.jsonl`; the trainer adds the drift once the loss has seen the answer.

    `policy_version` names the weights that wrote the answer, in optimiser steps.
    """
    return {
        "step": step,
        "task": trajectory.start.task.id,
        "group": group,
        "sample": sample,
        "is_retry": trajectory.start.is_retry,
        "turns": [
            {
                "response": turn.sample.text,
                "score": turn.score,
                "category": turn.verdict.category,
                "feedback": turn.feedback,
                "tokens": len(turn.sample.token_ids),
                "truncated": turn.sample.truncated,
            }
            for turn in trajectory.turns
        ],
        "reward": reward,
        "advantage": advantage,
        "policy_version": step,
    }


def batch_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Pass rates over first-hand tasks, those of repair tasks apart; NaN where there were none."""
    scored = [trajectory for trajectory in trajectories if trajectory.is_scored]
    fresh = [trajectory for trajectory in scored if not trajectory.start.is_retry]
    return {
        "pass/first_turn": mean(t.turns[0].verdict.success for t in fresh),
        "pass/best_turn": mean(t.passed for t in fresh),
        "pass/retry": mean(t.passed for t in scored if t.start.is_retry),
        "turns": mean(len(t.turns) for t in fresh),
        "infra_share": mean(not t.is_scored for t in trajectories),
        "retry/share": mean(t.start.is_retry for t in trajectories),
    }


def mean(values: Iterable[float]) -> float:
    """NaN for no values; TRL leaves NaN out of its averages."""
    numbers = [float(value) for value in values]
    return sum(numbers) / len(numbers) if numbers else float("nan")
