"""Eq. 2, Eq. 3 and Eq. 22 by hand-computed cases and by property."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from musalib.reward import RewardConfig, group_advantages, reward, success
from musalib.verdict import CATEGORIES, Verdict

CONFIG = RewardConfig(speed_weight=0.5, speedup_cap=4.0)
rewards_lists = st.lists(st.floats(-1, 3, width=32), min_size=2, max_size=12)


def passed(speedup=None, **changes):
    return Verdict("ok", compiled=True, correct=True, legal=True, q=1.0, speedup=speedup, **changes)


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (Verdict("extract_error"), -1.0),
        (Verdict("compile_error:cpp", compiled=False), -1.0),
        (Verdict("runtime_error:timeout", compiled=True), -1.0),
        (Verdict("runtime_error:timeout", compiled=True, q=0.8), -1.0),
        (Verdict("correctness_error:shape", compiled=True, correct=False, q=0.0), -1.0),
        (Verdict("correctness_error:values", compiled=True, correct=False, q=0.2), -0.4),
        (Verdict("correctness_error:values", compiled=True, correct=False, q=0.5, speedup=9.0), -0.25),
        (Verdict("correctness_error:values", compiled=True, correct=False, q=0.8), -0.1),
        (passed(speedup=0.5), 1.0),
        (passed(speedup=1.0), 1.0),
        (passed(speedup=2.0), 1.5),
        (passed(speedup=5.0), 3.0),
        (passed(speedup=50.0), 3.0),
        (passed(speedup=None), 1.0),
    ],
)
def test_reward_ladder(verdict, expected):
    assert reward(verdict, CONFIG) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("q", [None, 0.0, 0.4, 1.0])
@pytest.mark.parametrize("category", ["cheating:disallowed_aten", "cheating:excessive_speedup", "cheating"])
def test_cheating_is_minus_one_at_every_pass_share(category, q):
    verdict = Verdict(category, compiled=True, correct=q == 1.0, legal=False, q=q, speedup=30.0)
    assert reward(verdict, CONFIG) == -1.0


def test_illegal_is_minus_one_whatever_the_category_says():
    for category in ("ok", "correctness_error:values"):
        assert reward(Verdict(category, compiled=True, legal=False, q=0.5), CONFIG) == -1.0
    assert reward(dataclasses.replace(passed(2.0), legal=False), CONFIG) == -1.0


def test_contradictions_count_at_their_worst():
    assert reward(dataclasses.replace(passed(2.0), compiled=False), CONFIG) == -1.0
    assert reward(dataclasses.replace(passed(2.0), correct=False), CONFIG) == -1.0
    assert reward(dataclasses.replace(passed(2.0), q=0.5), CONFIG) == -0.25
    # every trial passed, yet refused (e.g. for a precision downgrade): no partial credit
    assert reward(Verdict("correctness_error:precision", compiled=True, correct=False, q=1.0), CONFIG) == -1.0


def test_fields_left_out_follow_from_the_category():
    assert reward(Verdict("ok"), CONFIG) == 1.0
    assert reward(Verdict("ok", correct=False), CONFIG) == -1.0
    assert reward(Verdict("correctness_error:values"), CONFIG) == -1.0
    assert reward(Verdict("correctness_error:values", q=1.0), CONFIG) == -1.0
    assert (
        reward(Verdict("cheating:decoy", q=1.0), CONFIG) == reward(Verdict("cheating", q=0.5), CONFIG) == -1.0
    )


def test_infra_has_no_reward_and_leaves_the_group():
    value = reward(Verdict("infra:worker_crash", compiled=False, q=0.0), CONFIG)
    assert math.isnan(value)
    advantages = group_advantages([1.0, value, -1.0])
    assert torch.equal(advantages[[0, 2]], group_advantages([1.0, -1.0]))
    assert advantages[1] == 0.0


def test_defaults_and_zero_weight():
    assert reward(passed(3.0)) == 1.0 + RewardConfig().speed_weight * 2.0
    assert reward(passed(3.0), RewardConfig(speed_weight=0)) == 1.0
    assert reward(passed(3.0), RewardConfig(speedup_cap=0)) == 1.0


def test_reward_reads_nothing_but_the_six_fields():
    other = passed(2.0, reward=-7.0, detail="x", task="t", backend="cuda", evidence={"q": 0})
    assert reward(other, CONFIG) == reward(passed(2.0), CONFIG)


@pytest.mark.parametrize("speedup", [math.nan, math.inf, -1.0])
def test_unusable_speedups_are_refused(speedup):
    with pytest.raises(ValueError, match="speedup must be"):
        reward(passed(speedup), CONFIG)


@pytest.mark.parametrize(
    "fields",
    [{"speed_weight": -0.1}, {"speedup_cap": math.nan}, {"speedup_cap": math.inf}, {"speed_weight": "fast"}],
)
def test_reward_config_names_the_bad_field(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        RewardConfig(**fields)


@given(
    st.sampled_from([kind for kind in CATEGORIES if kind != "infra"]),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, True, False]),
    st.sampled_from([None, 0.0, 0.5, 1.0]) | st.floats(0, 1),
    st.none() | st.floats(0, 100),
)
def test_reward_is_at_least_one_exactly_for_unrefuted_ok(category, compiled, correct, legal, q, speedup):
    verdict = Verdict(category, compiled=compiled, correct=correct, legal=legal, q=q, speedup=speedup)
    value = reward(verdict, CONFIG)
    assert -1.0 <= value <= 3.0
    clean = category == "ok" and False not in (compiled, correct, legal) and q in (None, 1.0)
    assert success(value) == clean
    assert clean or value <= 0.0  # rounding lets q just under 1 reach 0, never 1


@given(st.floats(0, 20), st.floats(0, 20))
def test_reward_never_falls_with_speed(a, b):
    low, high = sorted((a, b))
    assert reward(passed(low), CONFIG) <= reward(passed(high), CONFIG)


def test_success_is_one_or_more():
    assert success(1.0) and success(2.5)
    assert not success(0.999) and not success(-1.0)
    with pytest.raises(ValueError, match="NaN"):
        success(math.nan)


def test_advantages_by_hand():
    # mean 0, sample variance (1 + 1 + 0 + 0) / 3
    std = math.sqrt(2 / 3)
    expected = torch.tensor([1.0, -1.0, 0.0, 0.0]) / (std + 0.5)
    assert torch.allclose(group_advantages([1.0, -1.0, 0.0, 0.0], eps=0.5), expected)
    population = torch.tensor([1.0, -1.0, 0.0, 0.0]) / math.sqrt(2 / 4)
    assert torch.allclose(group_advantages([1.0, -1.0, 0.0, 0.0], eps=0.0, correction=0), population)


def test_equal_rewards_give_exact_zeros_even_without_eps():
    for rewards in ([0.1] * 3, [-1.0] * 8, [[0.7] * 7, [1.1] * 7]):
        advantages = group_advantages(rewards, eps=0.0)
        assert torch.equal(advantages, torch.zeros_like(torch.tensor(rewards)))


@pytest.mark.parametrize("rewards", [[1.0], [math.nan], [math.nan, 1.0], [math.nan] * 3, []])
def test_groups_with_fewer_than_two_verdicts_give_zeros(rewards):
    assert group_advantages(rewards, eps=0.0).tolist() == [0.0] * len(rewards)


def test_groups_do_not_see_each_other():
    rewards = torch.tensor([[1.0, -1.0, 0.5], [2.0, -1.0, math.nan], [0.0, 0.0, 0.0]], dtype=torch.float64)
    together = group_advantages(rewards)
    assert together.shape == rewards.shape and together.dtype == torch.float64
    for row, expected in zip(rewards, together, strict=True):
        assert torch.equal(group_advantages(row), expected)
    assert not torch.isnan(together).any()


@given(rewards_lists)
def test_advantages_are_centred_and_ordered_like_rewards(rewards):
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64))
    assert abs(advantages.sum().item()) < 1e-6 * len(rewards)
    assert (advantages.abs() <= (len(rewards) - 1) / math.sqrt(len(rewards)) + 1e-9).all()
    order = sorted(range(len(rewards)), key=rewards.__getitem__)
    assert (advantages[order].diff() >= 0).all()


@given(rewards_lists, st.floats(-5, 5), st.floats(0.5, 4))
def test_advantages_ignore_shift_and_scale(rewards, shift, scale):
    base = torch.tensor(rewards, dtype=torch.float64).round(decimals=2)
    assert torch.allclose(
        group_advantages(base, eps=0.0),
        group_advantages(base.add(shift).mul(scale).round(decimals=9), eps=0.0),
        atol=1e-5,
    )


@pytest.mark.parametrize(
    ("rewards", "options", "message"),
    [
        ([1.0, math.inf], {}, "finite"),
        (1.0, {}, "shape"),
        (torch.zeros(2, 2, 2), {}, "shape"),
        ([1.0, 0.0], {"eps": -1e-6}, "eps"),
        ([1.0, 0.0], {"eps": math.nan}, "eps"),
        ([1.0, 0.0], {"correction": 2}, "correction"),
    ],
)
def test_advantages_refuse_bad_input(rewards, options, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(rewards, **options)
