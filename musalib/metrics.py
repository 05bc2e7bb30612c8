"""What is reported about a policy: pass@k, avg@k, faster rate, first and best turn, intervals over tasks.

`P` tasks, `k` samples per task. An empty input has no mean and raises ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from musalib.checks import number, share, whole
from musalib.reward import success
from musalib.stabilizers.prime_echo import turn_scores
from musalib.verdict import Verdict

FASTER_THRESHOLD = 1.1


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate for one task: chance that k of its n samples, of which c pass, include a pass.

    1 - C(n-c, k) / C(n, k). With n = k it is simply "any of k". Average it over tasks.

    >>> pass_at_k(n=4, c=1, k=2)
    0.5
    """
    n, c, k = whole("n", n, at_least=1), whole("c", c), whole("k", k, at_least=1)
    if c > n:
        raise ValueError(f"c counts passes among the n samples and must be <= n = {n}, got {c}")
    if k > n:
        raise ValueError(f"k must be <= the number of samples n = {n}, got {k}; draw more samples or lower k")
    draws = math.comb(n, k)
    return (draws - math.comb(n - c, k)) / draws


def avg_at_k(successes: Sequence[bool] | Sequence[Sequence[bool]], k: int | None = None) -> float:
    """Mean over tasks of the share of samples that pass; `successes` is [k] for one task or P rows of [k].

    `k`, if given, is the number of samples that every task must have, so that a missing one is noticed.
    Rows may otherwise differ in length: each task counts once.
    """
    rows = successes.tolist() if hasattr(successes, "tolist") else list(successes)
    if rows and not any(hasattr(row, "__len__") for row in rows):
        rows = [rows]
    rates = []
    for task, row in enumerate(rows):
        if not hasattr(row, "__len__"):
            raise ValueError(f"every task needs a list of samples, got {row!r} for task {task}")
        if len(row) == 0 or (k is not None and len(row) != whole("k", k, at_least=1)):
            raise ValueError(f"task {task} has {len(row)} samples, expected {k or 'at least 1'}")
        passes = [number(f"a sample of task {task}", value) for value in row]
        if any(value not in (0.0, 1.0) for value in passes):
            raise ValueError(f"samples pass or fail: task {task} holds a value other than 0 and 1")
        rates.append(sum(passes) / len(passes))
    return mean(rates, "tasks")


def faster_rate(
    verdicts: Iterable[Verdict | Mapping[str, Any]], threshold: float = FASTER_THRESHOLD
) -> float:
    """Share of ALL candidates that are correct, legal and strictly more than `threshold` times the baseline.

    Takes verdicts or records with their fields. A wrong or untimed candidate counts as not faster; an
    infra verdict is no candidate's and is left out.
    """
    threshold = number("threshold", threshold)
    records = [v.to_dict() if isinstance(v, Verdict) else v for v in verdicts]
    judged = [record for record in records if kind_of(record) != "infra"]
    return mean([is_faster(record, threshold) for record in judged], "candidates")


def kind_of(record: Mapping[str, Any]) -> str:
    if not isinstance(record.get("category"), str):
        raise ValueError(f"a verdict record needs a 'category' string, got {sorted(record)}")
    return record["category"].partition(":")[0]


def is_faster(record: Mapping[str, Any], threshold: float) -> bool:
    """A contradictory verdict (`ok`, yet not legal) is not counted, as in `reward`."""
    refused = any(record.get(name) is False for name in ("compiled", "correct", "legal"))
    speedup = record.get("speedup")
    return kind_of(record) == "ok" and not refused and speedup is not None and bool(speedup > threshold)


def turns_to_success(scores: Sequence[float]) -> int | None:
    """Number, from 1, of the first turn of a trajectory that passes (s >= 1); None if none does."""
    return next((turn for turn, score in enumerate(turn_scores(scores), 1) if success(score)), None)


def first_turn_accuracy(trajectories: Iterable[Sequence[float]]) -> float:
    """Acc_first, Eq. 23: share of trajectories (scores s_1..s_K each) whose first turn passes."""
    return mean([success(turn_scores(scores)[0]) for scores in trajectories], "trajectories")


def best_turn_accuracy(trajectories: Iterable[Sequence[float]]) -> float:
    """Acc_best, Eq. 24: share of trajectories of which any turn passes."""
    return mean([success(max(turn_scores(scores))) for scores in trajectories], "trajectories")


def first_turn_score(trajectories: Iterable[Sequence[float]]) -> float:
    """S_first, Eq. 25: mean of s_1."""
    return mean([turn_scores(scores)[0] for scores in trajectories], "trajectories")


def best_turn_score(trajectories: Iterable[Sequence[float]]) -> float:
    """S_best, Eq. 25: mean of max_k s_k."""
    return mean([max(turn_scores(scores)) for scores in trajectories], "trajectories")


def mean(values: Sequence[float], of: str) -> float:
    if not values:
        raise ValueError(f"no {of} given: a share of nothing is undefined")
    return float(np.mean(values))


@dataclass(frozen=True)
class Interval:
    """A mean over tasks with the ends of its bootstrap percentile interval."""

    mean: float
    low: float
    high: float


def bootstrap_interval(
    values: Mapping[Hashable, float] | Sequence[float],
    strata: Mapping[Hashable, Hashable] | Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile interval of the mean of one value per task (e.g. its pass@8), by task or in order.

    Tasks are resampled, so the samples of a task stay together. With `strata` (a level per task) they are
    resampled within each level, which keeps the mix of levels fixed. Same seed, same interval.
    """
    keys, numbers = by_task(values)
    means = resampled_means(numbers, labels(strata, keys), whole("resamples", resamples, at_least=1), seed)
    tail = (1.0 - share("confidence", confidence)) / 2.0
    low, high = np.quantile(means, [tail, 1.0 - tail])
    return Interval(float(numbers.mean()), float(low), float(high))


def paired_bootstrap(
    before: Mapping[Hashable, float] | Sequence[float],
    after: Mapping[Hashable, float] | Sequence[float],
    strata: Mapping[Hashable, Hashable] | Sequence[Hashable] | None = None,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Interval of mean(after - before) over the same tasks of two runs; an interval above 0 is a gain.

    Both runs are given alike: mappings by task (any order) or sequences in the same order of tasks.
    """
    keys_before, values_before = by_task(before)
    keys_after, values_after = by_task(after)
    if set(keys_before) != set(keys_after):
        only = sorted(map(str, set(keys_before) ^ set(keys_after)))
        raise ValueError(
            f"a paired comparison needs the same tasks in both runs; only in one: {', '.join(only[:5])}"
        )
    position = {key: i for i, key in enumerate(keys_after)}
    paired_after = values_after[[position[key] for key in keys_before]]
    gain = dict(zip(keys_before, paired_after - values_before, strict=True))
    return bootstrap_interval(gain, labels(strata, keys_before), confidence, resamples, seed)


def by_task(values: Mapping[Hashable, float] | Sequence[float]) -> tuple[list[Hashable], np.ndarray]:
    """Task keys (positions for a sequence) and finite values."""
    keys = list(values) if isinstance(values, Mapping) else list(range(len(values)))
    numbers = [values[key] for key in keys] if isinstance(values, Mapping) else list(values)
    if not keys:
        raise ValueError("no tasks given: an interval over nothing is undefined")
    array = np.array(
        [number(f"value of task {key}", value) for key, value in zip(keys, numbers, strict=True)]
    )
    if not np.isfinite(array).all():
        raise ValueError("values per task must be finite")
    return keys, array


def labels(
    strata: Mapping[Hashable, Hashable] | Sequence[Hashable] | None, keys: Sequence[Hashable]
) -> list[Hashable]:
    """The stratum of each task in the order of `keys`; one common stratum by default."""
    if strata is None:
        return [None] * len(keys)
    if isinstance(strata, Mapping):
        if missing := [str(key) for key in keys if key not in strata]:
            raise ValueError(f"strata must name a level for every task; missing: {', '.join(missing[:5])}")
        return [strata[key] for key in keys]
    if len(strata) != len(keys):
        raise ValueError(f"strata must have one entry per task ({len(keys)}), got {len(strata)}")
    return list(strata)


def resampled_means(
    values: np.ndarray, stratum_of_task: Sequence[Hashable], resamples: int, seed: int
) -> np.ndarray:
    """Means of `resamples` draws with replacement, each stratum keeping its own number of tasks."""
    rng = np.random.default_rng(seed)
    members: dict[Hashable, list[int]] = {}
    for task, stratum in enumerate(stratum_of_task):
        members.setdefault(stratum, []).append(task)
    totals = np.zeros(resamples)
    for tasks in members.values():
        totals += values[rng.choice(tasks, size=(resamples, len(tasks)))].sum(axis=1)
    return totals / len(values)
