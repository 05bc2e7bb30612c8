"""Checks of numbers that callers pass in: every refusal says what came, what is allowed and, if clear, what was meant."""

from __future__ import annotations

import math
import operator
from typing import Any


def number(name: str, value: Any) -> float:
    """`value` as a float; ValueError when it is no number or NaN."""
    try:
        result = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if math.isnan(result):
        raise ValueError(f"{name} must be a number, got NaN")
    return result


def not_negative(name: str, value: Any) -> float:
    """A finite number >= 0."""
    result = number(name, value)
    if result < 0 or math.isinf(result):
        raise ValueError(f"{name} must be finite and >= 0, got {value}")
    return result


def share(name: str, value: Any) -> float:
    """A number in [0, 1]; a percentage is recognised and named."""
    result = number(name, value)
    if not 0.0 <= result <= 1.0:
        hint = f"; did you mean {result / 100:g}?" if 1.0 < result <= 100.0 else ""
        raise ValueError(f"{name} must lie in [0, 1], got {value}{hint}")
    return result


def whole(name: str, value: Any, at_least: int = 0) -> int:
    """A whole number >= `at_least`."""
    try:
        result = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if result < at_least:
        raise ValueError(f"{name} must be >= {at_least}, got {result}")
    return result
