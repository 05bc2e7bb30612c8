"""The comparison. Runs in the judge's process, on raw bytes, with numpy; no candidate code is ever loaded here."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

# Relative tolerance by dtype. The absolute part is `ABSOLUTE` of the reference's own root mean square, so that zeros
# never pass for small outputs. Chosen here: the paper says only "task-specific" (KernelBench: 1e-4 for fp32, 1e-2 below).
RELATIVE = {"float64": 1e-7, "float32": 1e-4, "bfloat16": 1.6e-2, "float16": 2e-3}
ABSOLUTE = {"float64": 1e-8, "float32": 1e-4, "bfloat16": 1.6e-2, "float16": 2e-3}
INTEGERS = {"uint8", "int8", "int16", "int32", "int64", "bool", "uint16", "uint32", "uint64"}
CHUNK = 1 << 22  # elements compared at once, so that a 16 GiB output needs no 16 GiB of scratch


@dataclass(frozen=True)
class Mismatch:
    """`kind` completes `correctness_error:`; the message holds no expected value."""

    kind: str
    message: str
    max_abs: float | None = None
    max_rel: float | None = None


def compare(
    expected: Any, expected_bytes: memoryview, got: Any, got_bytes: memoryview, tolerance: float | None
) -> tuple[Mismatch | None, dict[str, float]]:
    """First mismatch or None, and the worst errors seen over all tensors."""
    worst = {"max_abs": 0.0, "max_rel": 0.0}
    left, right = [0], [0]

    def walk(want: Any, have: Any, place: str) -> Mismatch | None:
        if have.get("t") == "bad":
            return Mismatch("structure", f"{place} must be a plain torch.Tensor, got {have.get('why')}")
        if want["t"] in ("list", "tuple") or have["t"] in ("list", "tuple"):
            if want["t"] not in ("list", "tuple") or have["t"] not in ("list", "tuple"):
                return Mismatch("structure", f"{place}: expected {_describe(want)}, got {_describe(have)}")
            if len(want["v"]) != len(have["v"]):
                return Mismatch(
                    "structure", f"{place}: expected {len(want['v'])} values, got {len(have['v'])}"
                )
            for index, (a, b) in enumerate(zip(want["v"], have["v"], strict=True)):
                if found := walk(a, b, f"{place}[{index}]"):
                    return found
            return None
        if want["t"] == "dict":
            if have["t"] != "dict" or [k for k, _ in want["v"]] != [k for k, _ in have["v"]]:
                return Mismatch(
                    "structure", f"{place}: expected a dict with the reference's keys, got {_describe(have)}"
                )
            for (key, a), (_, b) in zip(want["v"], have["v"], strict=True):
                if found := walk(a, b, f"{place}[{key!r}]"):
                    return found
            return None
        if want["t"] != "tensor":
            return (
                None
                if want == have or _same_number(want, have)
                else Mismatch("values", f"{place}: wrong {want['t']}")
            )
        if have["t"] != "tensor":
            return Mismatch("structure", f"{place}: expected a tensor, got {_describe(have)}")
        a = _take(want, expected_bytes, left)
        b = _take(have, got_bytes, right)
        if want["dtype"] != have["dtype"]:
            return Mismatch("dtype", f"{place}: expected dtype {want['dtype']}, got {have['dtype']}")
        if want["shape"] != have["shape"]:
            return Mismatch("shape", f"{place}: expected shape {want['shape']}, got {have['shape']}")
        return _values(a, b, want["dtype"], want["shape"], place, tolerance, worst)

    try:
        return walk(expected, got, "output"), worst
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return Mismatch("structure", f"the output could not be read ({type(error).__name__})"), worst


def _describe(item: Any) -> str:
    return (
        "None"
        if item["t"] == "value" and item["v"] is None
        else {"value": "a plain value"}.get(item["t"], f"a {item['t']}")
    )


def _same_number(want: Any, have: Any) -> bool:
    if want["t"] not in ("int", "float") or have["t"] != want["t"]:
        return False
    return math.isclose(float(want["v"]), float(have["v"]), rel_tol=1e-5, abs_tol=1e-7)


def _take(item: Any, payload: memoryview, offset: list[int]) -> memoryview:
    start, size = offset[0], int(item["bytes"])
    if size < 0 or start + size > len(payload):
        raise ValueError("payload shorter than its description")
    offset[0] = start + size
    return payload[start : start + size]


def _array(data: memoryview, dtype: str) -> np.ndarray:
    """Numbers as float64 or complex128; integers as they are."""
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype in INTEGERS:
        return np.frombuffer(data, np.bool_ if dtype == "bool" else dtype)
    raw = np.frombuffer(data, dtype)
    return raw.astype(np.complex128 if dtype.startswith("complex") else np.float64)


def _values(
    a: memoryview,
    b: memoryview,
    dtype: str,
    shape: list[int],
    place: str,
    tolerance: float | None,
    worst: dict[str, float],
) -> Mismatch | None:
    if len(a) != len(b):
        return Mismatch("values", f"{place}: {len(b)} bytes where {len(a)} belong")
    if dtype in INTEGERS:
        return _exact(a, b, dtype, shape, place)
    if not len(a):
        return None
    base = dtype.replace("complex64", "float32").replace("complex128", "float64")
    relative = tolerance if tolerance is not None else RELATIVE.get(base, 1e-2)
    scale = tolerance if tolerance is not None else ABSOLUTE.get(base, 1e-2)
    item = len(a) // max(1, math.prod(shape))
    step = CHUNK * item
    absolute = scale * _magnitude(a, dtype, step)
    wrong, first, total = 0, None, 0.0
    for start in range(0, len(a), step):
        want, have = _array(a[start : start + step], dtype), _array(b[start : start + step], dtype)
        with np.errstate(all="ignore"):
            finite = np.isfinite(want)
            same = (np.isnan(want) & np.isnan(have)) | (want == have)
            error = np.abs(have - want)
            error[~finite] = 0.0
            limit = absolute + relative * np.abs(want)
            bad = ~same & (~finite | ~(error <= limit))
            ok = np.isfinite(error)
            if ok.any():
                worst["max_abs"] = max(worst["max_abs"], float(error[ok].max()))
                total += float(error[ok].sum())
                size = np.abs(want) + (absolute or 1e-30)
                worst["max_rel"] = max(worst["max_rel"], float((error[ok] / size[ok]).max()))
            if bad.any():
                wrong += int(bad.sum())
                if first is None:
                    first = (start // item + int(np.argmax(bad)), have[int(np.argmax(bad))])
    if not wrong:
        return None
    count = math.prod(shape)
    position = [int(i) for i in np.unravel_index(first[0], shape)] if shape else []
    if not np.isfinite(first[1]):
        note = f"got {first[1]}"
    else:
        note = f"max abs error {worst['max_abs']:.3g}, mean abs error {total / count:.3g}"
    return Mismatch(
        "values",
        f"{place}: {wrong} of {count} elements differ, first at {position}; {note}",
        worst["max_abs"],
        worst["max_rel"],
    )


def _magnitude(a: memoryview, dtype: str, step: int) -> float:
    """Root mean square of the finite values of the reference."""
    total, count = 0.0, 0
    for start in range(0, len(a), step):
        want = _array(a[start : start + step], dtype)
        finite = np.abs(want[np.isfinite(want)])
        total += float((finite**2).sum())
        count += finite.size
    return math.sqrt(total / count) if count else 0.0


def _exact(a: memoryview, b: memoryview, dtype: str, shape: list[int], place: str) -> Mismatch | None:
    if bytes(a) == bytes(b):
        return None
    want, have = _array(a, dtype), _array(b, dtype)
    bad = np.flatnonzero(want != have)
    if not len(bad):
        return None
    position = [int(i) for i in np.unravel_index(int(bad[0]), shape)] if shape else []
    return Mismatch(
        "values", f"{place}: {len(bad)} of {want.size} elements differ, first at {position}", None, None
    )
