"""From a verdict to the number the policy is trained on: Eq. 2, success (Eq. 22), group advantages (Eq. 3).

`P` tasks, `G` candidates per task.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from musalib.checks import not_negative, number, share, whole
from musalib.verdict import Verdict

if TYPE_CHECKING:  # imported where it is used: judging a candidate should not wait for it
    import torch

FAILED = -1.0  # extraction, compilation or execution failed, nothing passed, or the work was borrowed
WRONG_KINDS = {"extract_error", "compile_error", "runtime_error", "cheating"}


@dataclass(frozen=True)
class RewardConfig:
    """lambda and nu_max of Eq. 2. The paper discloses neither: both defaults are ours, not the paper's."""

    speed_weight: float = 0.5  # lambda; undisclosed, chosen here; 0 makes rewards independent of timing noise
    speedup_cap: float = 4.0  # nu_max, bounds nu - 1; undisclosed, chosen here

    def __post_init__(self) -> None:
        for name in ("speed_weight", "speedup_cap"):
            object.__setattr__(self, name, not_negative(name, getattr(self, name)))


def reward(verdict: Verdict, config: RewardConfig | None = None) -> float:
    """Correctness-first score s(c), Eq. 2: no speed is worth a wrong or borrowed answer.

    Reads only `compiled, correct, legal, q, speedup, category`. A cheating finding gives -1 also when
    0 < q < 1. Fields left at None follow from the category; where fields contradict each other the worst
    of them counts. A correct candidate that was not timed earns 1.

    An `infra` verdict says nothing about the candidate, so it has no reward: the result is NaN, which
    `group_advantages` leaves out of the group. A verdict without a usable speedup (NaN, inf, negative)
    raises ValueError.

    >>> reward(Verdict("ok", compiled=True, correct=True, legal=True, q=1.0, speedup=3.0))
    2.0
    >>> reward(Verdict("correctness_error:values", compiled=True, correct=False, q=0.5))
    -0.25
    """
    config = config or RewardConfig()
    kind = verdict.category.partition(":")[0]
    if kind == "infra":
        return math.nan
    if kind in WRONG_KINDS or verdict.compiled is False or verdict.legal is False:
        return FAILED
    passed = pass_share(verdict)
    if passed == 0.0:
        return FAILED
    if passed < 1.0:
        return -0.5 + 0.5 * passed
    if kind != "ok" or verdict.correct is False:
        return FAILED  # every trial passed and yet the judge refused it: worth no partial credit
    return 1.0 + config.speed_weight * min(max(speedup(verdict) - 1.0, 0.0), config.speedup_cap)


def pass_share(verdict: Verdict) -> float:
    """q of Eq. 2; where a verdict leaves it out, all or nothing by its category."""
    if verdict.q is None:
        return float(verdict.category == "ok" and verdict.correct is not False)
    return share("q", verdict.q)


def speedup(verdict: Verdict) -> float:
    """nu of Eq. 2, reference time / candidate time; 1 where timing was switched off."""
    return 1.0 if verdict.speedup is None else not_negative("speedup", verdict.speedup)


def success(score: float) -> bool:
    """1[s >= 1], Eq. 22: compiled, correct and legal, at whatever speed."""
    return number("a score (infra verdicts have none: leave them out first)", score) >= 1.0


def group_advantages(
    rewards: Sequence[float] | Sequence[Sequence[float]] | torch.Tensor,
    eps: float = 1e-4,  # undisclosed; TRL's value
    correction: int = 1,
) -> torch.Tensor:
    """(r - mean) / (std + eps) within each group, Eq. 3; same shape as `rewards`, which is [G] or [P, G].

    std is the sample standard deviation (divides by G - 1, as TRL and verl do); `correction=0` gives the
    population's. NaN marks a sample without a verdict: it gets advantage 0 and does not enter mean or std;
    mask its tokens as well, so that it leaves the loss. A group of equal rewards, or with fewer than two
    of them, gives exact zeros.
    """
    import torch

    eps = not_negative("eps", eps)
    if whole("correction", correction) > 1:
        raise ValueError(f"correction must be 1 (sample std) or 0 (population std), got {correction}")
    values = torch.as_tensor(rewards)
    if values.dim() not in (1, 2):
        raise ValueError(f"rewards must have shape [G] or [P, G], got {list(values.shape)}")
    if torch.isinf(values).any():
        raise ValueError("rewards must be finite, or NaN for a sample without a verdict; got inf")
    dtype = values.dtype if values.is_floating_point() else torch.get_default_dtype()
    values_PG = values.detach().double()
    known_PG = ~torch.isnan(values_PG)
    count_P1 = known_PG.sum(-1, keepdim=True)
    centred_PG = values_PG - values_PG.nansum(-1, keepdim=True) / count_P1.clamp(min=1)
    centred_PG = torch.where(known_PG, centred_PG, 0.0)
    std_P1 = (centred_PG.square().sum(-1, keepdim=True) / (count_P1 - correction).clamp(min=1)).sqrt()
    # equal rewards leave a rounding residue in the mean that a tiny eps would blow up to a signal
    differ_P1 = spread(values_PG, known_PG) > 0
    scaled_PG = centred_PG / torch.where(differ_P1, std_P1 + eps, 1.0)
    return torch.where(differ_P1, scaled_PG, 0.0).to(dtype)


def spread(values_PG: torch.Tensor, known_PG: torch.Tensor) -> torch.Tensor:
    """Largest minus smallest known value of each group, [P, 1]; 0 where there are none."""
    import torch

    if values_PG.shape[-1] == 0:
        return values_PG.new_zeros((*values_PG.shape[:-1], 1))
    high_P1 = torch.where(known_PG, values_PG, -math.inf).amax(-1, keepdim=True)
    low_P1 = torch.where(known_PG, values_PG, math.inf).amin(-1, keepdim=True)
    return (high_P1 - low_P1).clamp(min=0.0)
