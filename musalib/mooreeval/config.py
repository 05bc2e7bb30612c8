"""How candidates are judged."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from musalib.reward import RewardConfig


@dataclass(frozen=True)
class EvalConfig:
    """How candidates are judged. Every default is ours: the paper discloses none of them."""

    trials: int = 5  # random inputs per candidate; at least one per input group
    timeout_s: float = 10.0  # import, constructor, each trial, the whole timing
    build_timeout_s: float = 120.0
    timing: bool = True
    timing_pairs: int = 10
    speedup_cap: float = 100.0  # beyond this the clock was fooled: `cheating:excessive_speedup`
    seed: int | None = None  # None: fresh secret seeds; an int makes verdicts reproducible
    workers: int | None = None  # None: one per core
    store: str | Path | None = None  # file of the verdict store
    build: str = (
        "tiered"  # "plain": torch's own load_inline for every candidate, the baseline of the benchmarks
    )
    isolate: bool = True
    memory_bytes: int = 16 << 30  # address space of one job
    reward: RewardConfig = field(default_factory=RewardConfig)

    def __post_init__(self) -> None:
        if self.trials < 1:
            raise ValueError(f"trials must be at least 1, got {self.trials}")
        for name in ("timeout_s", "build_timeout_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be a positive number of seconds, got {getattr(self, name)}")
        if self.build not in ("tiered", "plain"):
            raise ValueError(f"build must be 'tiered' or 'plain', got {self.build!r}")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers must be at least 1 or None, got {self.workers}")
