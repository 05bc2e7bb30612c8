"""PrimeEcho, MirrorPop, the clipped loss and Buffered Dynamic Retry against the paper's equations."""

import json
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from musalib.stabilizers import (
    BufferedRetry,
    RetryGroup,
    RetryTask,
    mirror_pop_mask,
    mirror_pop_statistic,
    policy_loss,
    prime_echo,
    signed_statistic,
    vanilla_mask,
)

CANCELLING = torch.tensor([[10.0, 0.1]], dtype=torch.float64).log()
ONES = torch.ones(1, 2)


# ---------------------------------------------------------------- PrimeEcho


@pytest.mark.parametrize(
    ("scores", "alpha", "expected"),
    [
        ([1.5], 0.75, 1.5 + 0.3),
        ([-1.0], 0.75, -1.0),
        ([-1.0, 1.0], 0.75, -0.75 + 0.25 + 0.1),
        ([-1.0, -0.25, 2.0], 0.75, -0.75 + 0.5),  # fixed only on turn 3: no bonus
        ([-0.25, -1.0], 0.75, -0.25),  # the first turn may be the best one
        ([-1.0, 1.0, 3.0], 1.0, -1.0 + 0.1),
        ([-1.0, 1.0, 3.0], 0.0, 3.0 + 0.1),
        ([1.0, 3.0], 0.0, 3.0 + 0.3),  # beta1 and beta2 exclude each other
        ([0.99, 0.99], 0.5, 0.99),
    ],
)
def test_prime_echo_by_hand(scores, alpha, expected):
    assert prime_echo(scores, alpha=alpha, beta1=0.3, beta2=0.1) == pytest.approx(expected, abs=1e-12)


def test_prime_echo_defaults_to_alpha_three_quarters():
    assert prime_echo([-1.0, -1.0, 1.0]) == -0.5
    assert prime_echo([0.0]) == 0.0


@given(st.lists(st.floats(-1, 3), min_size=1, max_size=4), st.floats(0, 1))
def test_prime_echo_lies_between_first_and_best_turn(scores, alpha):
    value = prime_echo(scores, alpha=alpha, beta1=1e-9, beta2=0.0)
    assert scores[0] - 1e-8 <= value <= max(scores) + 1e-8
    # the sooner it is fixed, the more it pays
    assert (
        prime_echo([1.0]) > prime_echo([-1.0, 1.0]) > prime_echo([-1.0, -1.0, 1.0]) > prime_echo([-1.0] * 3)
    )


@pytest.mark.parametrize(
    ("scores", "options", "message"),
    [
        ([1.0], {"alpha": 75}, "did you mean 0.75"),
        ([1.0], {"alpha": -0.1}, r"alpha must lie in \[0, 1\]"),
        ([1.0], {"alpha": math.nan}, "alpha"),
        ([1.0], {"beta1": 0.1, "beta2": 0.1}, "beta1 > beta2"),
        ([-1.0], {"beta1": 0.1, "beta2": 0.2}, "beta1 > beta2"),
        ([1.0], {"beta1": 0.1, "beta2": -0.1}, "beta2 >= 0"),
        ([1.0], {"beta1": math.inf, "beta2": 0.1}, "finite"),
        ([], {}, "at least one turn"),
        ([1.0, math.nan], {}, "turn 2"),
        ([math.inf], {}, "turn 1"),
        (1.0, {}, "sequence"),
    ],
)
def test_prime_echo_refuses(scores, options, message):
    with pytest.raises(ValueError, match=message):
        prime_echo(scores, **options)


# ---------------------------------------------------------------- MirrorPop


def test_cancelling_drift_passes_the_signed_mean_and_fails_mirror_pop():
    assert signed_statistic(CANCELLING, ONES).item() == pytest.approx(1.0)
    assert mirror_pop_statistic(CANCELLING, ONES).item() == pytest.approx(10.0)
    assert vanilla_mask(CANCELLING, ONES, low=0.9, high=1.1).tolist() == [True]
    assert mirror_pop_mask(CANCELLING, ONES, delta=0.5).tolist() == [False]
    assert mirror_pop_mask(CANCELLING, ONES, delta=math.log(10.0)).tolist() == [True]


def test_mirror_pop_reads_only_response_tokens():
    log_ratio = torch.tensor([[0.1, 5.0, math.nan], [math.inf, 0.2, 0.4]])
    mask = torch.tensor([[1, 0, 0], [0, 1, 1]])
    assert torch.allclose(mirror_pop_statistic(log_ratio, mask), torch.tensor([0.1, 0.3]).exp())
    assert mirror_pop_mask(log_ratio, mask, 0.2).tolist() == [True, False]
    assert vanilla_mask(log_ratio, mask, 0.9, 1.2).tolist() == [True, False]


def test_vanilla_interval_has_two_ends():
    log_ratio = torch.tensor([[0.5], [-0.5], [0.0], [0.8], [-0.8]])
    kept = vanilla_mask(log_ratio, torch.ones(5, 1), low=math.exp(-0.5), high=math.exp(0.5))
    assert kept.tolist() == [True, True, True, False, False]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_ends_of_the_vanilla_interval_are_kept(dtype):
    for log_end in torch.linspace(0.05, 2.0, 40, dtype=torch.float64).tolist():
        log_ratio = torch.tensor([[log_end] * 3, [-log_end] * 3], dtype=dtype)
        assert vanilla_mask(log_ratio, torch.ones(2, 3), math.exp(-log_end), math.exp(log_end)).all()


def test_row_without_tokens_is_kept_with_statistic_one():
    log_ratio, mask = torch.full((2, 3), 9.0), torch.tensor([[0, 0, 0], [1, 1, 1]])
    assert mirror_pop_mask(log_ratio, mask, 0.0).tolist() == [True, False]
    assert mirror_pop_statistic(log_ratio, mask)[0] == 1.0 == signed_statistic(log_ratio, mask)[0]
    assert mirror_pop_mask(torch.zeros(2, 0), torch.zeros(2, 0), 0.0).tolist() == [True, True]
    assert mirror_pop_mask(torch.zeros(0, 4), torch.zeros(0, 4), 0.0).shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("delta", [0.1, 0.3, 0.7])
def test_the_threshold_itself_is_kept(dtype, delta):
    for length in (1, 3, 1000):
        assert mirror_pop_mask(
            torch.full((1, length), -delta, dtype=dtype), torch.ones(1, length), delta
        ).item()
    assert not mirror_pop_mask(torch.full((1, 3), delta + 1e-4, dtype=dtype), torch.ones(1, 3), delta).item()


def test_infinite_ratios_are_dropped_not_undefined():
    log_ratio = torch.tensor([[math.inf, -math.inf]])
    assert not mirror_pop_mask(log_ratio, ONES, 5.0).item()
    assert signed_statistic(log_ratio, ONES).item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("mask_dtype", [torch.bool, torch.int64, torch.float32])
def test_mirror_pop_takes_any_float_and_any_mask_type(dtype, mask_dtype):
    log_ratio = torch.tensor([[0.25, -0.25], [1.0, -1.0]], dtype=dtype)
    keep = mirror_pop_mask(log_ratio, torch.ones(2, 2, dtype=mask_dtype), 0.5)
    assert keep.dtype == torch.bool and keep.tolist() == [True, False]


log_ratios = st.lists(st.lists(st.floats(-3, 3), min_size=4, max_size=4), min_size=1, max_size=5).map(
    lambda rows: torch.tensor(rows, dtype=torch.float64)
)


@given(log_ratios, st.floats(0, 3), st.randoms())
def test_mirror_pop_is_symmetric_monotone_and_stricter_than_the_mean(log_ratio, delta, random):
    mask = torch.tensor([[random.random() < 0.7 for _ in row] for row in log_ratio])
    keep = mirror_pop_mask(log_ratio, mask, delta)
    assert torch.equal(keep, mirror_pop_mask(-log_ratio, mask, delta))
    assert torch.equal(keep, mirror_pop_mask(log_ratio.abs(), mask, delta))
    assert (keep <= mirror_pop_mask(log_ratio, mask, delta + 0.5)).all()
    assert (keep <= vanilla_mask(log_ratio, mask, math.exp(-delta), math.exp(delta))).all()
    assert (mirror_pop_statistic(log_ratio, mask) >= 1.0).all()


@pytest.mark.parametrize(
    ("log_ratio", "mask", "delta", "message"),
    [
        (CANCELLING, ONES, -0.1, "delta"),
        (CANCELLING, ONES, math.nan, "delta"),
        (CANCELLING, torch.ones(1, 3), 0.1, "shape"),
        (CANCELLING, torch.ones(2), 0.1, "shape"),
        (CANCELLING[0], torch.ones(2), 0.1, r"\[B, T\]"),
        (torch.ones(1, 2, dtype=torch.long), ONES, 0.1, "float"),
        (CANCELLING * math.nan, ONES, 0.1, "response 0 is NaN"),
        (CANCELLING, ONES * 2, 0.1, "only 0 and 1"),
    ],
)
def test_mirror_pop_refuses(log_ratio, mask, delta, message):
    with pytest.raises(ValueError, match=message):
        mirror_pop_mask(log_ratio, mask, delta)


@pytest.mark.parametrize("interval", [(1.1, 2.0), (0.5, 0.9), (-0.1, 2.0), (math.nan, 2.0)])
def test_vanilla_interval_must_hold_one(interval):
    with pytest.raises(ValueError, match=r"must hold 1|low must be"):
        vanilla_mask(CANCELLING, ONES, *interval)


# ---------------------------------------------------------------- the loss


def reference_loss(log_ratio, advantage, mask, eps_low, eps_high, delta, ref_log_ratio, beta, group_size):
    """Eq. 5 / 17 in plain Python floats, loop by loop, on lists of lists."""
    groups = [range(i, i + group_size) for i in range(0, len(log_ratio), group_size)]
    objective = 0.0
    for group in groups:
        numerator, denominator = 0.0, 0
        for i in group:
            tokens = [t for t in range(len(mask[i])) if mask[i][t]]
            if not tokens:
                continue
            drift = sum(abs(log_ratio[i][t]) for t in tokens) / len(tokens)
            keep = 1 if delta is None or drift <= delta else 0
            for t in tokens:
                rho = math.exp(log_ratio[i][t])
                clipped = min(max(rho, 1 - eps_low), 1 + eps_high)
                numerator += keep * min(rho * advantage[i], clipped * advantage[i])
            denominator += keep * len(tokens)
        objective += numerator / denominator / len(groups) if denominator else 0.0
    every = [(i, t) for i in range(len(mask)) for t in range(len(mask[i])) if mask[i][t]]
    kl = sum(math.exp(ref_log_ratio[i][t]) - ref_log_ratio[i][t] - 1 for i, t in every) / max(len(every), 1)
    return -objective + beta * kl


def finite_difference(function, rows, i, t, step=1e-6):
    up, down = [list(row) for row in rows], [list(row) for row in rows]
    up[i][t] += step
    down[i][t] -= step
    return (function(up) - function(down)) / (2 * step)


@pytest.mark.parametrize("delta", [None, 0.3])
@pytest.mark.parametrize("group_size", [6, 2])
@pytest.mark.parametrize("seed", range(4))
def test_loss_and_gradient_match_the_slow_reference(seed, group_size, delta):
    generator = torch.Generator().manual_seed(seed)
    drift = torch.tensor([0.1, 0.2, 0.4, 0.4, 0.5, 1.0], dtype=torch.float64)[:, None]
    log_ratio = (torch.randn(6, 5, generator=generator, dtype=torch.float64) * drift).requires_grad_()
    ref = (torch.randn(6, 5, generator=generator, dtype=torch.float64) * 0.5).requires_grad_()
    advantage = torch.randn(6, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 5, generator=generator) < 0.7
    mask[3] = False
    options = {"eps_low": 0.2, "eps_high": 0.28, "delta": delta, "beta": 0.3, "group_size": group_size}

    loss, metrics = policy_loss(log_ratio, advantage, mask, ref_log_ratio_BT=ref, **options)
    loss.backward()

    plain = (advantage.tolist(), mask.tolist())
    ratio_rows, ref_rows = log_ratio.tolist(), ref.tolist()

    def of_ratio(rows):
        return reference_loss(rows, *plain, ref_log_ratio=ref_rows, **options)

    def of_ref(rows):
        return reference_loss(ratio_rows, *plain, ref_log_ratio=rows, **options)

    assert loss.item() == pytest.approx(of_ratio(ratio_rows), abs=1e-12)
    # the case does exercise what it is about
    assert 0.0 < metrics["kept_share"] < 1.0 if delta is not None else 0.0 < metrics["clip_share"] < 1.0
    for i in range(6):
        for t in range(5):
            assert log_ratio.grad[i, t].item() == pytest.approx(
                finite_difference(of_ratio, ratio_rows, i, t), abs=1e-8
            )
            assert ref.grad[i, t].item() == pytest.approx(finite_difference(of_ref, ref_rows, i, t), abs=1e-8)


def test_clip_is_asymmetric_and_pessimistic():
    def loss_of(ratio, advantage):
        log_ratio = torch.tensor([[ratio]], dtype=torch.float64).log().requires_grad_()
        loss, metrics = policy_loss(log_ratio, torch.tensor([advantage]), torch.ones(1, 1), 0.1, 0.4)
        loss.backward()
        return loss.item(), log_ratio.grad.item(), metrics["clip_share"]

    assert loss_of(2.0, 1.0) == pytest.approx((-1.4, 0.0, 1.0))
    assert loss_of(2.0, -1.0) == pytest.approx(
        (2.0, 2.0, 0.0)
    )  # a worse answer made likelier is never clipped
    assert loss_of(0.5, 1.0) == pytest.approx((-0.5, -0.5, 0.0))
    assert loss_of(0.5, -1.0) == pytest.approx((0.9, 0.0, 1.0))
    assert loss_of(1.0, 3.0) == pytest.approx((-3.0, -3.0, 0.0))


def test_tokens_not_responses_are_averaged():
    # lengths 1 and 3, ratio 1: (1 * 2 - 3 * 1) / 4
    mask = torch.tensor([[1, 0, 0], [1, 1, 1]])
    loss, _ = policy_loss(torch.zeros(2, 3), torch.tensor([2.0, -1.0]), mask)
    assert loss.item() == pytest.approx(0.25)


def test_masked_sequences_leave_the_denominator():
    log_ratio = torch.tensor([[0.0, 0.0], [2.0, -2.0]])
    advantage, mask = torch.tensor([1.0, 1.0]), torch.ones(2, 2)
    loss, metrics = policy_loss(log_ratio, advantage, mask, delta=1.0)
    assert loss.item() == pytest.approx(-1.0)  # -2/2, not -2/4
    assert metrics["kept_share"] == 0.5 and metrics["kept_token_share"] == 0.5
    alone, _ = policy_loss(log_ratio[:1], advantage[:1], mask[:1])
    assert loss.item() == alone.item()


def test_kl_is_not_masked():
    log_ratio = torch.tensor([[0.0], [5.0]])
    ref = torch.tensor([[0.0], [1.0]], requires_grad=True)
    loss, metrics = policy_loss(
        log_ratio, torch.zeros(2), torch.ones(2, 1), delta=0.5, ref_log_ratio_BT=ref, beta=2.0
    )
    loss.backward()
    expected = (math.e - 1 - 1) / 2  # k3 of the dropped response, over both tokens
    assert metrics["kl"] == pytest.approx(expected)
    assert loss.item() == pytest.approx(2.0 * expected)
    assert ref.grad.tolist() == [[0.0], [pytest.approx(math.e - 1)]]


def test_kl_without_weight_is_only_reported():
    log_ratio = torch.zeros(1, 2, requires_grad=True)
    ref = log_ratio + 1.0
    loss, metrics = policy_loss(log_ratio, torch.ones(1), ONES, ref_log_ratio_BT=ref, beta=0.0)
    assert loss.item() == -1.0
    assert metrics["kl"] == pytest.approx(math.e - 2)


@pytest.mark.parametrize("case", ["dropped", "no tokens", "no rows", "no columns"])
def test_nothing_kept_is_zero_with_a_gradient(case):
    shape = {"dropped": (2, 3), "no tokens": (2, 3), "no rows": (0, 3), "no columns": (2, 0)}[case]
    log_ratio = torch.full(shape, 4.0, requires_grad=True)
    mask = torch.full(shape, float(case == "dropped"))
    for group_size in (None, 1):
        loss, metrics = policy_loss(log_ratio, torch.ones(shape[0]), mask, delta=1.0, group_size=group_size)
        (gradient,) = torch.autograd.grad(loss, log_ratio)
        assert loss.item() == 0.0
        assert torch.equal(gradient, torch.zeros(shape))
        assert all(math.isfinite(value) for value in metrics.values())


def test_a_dropped_group_contributes_zero_and_still_counts_as_a_group():
    log_ratio = torch.tensor([[0.0], [0.0], [3.0], [3.0]])
    loss, _ = policy_loss(log_ratio, torch.ones(4), torch.ones(4, 1), delta=1.0, group_size=2)
    assert loss.item() == pytest.approx(-0.5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("huge", [1e4, -1e4, math.inf, -math.inf])
def test_huge_log_ratios_never_poison_the_gradient(huge, dtype):
    # row 0: padding; row 1: dropped by MirrorPop; row 2: sound
    log_ratio = torch.tensor([[0.1, huge], [huge, huge], [0.0, 0.1]], dtype=dtype, requires_grad=True)
    ref = torch.tensor([[0.1, huge], [0.0, 0.0], [0.1, 0.1]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1, 0], [1, 1], [1, 1]])
    advantage = torch.tensor([1.0, -1.0, -1.0])
    loss, _ = policy_loss(log_ratio, advantage, mask, delta=0.5, ref_log_ratio_BT=ref, beta=0.1)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(log_ratio.grad).all() and torch.isfinite(ref.grad).all()
    assert log_ratio.grad[0, 1] == 0.0 == ref.grad[0, 1]
    assert (log_ratio.grad[1] == 0.0).all()
    assert (log_ratio.grad[2] != 0.0).all()


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
@pytest.mark.parametrize("huge", [1e4, -1e4, math.inf])
def test_huge_log_ratios_at_kept_tokens_stay_finite(huge, advantage):
    log_ratio = torch.tensor([[0.0, huge]], requires_grad=True)
    ref = torch.tensor([[0.0, huge]], requires_grad=True)
    loss, _ = policy_loss(log_ratio, torch.tensor([advantage]), ONES, ref_log_ratio_BT=ref, beta=0.1)
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(log_ratio.grad).all() and torch.isfinite(ref.grad).all()


def test_nan_padding_is_never_read():
    log_ratio = torch.tensor([[0.2, math.nan]], requires_grad=True)
    loss, _ = policy_loss(
        log_ratio, torch.ones(1), torch.tensor([[1, 0]]), delta=1.0, ref_log_ratio_BT=log_ratio * 2, beta=0.5
    )
    loss.backward()
    assert torch.isfinite(loss) and log_ratio.grad[0, 1] == 0.0 and log_ratio.grad[0, 0] != 0.0


def test_no_gradient_through_advantage():
    advantage = torch.ones(1, requires_grad=True)
    loss, _ = policy_loss(torch.zeros(1, 2, requires_grad=True), advantage, ONES, delta=1.0)
    loss.backward()
    assert advantage.grad is None


def test_keep_and_delta_combine():
    log_ratio = torch.tensor([[0.0], [0.1], [3.0]])
    keep = torch.tensor([False, True, True])
    loss, metrics = policy_loss(log_ratio, torch.ones(3), torch.ones(3, 1), delta=1.0, keep_B=keep)
    assert loss.item() == pytest.approx(-math.exp(0.1))
    assert metrics["kept_share"] == pytest.approx(1 / 3)


def test_metrics_by_hand():
    log_ratio = torch.tensor([[10.0, 0.1], [1.0, 2.0], [7.0, 7.0]], dtype=torch.float64).log()
    mask = torch.tensor([[1, 1], [1, 1], [0, 0]])
    loss, metrics = policy_loss(log_ratio, torch.tensor([1.0, 1.0, 1.0]), mask)
    assert metrics["mirror_pop_statistic"] == pytest.approx((10.0 + math.sqrt(2.0)) / 2)
    assert metrics["signed_statistic"] == pytest.approx((1.0 + math.sqrt(2.0)) / 2)
    assert metrics["mean_abs_log_ratio"] == pytest.approx((math.log(10) + math.log(2) / 2) / 2)
    assert metrics["clip_share"] == pytest.approx(0.5)  # ratios 10 and 2 of 10, 0.1, 1, 2
    assert metrics["kept_share"] == 1.0 and metrics["policy_loss"] == loss.item() and metrics["kl"] == 0.0
    json.dumps(metrics, allow_nan=False)


@given(log_ratios, st.randoms())
@settings(max_examples=50)
def test_dropping_by_delta_equals_leaving_the_rows_out(log_ratio, random):
    advantage = torch.tensor([random.uniform(-2, 2) for _ in log_ratio], dtype=torch.float64)
    mask = torch.tensor([[random.random() < 0.7 for _ in row] for row in log_ratio])
    keep = mirror_pop_mask(log_ratio, mask, 1.0)
    loss, _ = policy_loss(log_ratio, advantage, mask, delta=1.0)
    expected, _ = policy_loss(log_ratio[keep], advantage[keep], mask[keep])
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)


GOOD = {"log_ratio_BT": torch.zeros(2, 3), "advantage_B": torch.ones(2), "mask_BT": torch.ones(2, 3)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"advantage_B": torch.ones(3)}, r"advantage must have shape \[2\]"),
        ({"advantage_B": torch.ones(2, 3)}, "advantage"),
        ({"advantage_B": torch.tensor([1.0, math.nan])}, "advantage must be finite"),
        ({"mask_BT": torch.ones(2, 2)}, "mask"),
        ({"log_ratio_BT": torch.full((2, 3), math.nan)}, "NaN"),
        ({"eps_low": 1.5}, "eps_low"),
        ({"eps_low": -0.1}, "eps_low"),
        ({"eps_high": math.nan}, "eps_high"),
        ({"delta": -1.0}, "delta"),
        ({"delta": math.nan}, "delta"),
        ({"beta": 0.1}, "ref_log_ratio_BT"),
        ({"beta": -0.1}, "beta"),
        ({"beta": 0.1, "ref_log_ratio_BT": torch.zeros(3, 2)}, "shape"),
        ({"beta": 0.1, "ref_log_ratio_BT": torch.full((2, 3), math.nan)}, "NaN"),
        ({"keep_B": torch.ones(3, dtype=torch.bool)}, "keep"),
        ({"group_size": 3}, "does not divide"),
        ({"group_size": 0}, "group_size"),
    ],
)
def test_policy_loss_refuses(change, message):
    with pytest.raises(ValueError, match=message):
        policy_loss(**(GOOD | change))


# ---------------------------------------------------------------- Buffered Dynamic Retry


def failed_group(name, rewards=(-1.0, -1.0), **fields):
    candidates, feedback = (
        [f"{name}-{i}" for i in range(len(rewards))],
        [f"why {i}" for i in range(len(rewards))],
    )
    return RetryGroup({"id": name}, candidates, list(rewards), feedback, **fields)


def names_of(buffer):
    return [entry.task["id"] for entry in buffer.entries]


@pytest.mark.parametrize(
    ("rewards", "all_failed", "no_positive"),
    [
        ([-1.0, -1.0], True, True),
        ([-1.0, -0.25], False, True),
        ([-1.0, 1.0], False, False),
        ([math.nan, -1.0], True, True),
        ([math.nan, math.nan], False, False),
        ([], False, False),
    ],
)
def test_trigger(rewards, all_failed, no_positive):
    assert bool(BufferedRetry(4, 0.5, 0).observe(failed_group("a", rewards))) == all_failed
    assert (
        bool(BufferedRetry(4, 0.5, 0, trigger="no_positive").observe(failed_group("a", rewards)))
        == no_positive
    )


def test_oldest_goes_first():
    buffer = BufferedRetry(capacity=2, p_buf=1.0, seed=0)
    for name in "abc":
        buffer.observe(failed_group(name))
    assert names_of(buffer) == ["b", "c"] and len(buffer) == 2
    assert {entry.task["id"] for entry in buffer.draw(["p"] * 50)} == {"b", "c"}


def test_the_candidate_that_got_furthest_is_retried():
    plain = BufferedRetry(4, 0.5, 0)
    assert plain.observe(failed_group("a")) == RetryTask({"id": "a"}, "a-0", "why 0")
    kinds = ["compile_error:cpp", "infra:lost", "correctness_error:values", "correctness_error:shape"]
    group = failed_group("a", [-1.0, math.nan, -1.0, -1.0], categories=kinds)
    assert plain.observe(group) == RetryTask({"id": "a"}, "a-2", "why 2")
    partly = BufferedRetry(4, 0.5, 0, trigger="no_positive")
    assert partly.observe(failed_group("a", [-1.0, -0.2, -0.4])).candidate == "a-1"


def test_mappings_and_repeated_retries():
    buffer = BufferedRetry(4, 0.5, 0)
    record = {"task": "t", "candidates": ["c"], "rewards": [-1], "feedback": ["f"], "extra": 1}
    first = buffer.observe(record)
    assert first == RetryTask("t", "c", "f")
    again = buffer.observe(RetryGroup(first, ["c2"], [-1.0], ["f2"]))
    assert again == RetryTask("t", "c2", "f2")


def test_draw_share_order_and_extremes():
    buffer = BufferedRetry(4, p_buf=0.25, seed=1)
    prompts = list(range(4000))
    assert buffer.draw(prompts) == prompts  # nothing buffered yet
    buffer.observe(failed_group("a"))
    drawn = buffer.draw(prompts)
    assert len(drawn) == len(prompts)
    assert all(isinstance(new, RetryTask) or new == old for old, new in zip(prompts, drawn, strict=True))
    assert sum(isinstance(new, RetryTask) for new in drawn) == pytest.approx(1000, abs=100)
    never, always = BufferedRetry(4, 0.0, 0), BufferedRetry(4, 1.0, 0)
    for each in (never, always):
        each.observe(failed_group("a"))
    assert never.draw(prompts) == prompts
    assert all(isinstance(new, RetryTask) for new in always.draw(prompts))


def test_start_step_delays_drawing_not_collecting():
    buffer = BufferedRetry(4, p_buf=1.0, seed=0, start_step=2)
    buffer.observe(failed_group("a"))
    assert buffer.draw(["p"]) == ["p"] and buffer.draw(["p"]) == ["p"]
    assert buffer.draw(["p"])[0].task == {"id": "a"}


@given(st.integers(0, 5), st.integers(0, 6), st.floats(0, 1), st.integers(0, 2**32))
def test_resume_continues_exactly(before, groups, p_buf, seed):
    def fresh(any_seed):
        return BufferedRetry(3, p_buf, any_seed)

    undisturbed = fresh(seed)
    for i in range(groups):
        undisturbed.observe(failed_group(str(i)))
    for _ in range(before):
        undisturbed.draw(["p"] * 4)
    resumed = fresh(seed + 1)
    resumed.load_state_dict(json.loads(json.dumps(undisturbed.state_dict())))
    assert names_of(resumed) == names_of(undisturbed)
    for _ in range(3):
        assert resumed.draw(["p"] * 4) == undisturbed.draw(["p"] * 4)


def test_draws_differ_between_calls_and_seeds():
    def pattern(buffer):
        return [isinstance(x, RetryTask) for x in buffer.draw(["p"] * 64)]

    one, other = BufferedRetry(4, 0.5, 1), BufferedRetry(4, 0.5, 2)
    for buffer in (one, other):
        buffer.observe(failed_group("a"))
    first = pattern(one)
    assert first != pattern(one) and first != pattern(other)


def test_smaller_buffer_keeps_the_newest():
    big, small = BufferedRetry(4, 0.5, 0), BufferedRetry(2, 0.5, 0)
    for name in "abcd":
        big.observe(failed_group(name))
    small.load_state_dict(big.state_dict())
    assert names_of(small) == ["c", "d"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: BufferedRetry(0, 0.5, 0), "capacity must be >= 1"),
        (lambda: BufferedRetry(1.5, 0.5, 0), "capacity"),
        (lambda: BufferedRetry(4, 5, 0), "did you mean 0.05"),
        (lambda: BufferedRetry(4, math.nan, 0), "p_buf"),
        (lambda: BufferedRetry(4, 0.5, 0, trigger="all"), "all_failed, no_positive"),
        (lambda: BufferedRetry(4, 0.5, 0, start_step=-1), "start_step"),
        (lambda: RetryGroup("t", ["a"], [-1.0, -1.0], ["f"]), "one entry per candidate"),
        (lambda: BufferedRetry(4, 0.5, 0).observe({"task": "t"}), "candidates, rewards, feedback missing"),
        (lambda: BufferedRetry(4, 0.5, 0).observe("t"), "a retry group has"),
        (lambda: BufferedRetry(4, 0.5, 0).observe(RetryGroup({1, 2}, ["c"], [-1], ["f"])), "JSON-able"),
        (lambda: BufferedRetry(4, 0.5, 0).load_state_dict({"step": 1}), "seed, entries missing"),
        (
            lambda: BufferedRetry(4, 0.5, 0).load_state_dict(
                {"seed": 0, "step": 0, "entries": [{"task": 1}]}
            ),
            "unreadable",
        ),
    ],
)
def test_buffered_retry_refuses(call, message):
    with pytest.raises(ValueError, match=message):
        call()
