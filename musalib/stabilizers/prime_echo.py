"""PrimeEcho (Eq. 9-12): pay a multi-turn trajectory mostly for its first answer, partly for its best one."""

from __future__ import annotations

from collections.abc import Sequence

from musalib.checks import number, share
from musalib.reward import success

BETA1 = 0.15  # undisclosed; chosen here
BETA2 = 0.08  # undisclosed; chosen here


def prime_echo(
    scores: Sequence[float], alpha: float = 0.75, beta1: float = BETA1, beta2: float = BETA2
) -> float:
    """R = alpha * s_1 + (1 - alpha) * max_k s_k + b_early for the scores s_1..s_K of one trajectory, K >= 1.

    alpha = 1 is the first-turn reward and alpha = 0 the best-turn reward, both with the early bonus.
    R is then normalised within its group exactly like a single-turn reward (`group_advantages`).

    >>> prime_echo([-1.0, 1.0])
    -0.42
    """
    scores = turn_scores(scores)
    alpha = share("alpha", alpha)
    return alpha * scores[0] + (1.0 - alpha) * max(scores) + early_bonus(scores, beta1, beta2)


def early_bonus(scores: Sequence[float], beta1: float = BETA1, beta2: float = BETA2) -> float:
    """b_early, Eq. 11-12: beta1 when turn 1 passes, beta2 when turn 2 is the first to pass, else 0."""
    scores = turn_scores(scores)
    beta1, beta2 = number("beta1", beta1), number("beta2", beta2)
    if not beta1 > beta2 >= 0.0 or beta1 == float("inf"):
        raise ValueError(f"the early bonus needs finite beta1 > beta2 >= 0, got beta1={beta1}, beta2={beta2}")
    if success(scores[0]):
        return beta1
    return beta2 if len(scores) > 1 and success(scores[1]) else 0.0


def turn_scores(scores: Sequence[float]) -> list[float]:
    """The scores of one trajectory as finite floats; at least one turn."""
    try:
        values = [number(f"score of turn {turn}", score) for turn, score in enumerate(scores, 1)]
    except TypeError:
        raise ValueError(f"scores must be a sequence s_1..s_K, got {scores!r}") from None
    if not values:
        raise ValueError("a trajectory needs at least one turn (K >= 1), got no scores")
    for turn, value in enumerate(values, 1):
        if abs(value) == float("inf"):
            raise ValueError(f"score of turn {turn} must be finite, got {value}")
    return values
