"""Playing trajectories: a policy answers, MooreEval judges, failed answers get the feedback and another turn.

All trajectories move together: turn k is one batch of sampling and one batch of verification. A trajectory stops
at its first passing candidate, after its last turn, when its context would no longer fit, or at a machine fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from musalib.reward import RewardConfig, reward
from musalib.stabilizers import prime_echo
from musalib.tasks import Task
from musalib.training.prompts import repair_messages, task_messages
from musalib.training.sampling import Messages, Sample, encode_prompt, sample_responses, stable_seed
from musalib.verdict import Verdict


class Evaluator(Protocol):
    """What is needed of MooreEval."""

    def verify_many(self, jobs: Sequence[tuple[Task, str]]) -> Iterable[Verdict]: ...


@dataclass(frozen=True)
class RolloutSettings:
    max_turns: int = 1  # K
    temperature: float = 1.0
    top_p: float = 1.0
    max_new_tokens: int = 128
    max_prompt_tokens: int | None = None  # None: what the model's context leaves beside max_new_tokens
    batch_size: int = 256
    backend: str = "cpu"

    def __post_init__(self) -> None:
        if self.max_turns < 1:
            raise ValueError(f"max_turns counts the first answer too and must be >= 1, got {self.max_turns}")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")


@dataclass(frozen=True)
class Start:
    """Where a trajectory begins: the task and the conversation that the first answer replies to."""

    task: Task
    messages: Messages
    max_turns: int
    is_retry: bool = False


@dataclass(frozen=True)
class Turn:
    sample: Sample
    verdict: Verdict
    score: float | None  # s(c) of Eq. 2; None after a machine fault
    feedback: str  # what a next turn reads; empty after a pass or a machine fault


@dataclass
class Trajectory:
    start: Start
    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)

    @property
    def is_scored(self) -> bool:
        """False when the machine failed in any turn: the trajectory then says nothing about the policy."""
        return all(turn.score is not None for turn in self.turns)

    @property
    def scores(self) -> list[float]:
        return [turn.score for turn in self.turns if turn.score is not None]

    @property
    def passed(self) -> bool:
        return self.turns[-1].verdict.success


def task_start(task: Task, max_turns: int, backend: str = "cpu") -> Start:
    return Start(task, task_messages(task, backend), max_turns)


def trajectory_reward(trajectory: Trajectory, alpha: float, beta1: float, beta2: float) -> float | None:
    """PrimeEcho (Eq. 9-12) where several turns were allowed, else the score; None when a machine fault struck."""
    if not trajectory.is_scored:
        return None
    if trajectory.start.max_turns == 1:
        return trajectory.scores[0]
    return prime_echo(trajectory.scores, alpha=alpha, beta1=beta1, beta2=beta2)


def prompt_limit(model: PreTrainedModel, settings: RolloutSettings) -> int:
    """Most prompt tokens that leave room for a response."""
    context = getattr(model.config, "max_position_embeddings", None)
    room = None if context is None else context - settings.max_new_tokens
    limits = [limit for limit in (settings.max_prompt_tokens, room) if limit is not None]
    return min(limits) if limits else 2**31


def fit_repair(
    tokenizer: PreTrainedTokenizerBase,
    task: Task,
    attempts: Sequence[tuple[str, str]],
    limit: int,
    backend: str = "cpu",
) -> Messages | None:
    """Compose(x, c, f) of Eq. 15 within `limit` tokens, from (response, feedback) pairs, oldest first.

    The oldest pairs are dropped first, then the last feedback is cut from its end. The task and the last response
    are never cut; None when they alone are too long.
    """
    response, text = attempts[-1]
    for first in range(len(attempts)):
        messages = repair_messages(task, response, text, backend, earlier=attempts[first:-1])
        if len(encode_prompt(tokenizer, messages)) <= limit:
            return messages
    while text:
        text = text[: len(text) // 2]
        messages = repair_messages(task, response, text, backend)
        if len(encode_prompt(tokenizer, messages)) <= limit:
            return messages
    return None


def verify_distinct(evaluator: Evaluator, jobs: Sequence[tuple[Task, str]]) -> list[Verdict]:
    """Verdicts in order; equal (task, response) pairs are judged once."""
    distinct = {(task.id, response): (task, response) for task, response in jobs}
    verdicts = dict(zip(distinct, evaluator.verify_many(list(distinct.values())), strict=True))
    return [verdicts[task.id, response] for task, response in jobs]


def play(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    evaluator: Evaluator,
    starts: Sequence[Start],
    settings: RolloutSettings,
    seed: int,
    reward_config: RewardConfig,
    write_feedback: Callable[[Verdict], str],
) -> list[Trajectory]:
    """One trajectory per start, in order. Sampling seeds derive from (seed, turn) and each prompt.

    ValueError when a task's own prompt is longer than the limit: a task is never cut.
    """
    limit = prompt_limit(model, settings)
    prompts: dict[str, list[int]] = {}
    trajectories = []
    for start in starts:
        key = repr(start.messages)
        if key not in prompts:
            prompts[key] = encode_prompt(tokenizer, start.messages)
            if len(prompts[key]) > limit:
                raise ValueError(
                    f"task {start.task.id}: its prompt has {len(prompts[key])} tokens, the limit is {limit}; "
                    "leave the task out, raise max_prompt_tokens or lower max_new_tokens"
                )
        trajectories.append(Trajectory(start, prompts[key]))
    open_rows = [(trajectory, trajectory.prompt_ids) for trajectory in trajectories]
    turn = 0
    while open_rows:
        samples = sample_responses(
            model,
            tokenizer,
            [prompt for _, prompt in open_rows],
            settings.temperature,
            settings.top_p,
            settings.max_new_tokens,
            stable_seed(seed, turn),
            batch_size=settings.batch_size,
        )
        jobs = [(t.start.task, sample.text) for (t, _), sample in zip(open_rows, samples, strict=True)]
        verdicts = verify_distinct(evaluator, jobs)
        turn += 1
        still_open = []
        for (trajectory, _), sample, verdict in zip(open_rows, samples, verdicts, strict=True):
            is_infra = verdict.kind == "infra"
            score = None if is_infra else reward(verdict, reward_config)
            text = "" if is_infra or verdict.success else write_feedback(verdict)
            trajectory.turns.append(Turn(sample, verdict, score, text))
            if not is_infra and not verdict.success and turn < trajectory.start.max_turns:
                prompt = _next_prompt(tokenizer, trajectory, limit, settings.backend)
                if prompt is not None:
                    still_open.append((trajectory, prompt))
        open_rows = still_open
    return trajectories


def _next_prompt(
    tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory, limit: int, backend: str
) -> list[int] | None:
    attempts = [(turn.sample.text, turn.feedback) for turn in trajectory.turns]
    messages = fit_repair(tokenizer, trajectory.start.task, attempts, limit, backend)
    return None if messages is None else encode_prompt(tokenizer, messages)
