"""The clipped policy loss with sequence masks (Eq. 5 and 17).

Shapes: `B` responses, `T` tokens; all logarithms natural.
"""

from __future__ import annotations

import math

import torch

from musalib.checks import not_negative, whole
from musalib.stabilizers.mirror_pop import checked, mirror_pop_mask, row_mean


def policy_loss(
    log_ratio_BT: torch.Tensor,
    advantage_B: torch.Tensor,
    mask_BT: torch.Tensor,
    eps_low: float = 0.2,  # undisclosed; chosen here
    eps_high: float = 0.28,  # undisclosed; chosen here
    delta: float | None = None,
    ref_log_ratio_BT: torch.Tensor | None = None,
    beta: float = 0.0,  # undisclosed; chosen here
    *,
    keep_B: torch.Tensor | None = None,
    group_size: int | None = None,
) -> tuple[torch.Tensor, dict[str, float]]:
    """Loss to minimise and its diagnostics, Eq. 5 (delta=None) and Eq. 17 (with MirrorPop's delta).

        - sum_i M_i sum_t min(rho A, clip(rho, 1-eps_low, 1+eps_high) A) / sum_i M_i L_i  +  beta * KL

    `log_ratio_BT` = log pi_theta - log pi_rollout. `mask_BT` is 1 on the response tokens to train; nothing
    else is read, not even NaN. Dropped responses leave numerator and denominator; the KL term, k3 of
    `ref_log_ratio_BT` = log pi_ref - log pi_theta, averages over ALL response tokens and is never masked.
    With nothing kept the policy term is 0 with zero gradient.

    `keep_B` (bool) drops further rows, e.g. `vanilla_mask(...)`. `group_size` makes consecutive rows groups
    that are normalised one by one and then averaged; by default the batch is one group. A sample without
    a verdict needs a zero mask row: advantage 0 alone would leave its tokens in the denominator.

    Computes in at least float32. Log ratios beyond what `exp` can hold are cut there, with zero gradient.
    Raises ValueError on shapes that differ, NaN, and values out of range.
    """
    eps_low, eps_high, beta = (
        not_negative(name, value)
        for name, value in (("eps_low", eps_low), ("eps_high", eps_high), ("beta", beta))
    )
    if eps_low > 1.0:
        raise ValueError(f"eps_low must lie in [0, 1], so that 1 - eps_low is a ratio; got {eps_low}")
    if beta > 0.0 and ref_log_ratio_BT is None:
        raise ValueError("beta > 0 needs ref_log_ratio_BT = log pi_ref - log pi_theta")
    clean_BT, active_BT = checked(log_ratio_BT, mask_BT)
    advantage_B1 = checked_rows("advantage", advantage_B, clean_BT)[:, None]
    rows_B = rows_to_keep(clean_BT, active_BT, delta, keep_B)
    kept_BT = active_BT & rows_B[:, None]

    # unbounded, a dropped token's overflow would turn its zero gradient into NaN
    ratio_BT = bounded(clean_BT).exp()
    unclipped_BT = ratio_BT * advantage_B1
    clipped_BT = ratio_BT.clamp(1.0 - eps_low, 1.0 + eps_high) * advantage_B1
    gain_B = torch.where(kept_BT, torch.minimum(unclipped_BT, clipped_BT), 0.0).sum(dim=1)
    policy_term = -group_mean(gain_B, kept_BT.sum(dim=1), group_size)

    kl_term = kl_to_reference(ref_log_ratio_BT, active_BT, beta)
    loss = policy_term if kl_term is None else policy_term + beta * kl_term
    clipped_share = token_share(kept_BT & (clipped_BT < unclipped_BT), kept_BT)
    metrics = drift_metrics(clean_BT, active_BT, rows_B) | {
        "policy_loss": policy_term.item(),
        "clip_share": clipped_share,
        "kl": 0.0 if kl_term is None else kl_term.item(),
    }
    return loss, metrics


def rows_to_keep(
    clean_BT: torch.Tensor, active_BT: torch.Tensor, delta: float | None, keep_B: torch.Tensor | None
) -> torch.Tensor:
    """M_i of Eq. 17, bool [B]: MirrorPop's mask where delta is given, and the caller's where it is."""
    rows_B = torch.ones(len(clean_BT), dtype=torch.bool, device=clean_BT.device)
    if delta is not None:
        rows_B &= mirror_pop_mask(clean_BT.detach(), active_BT, delta)
    if keep_B is not None:
        rows_B &= checked_rows("keep", keep_B, clean_BT).bool()
    return rows_B


def group_mean(gain_B: torch.Tensor, length_B: torch.Tensor, group_size: int | None) -> torch.Tensor:
    """Mean over groups of (token sum / kept tokens); a group with nothing kept contributes 0."""
    size = len(gain_B) if group_size is None else whole("group_size", group_size, at_least=1)
    if size and len(gain_B) % size:
        raise ValueError(f"group_size {size} does not divide the {len(gain_B)} rows of the batch")
    groups = len(gain_B) // size if size else 1
    gain_P = gain_B.reshape(groups, size).sum(dim=1)
    # masked sequences leave the denominator too (Eq. 17)
    length_P = length_B.reshape(groups, size).sum(dim=1)
    return (gain_P / length_P.clamp(min=1)).sum() / max(groups, 1)


def kl_to_reference(
    ref_log_ratio_BT: torch.Tensor | None, active_BT: torch.Tensor, beta: float
) -> torch.Tensor | None:
    """k3 = exp(d) - d - 1 with d = log pi_ref - log pi_theta, averaged over all response tokens."""
    if ref_log_ratio_BT is None:
        return None
    clean_BT = bounded(checked(ref_log_ratio_BT, active_BT)[0])
    with torch.set_grad_enabled(torch.is_grad_enabled() and beta > 0.0):
        return (clean_BT.expm1() - clean_BT).sum() / active_BT.sum().clamp(min=1)


def bounded(log_ratio_BT: torch.Tensor) -> torch.Tensor:
    """Cut to what `exp` can hold with room for a sum over many tokens: +-68 in float32."""
    limit = math.log(torch.finfo(log_ratio_BT.dtype).max) - 20.0
    return log_ratio_BT.clamp(-limit, limit)


def checked_rows(name: str, values_B: torch.Tensor, like_BT: torch.Tensor) -> torch.Tensor:
    """One finite value per response, on the device and in the dtype of `like_BT`; no gradient."""
    if values_B.shape != like_BT.shape[:1]:
        raise ValueError(f"{name} must have shape [{len(like_BT)}], got {list(values_B.shape)}")
    values_B = values_B.detach().to(like_BT.device, like_BT.dtype)
    if not torch.isfinite(values_B).all():
        raise ValueError(f"{name} must be finite; for a sample without a verdict use 0 and a zero mask row")
    return values_B


@torch.no_grad()
def drift_metrics(clean_BT: torch.Tensor, active_BT: torch.Tensor, rows_B: torch.Tensor) -> dict[str, float]:
    """Share of responses and tokens kept and both drift statistics, averaged over responses with tokens."""
    used_B = active_BT.any(dim=1)
    count = used_B.sum().clamp(min=1)
    drift_B = row_mean(clean_BT, active_BT, absolute=True)
    signed_B = row_mean(clean_BT, active_BT, absolute=False)

    def over_responses(values_B: torch.Tensor) -> float:
        return (torch.where(used_B, values_B, 0.0).sum() / count).item()

    return {
        "kept_share": over_responses(rows_B.to(clean_BT.dtype)),
        "kept_token_share": token_share(active_BT & rows_B[:, None], active_BT),
        "mean_abs_log_ratio": over_responses(drift_B),
        "mirror_pop_statistic": over_responses(drift_B.exp()),
        "signed_statistic": over_responses(signed_B.exp()),
    }


def token_share(part_BT: torch.Tensor, whole_BT: torch.Tensor) -> float:
    """Share of the tokens of `whole_BT` that are in `part_BT`; 0 when there are none."""
    return (part_BT.sum() / whole_BT.sum().clamp(min=1)).item()
