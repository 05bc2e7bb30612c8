"""Buffered Dynamic Retry (Eq. 13-16): failed groups come back later as repair tasks.

A group of which nothing passed teaches nothing by itself, because all its advantages are 0. One of its
candidates and the verifier's feedback on it go into a FIFO buffer, from which later training prompts are drawn
with a small probability. All response tokens of such a sample are trained.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from musalib.checks import number, share, whole

TRIGGERS = ("all_failed", "no_positive")
# how far a candidate got; a numeric mismatch is the easiest to repair
PROGRESS = ("extract_error", "compile_error", "cheating", "runtime_error", "correctness_error")


@dataclass(frozen=True)
class RetryGroup:
    """One rollout group: the prompt (JSON-able) and, per candidate, text, reward, feedback, maybe category."""

    task: Any
    candidates: Sequence[str]
    rewards: Sequence[float]
    feedback: Sequence[str]
    categories: Sequence[str] | None = None

    def __post_init__(self) -> None:
        sizes = {
            "candidates": len(self.candidates),
            "rewards": len(self.rewards),
            "feedback": len(self.feedback),
        }
        if self.categories is not None:
            sizes["categories"] = len(self.categories)
        if len(set(sizes.values())) != 1:
            raise ValueError(f"a retry group needs one entry per candidate everywhere, got {sizes}")

    @classmethod
    def from_record(cls, record: RetryGroup | Mapping[str, Any]) -> RetryGroup:
        if isinstance(record, RetryGroup):
            return record
        names = [f.name for f in dataclasses.fields(cls)]
        if not isinstance(record, Mapping) or (missing := [n for n in names[:4] if n not in record]):
            what = f"; {', '.join(missing)} missing" if isinstance(record, Mapping) else f", got {record!r}"
            raise ValueError(f"a retry group has {', '.join(names[:4])}{what}")
        return cls(**{name: record[name] for name in names if name in record})


@dataclass(frozen=True)
class RetryTask:
    """x' = Compose(x, c-, f-) of Eq. 15, not yet rendered: task, failed candidate, feedback on it."""

    task: Any
    candidate: str
    feedback: str


class BufferedRetry:
    """FIFO buffer of repair tasks with its own reproducible draws.

    `observe(group)` after each rollout group, `draw(prompts)` before each batch. Draws depend only on the seed,
    on how often `draw` was called and on the buffer, so that `state_dict()` is small, JSON-able and resumes exactly.
    Entries stay until newer ones push them out, and are drawn uniformly.
    """

    def __init__(
        self,
        capacity: int = 64,  # undisclosed; chosen here
        p_buf: float = 0.1,  # undisclosed; chosen here
        seed: int = 0,
        trigger: str = "all_failed",
        start_step: int = 0,
    ) -> None:
        """`trigger`: "all_failed" (every r = -1, Eq. 13) or "no_positive" (the wording of section 4.5).

        `start_step`: number of `draw` calls that return their prompts unchanged; early use disturbs learning.
        """
        self.capacity = whole("capacity", capacity, at_least=1)
        self.p_buf = share("p_buf", p_buf)
        self.seed = whole("seed", seed)
        if trigger not in TRIGGERS:
            raise ValueError(f"trigger must be one of {', '.join(TRIGGERS)}, got {trigger!r}")
        self.trigger = trigger
        self.start_step = whole("start_step", start_step)
        self.step = 0
        self.entries: deque[RetryTask] = deque(maxlen=self.capacity)

    def __len__(self) -> int:
        return len(self.entries)

    def observe(self, group: RetryGroup | Mapping[str, Any]) -> RetryTask | None:
        """Buffer a repair task if the group failed as a whole; returns it, or None.

        NaN rewards (infra verdicts) are left out; a group of nothing else is no failure. A task that is itself
        a RetryTask is retried from its original task, with the newer candidate.
        """
        group = RetryGroup.from_record(group)
        judged = [i for i, r in enumerate(group.rewards) if not math.isnan(float(r))]
        if not judged or not all(self.failed(float(group.rewards[i])) for i in judged):
            return None
        chosen = furthest(group, judged)
        task = group.task.task if isinstance(group.task, RetryTask) else group.task
        entry = RetryTask(task, group.candidates[chosen], group.feedback[chosen])
        check_json(entry)
        self.entries.append(entry)
        return entry

    def failed(self, reward: float) -> bool:
        """Whether this reward fits the trigger; the slack covers -1 put together by PrimeEcho."""
        return reward <= 0.0 if self.trigger == "no_positive" else reward <= -1.0 + 1e-9

    def draw(self, prompts: Sequence[Any]) -> list[Any]:
        """Prompts in order, each replaced with probability p_buf by a RetryTask from the buffer."""
        # a generator per call: nothing but the call count has to be saved
        rng = random.Random(f"buffered-retry:{self.seed}:{self.step}")
        self.step += 1
        if self.step <= self.start_step or not self.entries:
            return list(prompts)
        return [rng.choice(self.entries) if rng.random() < self.p_buf else prompt for prompt in prompts]

    def state_dict(self) -> dict[str, Any]:
        """Everything a resumed run needs besides the constructor's arguments; JSON-able."""
        return {
            "seed": self.seed,
            "step": self.step,
            "entries": [
                {"task": e.task, "candidate": e.candidate, "feedback": e.feedback} for e in self.entries
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue where `state_dict` was taken; a smaller capacity keeps the newest entries."""
        if missing := [name for name in ("seed", "step", "entries") if name not in state]:
            raise ValueError(f"this is no state of a BufferedRetry: {', '.join(missing)} missing")
        try:
            entries = [RetryTask(**entry) for entry in state["entries"]]
        except TypeError as error:
            raise ValueError(f"an entry of the retry buffer is unreadable: {error}") from None
        self.seed, self.step = whole("seed", state["seed"]), whole("step", state["step"])
        self.entries = deque(entries, maxlen=self.capacity)


def furthest(group: RetryGroup, judged: Sequence[int]) -> int:
    """The failed candidate c- to repair: highest reward, then the category closest to correct, then the first.

    The paper leaves this choice open; it is ours.
    """

    def rank(i: int) -> tuple[float, int]:
        kind = group.categories[i].partition(":")[0] if group.categories is not None else ""
        return number("reward", group.rewards[i]), PROGRESS.index(kind) if kind in PROGRESS else -1

    return max(judged, key=rank)


def check_json(entry: RetryTask) -> None:
    """Refuse at the door what the next checkpoint could not write."""
    try:
        json.dumps(dataclasses.asdict(entry))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"a retry task must be JSON-able ({error}); pass a record such as task.to_dict()"
        ) from None
