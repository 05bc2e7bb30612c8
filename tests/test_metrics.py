"""pass@k, avg@k, faster rate, turn metrics and intervals against values counted by hand."""

import doctest
import importlib
import itertools
import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from musalib.metrics import (
    avg_at_k,
    best_turn_accuracy,
    best_turn_score,
    bootstrap_interval,
    faster_rate,
    first_turn_accuracy,
    first_turn_score,
    paired_bootstrap,
    pass_at_k,
    turns_to_success,
)
from musalib.verdict import Verdict


@given(st.integers(1, 7).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_counts_the_draws(case):
    n, c, k = case
    draws = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(8, 0, 8) == 0.0
    assert pass_at_k(8, 1, 8) == 1.0  # n = k: any of eight
    assert pass_at_k(8, 3, 1) == 3 / 8
    assert pass_at_k(5, 2, 3) == 1 - 1 / 10
    assert pass_at_k(np.int64(200), np.int64(1), 100) == 0.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 3, 9), "k must be <= the number of samples n = 8"),
        ((8, 9, 1), "c counts passes"),
        ((8, -1, 1), "c must be >= 0"),
        ((0, 0, 1), "n must be >= 1"),
        ((8, 3, 0), "k must be >= 1"),
        ((8, 3.5, 1), "c must be a whole number"),
        ((8, math.nan, 1), "c must be a whole number"),
    ],
)
def test_pass_at_k_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        pass_at_k(*arguments)


def test_avg_at_k():
    assert avg_at_k([True, False, False, True]) == 0.5
    assert avg_at_k([[1, 1], [0, 1]], k=2) == 0.75
    assert avg_at_k(np.array([[True, False], [False, False]])) == 0.25
    assert avg_at_k([[1, 1, 1, 1], [0]]) == 0.5  # each task counts once


@pytest.mark.parametrize(
    ("successes", "k", "message"),
    [
        ([], None, "no tasks"),
        ([[1, 0], []], None, "task 1 has 0 samples"),
        ([[1, 0], [1]], 2, "task 1 has 1 samples, expected 2"),
        ([0.5, 1.0], None, "other than 0 and 1"),
        ([1, math.nan], None, "NaN"),
        ([[1], 0], None, "list of samples"),
    ],
)
def test_avg_at_k_refuses(successes, k, message):
    with pytest.raises(ValueError, match=message):
        avg_at_k(successes, k)


def test_faster_rate_is_strict_and_over_all_candidates():
    def ok(speedup, **fields):
        return Verdict("ok", compiled=True, correct=True, legal=True, q=1.0, speedup=speedup, **fields)

    verdicts = [
        ok(1.2),
        ok(1.1),  # not above
        ok(None),  # not timed
        ok(0.9),
        Verdict("correctness_error:values", compiled=True, correct=False, q=0.9, speedup=3.0),
        Verdict("cheating:disallowed_aten", compiled=True, correct=True, legal=False, q=1.0, speedup=9.0),
        Verdict("compile_error:cpp", compiled=False),
        ok(5.0),
    ]
    assert faster_rate(verdicts) == 2 / 8
    assert faster_rate(verdicts, threshold=0.8) == 4 / 8
    assert faster_rate([v.to_dict() for v in verdicts]) == 2 / 8
    assert faster_rate([{"category": "cheating:decoy", "speedup": 2.0}]) == 0.0
    assert faster_rate([*verdicts, Verdict("infra:lost"), Verdict("infra:lost")]) == 2 / 8
    assert faster_rate([{"category": "ok", "speedup": 2.0}, {"category": "ok", "speedup": math.nan}]) == 0.5
    assert (
        faster_rate([Verdict("ok", legal=False, speedup=2.0), Verdict("ok", correct=False, speedup=2.0)])
        == 0.0
    )


def test_faster_rate_refuses():
    with pytest.raises(ValueError, match="no candidates"):
        faster_rate([Verdict("infra:lost")])
    with pytest.raises(ValueError, match="category"):
        faster_rate([{"speedup": 2.0}])


def test_turn_metrics_by_hand():
    trajectories = [[1.5], [-1.0, 2.0], [-1.0, -0.25, -0.5], [-0.5, -1.0, 1.0]]
    assert first_turn_accuracy(trajectories) == 1 / 4
    assert best_turn_accuracy(trajectories) == 3 / 4
    assert first_turn_score(trajectories) == pytest.approx((1.5 - 1.0 - 1.0 - 0.5) / 4)
    assert best_turn_score(trajectories) == pytest.approx((1.5 + 2.0 - 0.25 + 1.0) / 4)
    assert [turns_to_success(t) for t in trajectories] == [1, 2, None, 3]


@given(st.lists(st.lists(st.floats(-1, 3), min_size=1, max_size=3), min_size=1, max_size=6))
def test_best_turn_is_never_worse_than_the_first(trajectories):
    assert first_turn_accuracy(trajectories) <= best_turn_accuracy(trajectories)
    assert first_turn_score(trajectories) <= best_turn_score(trajectories) + 1e-12
    solved = sum(turns_to_success(t) is not None for t in trajectories)
    assert best_turn_accuracy(trajectories) == pytest.approx(solved / len(trajectories))


@pytest.mark.parametrize(
    "metric", [first_turn_accuracy, best_turn_accuracy, first_turn_score, best_turn_score]
)
def test_turn_metrics_refuse(metric):
    with pytest.raises(ValueError, match="no trajectories"):
        metric([])
    with pytest.raises(ValueError, match="at least one turn"):
        metric([[1.0], []])
    with pytest.raises(ValueError, match="turn 1 must be a number, got NaN"):
        metric([[math.nan]])


def test_interval_matches_the_exact_binomial():
    # 0/1 outcomes: the bootstrap mean is Binomial(20, 0.5) / 20, whose 2.5 % and 97.5 % points are 6 and 14
    interval = bootstrap_interval([0.0, 1.0] * 10, resamples=20_000)
    assert interval.mean == 0.5
    assert (interval.low, interval.high) == pytest.approx((0.3, 0.7))
    narrower = bootstrap_interval([0.0, 1.0] * 10, confidence=0.5, resamples=20_000)
    assert interval.low < narrower.low < 0.5 < narrower.high < interval.high


def test_strata_are_resampled_within_themselves():
    values = [0.0] * 5 + [1.0] * 15
    levels = ["hard"] * 5 + ["easy"] * 15
    within = bootstrap_interval(values, strata=levels)
    assert (within.low, within.mean, within.high) == (0.75, 0.75, 0.75)
    assert bootstrap_interval(values).low < 0.75
    by_task = {f"t{i}": v for i, v in enumerate(values)}
    level_of = dict(zip(by_task, levels, strict=True))
    mixed = bootstrap_interval(dict(reversed(by_task.items())), strata=level_of)
    assert (mixed.low, mixed.high) == (0.75, 0.75)


def test_one_task_has_a_point_interval_and_seeds_repeat():
    alone = bootstrap_interval([0.25])
    assert (alone.low, alone.mean, alone.high) == (0.25, 0.25, 0.25)
    values = list(np.random.default_rng(0).random(30))
    assert bootstrap_interval(values, seed=3) == bootstrap_interval(values, seed=3)
    assert bootstrap_interval(values, seed=3) != bootstrap_interval(values, seed=4)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=30)
def test_interval_stays_within_the_values(values):
    interval = bootstrap_interval(values, resamples=200)
    assert min(values) - 1e-9 <= interval.low <= interval.high <= max(values) + 1e-9


def test_pairing_removes_what_tasks_share():
    difficulty = np.linspace(0, 0.9, 40)
    before = {f"t{i}": value for i, value in enumerate(difficulty)}
    after = {name: value + 0.1 for name, value in reversed(before.items())}
    gain = paired_bootstrap(before, after)
    assert (gain.low, gain.mean, gain.high) == pytest.approx((0.1, 0.1, 0.1))
    assert paired_bootstrap(after, before).mean == pytest.approx(-0.1)
    unpaired = bootstrap_interval(list(after.values()))
    assert unpaired.high - unpaired.low > 0.1
    assert paired_bootstrap([0.0, 1.0], [1.0, 1.0], resamples=500).mean == 0.5


def test_paired_strata_follow_the_tasks():
    before = {"a": 0.0, "b": 0.0, "c": 0.0, "d": 0.0}
    after = {"d": 1.0, "c": 1.0, "b": 0.0, "a": 0.0}
    gain = paired_bootstrap(before, after, strata={"a": 1, "b": 1, "c": 2, "d": 2})
    assert (gain.low, gain.mean, gain.high) == (0.5, 0.5, 0.5)
    assert paired_bootstrap(before, after).low < 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bootstrap_interval([]), "no tasks"),
        (lambda: bootstrap_interval([math.nan]), "value of task 0"),
        (lambda: bootstrap_interval([math.inf]), "finite"),
        (lambda: bootstrap_interval([1.0], confidence=95), "did you mean 0.95"),
        (lambda: bootstrap_interval([1.0], resamples=0), "resamples"),
        (lambda: bootstrap_interval([1.0], strata=[1, 2]), "one entry per task"),
        (lambda: bootstrap_interval({"a": 1.0}, strata={"b": 1}), "missing: a"),
        (lambda: paired_bootstrap({"a": 1.0}, {"b": 1.0}), "only in one: a, b"),
        (lambda: paired_bootstrap([1.0], [1.0, 2.0]), "same tasks"),
    ],
)
def test_intervals_refuse(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "name",
    ["musalib.metrics", "musalib.reward", "musalib.stabilizers.prime_echo", "musalib.stabilizers.mirror_pop"],
)
def test_docstring_examples_are_true(name):
    importlib.import_module(name)
    result = doctest.testmod(sys.modules[name])  # a function may hide its module's name in the package
    assert result.attempted > 0 and result.failed == 0
