"""MirrorPop (Eq. 19-21): drop a response whose tokens drifted from the rollout policy in either direction.

Shapes: `B` responses, `T` tokens. `log_ratio_BT` = log pi_theta - log pi_rollout; `mask_BT` is 1 on response
tokens. Whatever stands at masked positions, NaN included, is never read. No gradient flows through a mask.
"""

from __future__ import annotations

import torch

from musalib.checks import number

VANILLA_LOW, VANILLA_HIGH = 0.5, 2.0  # trust interval of the vanilla baseline; undisclosed, chosen here
INFINITE = 1e30  # stands for an infinite log ratio, so that infinities of both signs still have a mean
ROUNDING = 8  # an equality with the threshold counts as inside, up to this many machine epsilons


def mirror_pop_mask(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor, delta: float) -> torch.Tensor:
    """M_i = 1[mean_t |log rho_it| <= delta], Eq. 21, as bool [B]; delta >= 0 in log space.

    A row without response tokens has drifted nowhere: it is kept, and adds nothing to the loss.
    Raises ValueError on a negative or NaN delta, shapes that differ, and NaN at a response token.

    >>> log_ratio = torch.tensor([[10.0, 0.1], [1.1, 0.9]]).log()
    >>> mirror_pop_mask(log_ratio, torch.ones(2, 2), delta=0.3)
    tensor([False,  True])
    """
    if not (delta := number("delta", delta)) >= 0.0:
        raise ValueError(f"delta is a threshold on mean |log rho| and must be >= 0, got {delta}")
    drift_B = row_mean(*checked(log_ratio_BT, mask_BT), absolute=True)
    return drift_B <= delta * (1.0 + ROUNDING * torch.finfo(drift_B.dtype).eps)


def mirror_pop_statistic(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """exp(mean_t |log rho|) = geometric mean of max(rho, 1/rho), Eq. 19-20, [B]; 1 for a row without tokens."""
    return row_mean(*checked(log_ratio_BT, mask_BT), absolute=True).exp()


def signed_statistic(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
    """exp(mean_t log rho), the vanilla geometric mean in which drifts cancel, [B]; 1 for a row without tokens."""
    return row_mean(*checked(log_ratio_BT, mask_BT), absolute=False).exp()


def vanilla_mask(
    log_ratio_BT: torch.Tensor,
    mask_BT: torch.Tensor,
    low: float = VANILLA_LOW,
    high: float = VANILLA_HIGH,
) -> torch.Tensor:
    """The baseline that MirrorPop replaces: keep where exp(mean_t log rho) lies in [low, high], bool [B]."""
    low, high = number("low", low), number("high", high)
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"the trust interval must hold 1, 0 <= low <= 1 <= high; got low={low}, high={high}")
    statistic_B = signed_statistic(log_ratio_BT, mask_BT)
    slack = ROUNDING * torch.finfo(statistic_B.dtype).eps
    return (statistic_B >= low * (1.0 - slack)) & (statistic_B <= high * (1.0 + slack))


def checked(log_ratio_BT: torch.Tensor, mask_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair as (at least float32 log ratios with 0 at masked positions, bool mask); gradients survive."""
    if log_ratio_BT.dim() != 2 or not log_ratio_BT.is_floating_point():
        raise ValueError(
            f"log ratios must be a float tensor [B, T], got {log_ratio_BT.dtype} {list(log_ratio_BT.shape)}"
        )
    if mask_BT.shape != log_ratio_BT.shape:
        raise ValueError(
            f"mask must have the shape of the log ratios {list(log_ratio_BT.shape)}, got {list(mask_BT.shape)}"
        )
    mask = mask_BT.to(log_ratio_BT.device)
    active_BT = mask.bool()
    if not torch.equal(active_BT.to(mask.dtype), mask):
        raise ValueError("a mask holds only 0 and 1 (or bool)")
    wide = torch.promote_types(log_ratio_BT.dtype, torch.float32)
    clean_BT = torch.where(active_BT, log_ratio_BT, 0.0).to(wide).clamp(-INFINITE, INFINITE)
    if torch.isnan(clean_BT).any():
        row = int(torch.isnan(clean_BT).any(dim=1).nonzero()[0])
        raise ValueError(f"log ratio of response {row} is NaN at a response token; finite values are allowed")
    return clean_BT, active_BT


@torch.no_grad()
def row_mean(clean_BT: torch.Tensor, active_BT: torch.Tensor, absolute: bool) -> torch.Tensor:
    """Mean (of magnitudes, if `absolute`) over the active tokens of each row, [B]; 0 for a row without any."""
    values_BT = clean_BT.abs() if absolute else clean_BT
    return values_BT.sum(dim=1) / active_BT.sum(dim=1).clamp(min=1)
