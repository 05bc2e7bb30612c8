"""PrimeEcho, Buffered Dynamic Retry, MirrorPop and the loss they meet in: pure functions of plain numbers and tensors."""

from musalib.stabilizers.buffered_retry import BufferedRetry, RetryGroup, RetryTask
from musalib.stabilizers.loss import policy_loss
from musalib.stabilizers.mirror_pop import (
    mirror_pop_mask,
    mirror_pop_statistic,
    signed_statistic,
    vanilla_mask,
)
from musalib.stabilizers.prime_echo import early_bonus, prime_echo

__all__ = [
    "BufferedRetry",
    "RetryGroup",
    "RetryTask",
    "early_bonus",
    "mirror_pop_mask",
    "mirror_pop_statistic",
    "policy_loss",
    "prime_echo",
    "signed_statistic",
    "vanilla_mask",
]
